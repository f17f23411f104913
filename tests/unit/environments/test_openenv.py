"""The environment `openenv` against a server on 127.0.0.1 that speaks OpenEnv's protocol, as its own server does."""

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.unit.environments.openenv_server import Server
from verl_ext.environments.by_name import Environments
from verl_ext.environments.openenv import OpenEnv
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.protocols.base import Call

TASK = {"raw_prompt": [{"role": "user", "content": "Go to 3."}], "extra_info": {"openenv": {"start": 1, "seed": None}}}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
async def opened(server):
    environments = []

    async def open(task: Any = TASK, **settings: Any) -> OpenEnv:
        environments.append(OpenEnv(url=server.url, **settings))
        await environments[-1].open(task)
        return environments[-1]

    yield open
    for environment in environments:
        await environment.close()


async def act(environment: OpenEnv, **action: Any) -> str:
    result = await environment.call(Call("act", action, 0))
    assert not result.failure and (result.error is not None) == ("Error: " in result.output), result
    return result.output


def test_a_model_acts_until_the_episode_is_over_and_the_reward_is_the_score(server, roll_out, qwen_tokenizer):
    def turn(**action: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': 'act', 'arguments': action})}\n</tool_call>"

    texts = [turn(steps=-2), turn(steps="far"), turn(jump=1, steps=1), turn(steps=4), turn(steps=1), "I am there."]
    ids = [qwen_tokenizer.encode(text) + [qwen_tokenizer.eos_token_id] for text in texts]
    settings = {"protocol": "hermes", "max_tool_calls": 9, "response_length": 3000}
    settings["environment"] = {"name": "openenv", "url": server.url, "reset": {"seed": 5}}
    episode, *_ = roll_out(qwen_tokenizer, ids, prompt=TASK, **settings)
    shown = qwen_tokenizer.decode(episode.row.prompt_ids)
    assert "Go to 3.\n\nYou are at 1." in shown and "how far" in shown and "metadata" not in shown
    assert server.resets == [{"seed": 5, "start": 1}]
    told = [each.reply.text for each in episode.turns if each.reply]
    assert "You are at -1." in told[0] and "'steps' must be integer" in told[1]
    assert "ToolError: Invalid message (VALIDATION_ERROR); jump: Extra inputs are not permitted" in told[2]
    assert "You are at 3.\nThe episode is over." in told[3] and "ToolError: the episode is over" in told[4]
    assert episode.score.acc == 1.0 and episode.finish_reason == "answer"
    while server.sessions:
        time.sleep(0.01)


async def test_each_episode_has_its_own_session(opened, server):
    first, second = await opened(), await opened({"raw_prompt": []})
    assert await act(first, steps=1) == "You are at 2." and await act(second, steps=1) == "You are at 1."
    assert (await first.score(None)).acc == pytest.approx(2 / 3) and (await second.score(None)).acc == pytest.approx(
        1 / 3
    )
    assert len(server.sessions) == 2


@pytest.mark.parametrize(("success", "acc"), [(1.0, 2 / 3), (2.0, 1 / 3), (0.5, 1.0), (None, None)])
async def test_acc_is_the_share_of_a_full_success(opened, success, acc):
    environment = await opened(success=success)
    assert (score := await environment.score(None)) is None or (score.acc, score.verdict) == (0.0, "no_answer")
    await act(environment, steps=1)
    score = await environment.score(None)
    assert (score.acc if score else None) == pytest.approx(acc)


async def test_a_server_without_a_schema_gets_any_object(opened, server):
    server.schema = None
    environment = await opened()
    assert await act(environment, action={"steps": 1}) == "You are at 2."
    assert await act(environment) == "You are at 3.\nThe episode is over.", "no argument: an empty action"


@pytest.mark.parametrize("reward", ["NaN", "Infinity", '"much"'])
async def test_a_reward_that_is_no_number_is_refused_and_not_scored(opened, reward):
    environment = await opened()
    with pytest.raises(ValueError, match="openenv: http.* gave the reward .*; expected a"):
        await act(environment, steps={"reward": json.loads(reward), "done": True})


async def test_an_episode_that_ends_without_a_reward_is_refused_unless_a_verifier_scores(opened):
    assert await act(await opened(), steps={"reward": None, "done": False}) == '{"x": 1}', "it may come later"
    with pytest.raises(ValueError, match="gave the reward None"):
        await act(await opened(), steps={"reward": None, "done": True})
    assert "is over" in await act(await opened(success=None), steps={"reward": None, "done": True})


# Whose error it is ---------------------------------------------------------------------------------------------------


async def test_an_action_that_fails_is_the_models_error(opened):
    environment = await opened()
    assert await act(environment, steps=0) == "ToolError: no step (EXECUTION_ERROR)"
    assert await act(environment, steps=1) == "You are at 2.", "the session goes on"


async def test_an_action_that_takes_too_long_is_the_models_error_if_the_server_is_healthy(opened, server):
    environment = await opened(call_s=0.2)
    assert await act(environment, steps="wait") == "TimeoutError: no answer within 0.2 s; the episode is over"
    assert "took too long" in await act(environment, steps=1)
    assert (await environment.score(None)).acc == 0.0
    server.healthy = False
    environment = await opened(call_s=0.2)
    assert "no answer within 0.2 s" in (await environment.call(Call("act", {"steps": "wait"}, 0))).failure


@pytest.mark.parametrize(
    ("steps", "message"), [("drop", "ended the session"), ("babble", "expected a message"), ("broken", "gone")]
)
async def test_a_session_that_breaks_is_the_infrastructures_failure(opened, steps, message):
    environment = await opened()
    assert message in (await environment.call(Call("act", {"steps": steps}, 0))).failure


async def test_a_server_without_a_free_session_is_the_infrastructures_failure(opened, server):
    server.full = True
    with pytest.raises(ToolUnavailable, match="CAPACITY_REACHED"):
        await opened()
    with pytest.raises(ToolUnavailable, match="http://127.0.0.1:9: Cannot connect"):
        await OpenEnv(url="http://127.0.0.1:9").open(TASK)


async def test_a_row_whose_reset_is_refused_is_ours(opened):
    with pytest.raises(ValueError, match="refuses reset.*start: Input should be a number"):
        await opened(TASK | {"extra_info": {"openenv": {"start": "nowhere"}}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000'"),
        ({"url": "http://127.0.0.1:9"}, "/schema cannot be read.*Start the server"),
        ({"success": -1}, "success is -1"),
        ({"call_s": 0}, "call_s is 0"),
        ({"seed": 1}, "got the settings"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_when_the_run_starts(server, settings, message):
    with pytest.raises(ValueError, match=message):
        Environments({"name": "openenv", "url": server.url} | settings, None)


async def test_200_episodes_that_are_given_up_leave_no_session(server, give_up, caplog):
    entry, calls = {"name": "openenv", "url": server.url}, [("act", {"steps": 1})] * 3
    await give_up(entry, None, calls, count=10, within_s=60, task=TASK)
    gc.collect()
    caplog.clear()  # of what earlier tests of this worker have left
    files = psutil.Process().num_fds()
    assert await give_up(entry, None, calls, task=TASK, within_s=0.03) < 200
    async with asyncio.timeout(20):
        while server.sessions or psutil.Process().num_fds() > files:
            await asyncio.sleep(0.01)
    gc.collect()
    assert "Unclosed" not in caplog.text, "aiohttp says so of a session that nobody closed"
