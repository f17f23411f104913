"""The environment `mcp` against a server of ours (mcp_server.py), over stdio and over HTTP on 127.0.0.1."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from tests.ports import free_port
from verl_ext.environments import mcp_connection
from verl_ext.environments.by_name import Environments
from verl_ext.environments.mcp_tools import Mcp
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.protocols.base import Call

pytest.importorskip("mcp")
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
TOOLS = ["put", "fail", "wait", "die", "fork", "show", "environment", "look", "lie"]
TASK = {"raw_prompt": [{"role": "user", "content": "?"}]}


def entry(**settings: object) -> dict:
    return {"name": "mcp", "command": SERVER, "tools": TOOLS} | settings


@pytest.fixture
async def opened():
    """Open environments of an entry, and close them at the end."""
    environments = []

    async def open(**settings: object) -> Mcp:
        settings = {name: value for name, value in entry(**settings).items() if name != "name" and value is not None}
        environments.append(Mcp(**settings))
        await environments[-1].open(TASK)
        return environments[-1]

    yield open
    for environment in environments:
        await environment.close()


@pytest.fixture(scope="module")
def url():
    port = free_port()
    server = subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL)
    while not psutil.Process(server.pid).net_connections():
        assert server.poll() is None
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    server.terminate()
    server.wait()


async def say(environment: Mcp, tool: str, **arguments: object) -> str:
    result = await environment.call(Call(tool, arguments, 0))
    assert not result.failure and (result.error is not None) == ("Error: " in result.output), result
    return result.output


def processes() -> list[psutil.Process]:
    """A keeper and a server for each connection: earlier tests of this worker may have left pools, and `url` has a
    port."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if SERVER[1] in (line := each.cmdline()) and not line[-1].isdecimal():
                found.append(each)
    return found


async def none_is_left() -> None:
    """Wait for the end of all: the keeper's is waited for by `close`, and its group dies at the same moment."""
    while processes():
        await asyncio.sleep(0.01)


async def ended(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.01)


def test_a_model_calls_the_tools_of_a_server_in_the_agent_loop(roll_out, qwen_tokenizer):
    calls = [("put", {"item": "a"}), ("put", {"item": "b"}), ("put", {"item": 7}), ("fail", {"message": "no"})]
    texts = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': each})}\n</tool_call>" for name, each in calls]
    ids = [qwen_tokenizer.encode(text) + [qwen_tokenizer.eos_token_id] for text in [*texts, "done"]]
    settings = {
        "protocol": "hermes",
        "max_tool_calls": 9,
        "response_length": 3000,
        "environment": entry(tools=["put", "fail"]),
    }
    episode, *_ = roll_out(qwen_tokenizer, ids, **settings)
    told = [turn.reply.text for turn in episode.turns if turn.reply]
    assert "1 items, the newest is a" in told[0] and "2 items, the newest is b" in told[1]
    assert "'item' must be string, got 7" in told[2] and "ToolError: no" in told[3]
    shown = qwen_tokenizer.decode(episode.row.prompt_ids)
    assert "Put an item on the pile of this process." in shown and "outlives" not in shown, "`tools` chooses"
    assert episode.use.ok == 2 and episode.use.errors == {"ToolError": 1}
    asyncio.run(none_is_left())


def test_the_model_sees_the_whole_schema_of_an_argument_and_may_use_all_of_it(roll_out, qwen_tokenizer):
    arguments = {"place": {"tags": ["a"]}, "limit": None}
    text = f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': arguments})}\n</tool_call>"
    ids = [qwen_tokenizer.encode(each) + [qwen_tokenizer.eos_token_id] for each in (text, "done")]
    settings = {"protocol": "hermes", "response_length": 3000, "environment": entry(tools=["look"])}
    episode, *_ = roll_out(qwen_tokenizer, ids, **settings)
    shown = qwen_tokenizer.decode(episode.row.prompt_ids)
    assert '"$ref": "#/$defs/Place"' in shown and '"tags": {"type": "array", "items": {"type": "string"}}' in shown
    assert '"limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Limit"}' in shown
    assert '[{"tags": ["a"]}, null]' in episode.turns[0].reply.text and episode.use.ok == 1


async def test_each_episode_has_a_process_of_its_own_and_close_ends_it(opened, tmp_path):
    first = await opened(env={"COLOUR": "red"}, cwd=str(tmp_path))
    second = await opened()
    assert await say(first, "put", item="mine") == "1 items, the newest is mine"
    assert await say(second, "put", item="other") == "1 items, the newest is other", "nobody sees another's pile"
    assert len(processes()) == 2 * 2
    assert await say(first, "environment") == f"{tmp_path} red None"
    await first.close()
    await first.close()
    while len(processes()) > 2:
        await asyncio.sleep(0.01)


async def test_secrets_of_this_process_are_not_the_servers(opened, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    assert (await say(await opened(), "environment")).endswith("None None")


async def test_one_session_is_shared_until_the_last_episode_ends(opened):
    first, second = await opened(shared=True), await opened(shared=True)
    await say(first, "put", item="a")
    assert await say(second, "put", item="b") == "2 items, the newest is b" and len(processes()) == 2
    await first.close()
    assert await say(second, "put", item="c") == "3 items, the newest is c"
    await second.close()
    await none_is_left()
    assert await say(await opened(shared=True), "put", item="d") == "1 items, the newest is d", "a new one"


async def test_a_server_over_http(opened, url):
    environment = await opened(command=None, url=url, headers={"X-Key": "1"})
    assert "the newest is a" in await say(environment, "put", item="a")
    assert await say(environment, "fail", message="no") == "ToolError: Error executing tool fail"


async def test_what_is_no_text_is_named_and_a_giant_answer_is_cut(opened):
    environment = await opened()
    assert await say(environment, "show", size=3) == "[image, not shown]\nxxx"
    assert len(await say(environment, "show", size=3_000_000)) == 1_000_000


# Whose error it is ---------------------------------------------------------------------------------------------------


async def test_what_a_call_does_to_the_episodes_own_process_is_the_models_error(opened):
    environment = await opened(call_s=0.3)
    assert await say(environment, "wait", seconds=0.4) == "TimeoutError: no answer within 0.3 s"
    assert await say(environment, "put", item="a") == "1 items, the newest is a", "the process goes on"
    assert await say(environment, "die") == "ConnectionError: the server has ended; its state is lost"
    assert await say(environment, "put", item="b") == "ConnectionError: the server has ended; its state is lost"


@pytest.mark.parametrize("kind", ["shared", "http"])
async def test_a_server_of_several_episodes_that_does_not_answer_is_the_infrastructures_failure(opened, url, kind):
    settings = {"shared": True} if kind == "shared" else {"command": None, "url": url}
    environment = await opened(call_s=0.3, **settings)
    result = await environment.call(Call("wait", {"seconds": 0.5}, 0))
    assert "no answer within 0.3 s" in result.failure and not result.error
    assert "put" in await say(environment, "put", item=5) and "unknown" in (await say(environment, "nope")).lower()
    if kind == "shared":
        result = await environment.call(Call("die", {}, 0))
        assert "the server has ended" in result.failure and ".log" in result.failure
        assert "the newest is a" in await say(await opened(shared=True), "put", item="a"), "a new process"


async def test_an_answer_that_breaks_the_tools_own_output_schema_is_the_servers_error(opened):
    assert await say(await opened(), "lie") == (
        "AnswerError: the server's answer cannot be used: Tool lie has an output schema but did not return structured "
        "content"
    ), "of an episode's own process, as all that breaks there"
    shared = await opened(shared=True)
    result = await shared.call(Call("lie", {}, 0))
    assert "Tool lie has an output schema" in result.failure and not result.error
    assert "the newest is a" in await say(shared, "put", item="a"), "the session goes on"


async def test_a_server_that_does_not_start_is_the_infrastructures_failure(opened):
    with pytest.raises(ToolUnavailable, match="it did not list its tools within 0.3 s"):
        await opened(command=[*SERVER, "--mute"], start_s=0.3)
    with pytest.raises(ToolUnavailable, match="Connection closed"):
        await opened(command=[sys.executable, "-c", "raise SystemExit('no licence')"])
    with pytest.raises(ToolUnavailable, match="http://127.0.0.1:9/mcp"):
        await opened(command=None, url="http://127.0.0.1:9/mcp")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "python server.py"}, "expected either `command`, a list"),
        ({"url": "http://127.0.0.1:9/mcp"}, "expected either `command`, a list"),
        ({"command": [], "url": "localhost"}, "expected one such as http"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program' here"),
        ({"call_s": 0}, "call_s is 0"),
        ({"tools": ["put", "get"]}, "has no tool 'get'; it has bad name, die"),
        ({"tools": None}, "has a tool 'bad name', which no model can call"),
        ({"command": [sys.executable, "-c", "pass"]}, "Connection closed.*its messages: .*Start it, or correct"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_when_the_run_starts(settings, message):
    with pytest.raises(ValueError, match=message):
        Environments(entry(**settings), None)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"pip install 'verl-retool\[mcp\]'"):
        Environments(entry(start_s=29.0), None)


async def test_what_a_server_writes_goes_to_a_log_in_the_runs_folder(tmp_path, capfd):
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    environment = Mcp(config, command=SERVER, tools=["put"])
    await environment.open(TASK)
    await environment.close()
    assert "the server starts" in (tmp_path / "mcp" / f"{os.getpid()}.log").read_text()
    assert "the server starts" not in "".join(capfd.readouterr())


# What is left behind -------------------------------------------------------------------------------------------------


async def test_what_a_server_started_ends_with_it(opened):
    environment = await opened()
    server, child = map(int, (await say(environment, "fork")).split())
    await environment.close()
    await ended(server)
    await ended(child)


async def test_a_server_that_ignores_its_end_is_killed(opened):
    environment = await opened(command=[*SERVER, "--deaf"])
    started = time.monotonic()
    await environment.close()
    await none_is_left()
    assert time.monotonic() - started < mcp_connection.CLOSE_S


async def test_a_server_ends_with_a_worker_that_is_killed(tmp_path):
    code = (
        "import asyncio, sys\nfrom verl_ext.environments.mcp_tools import Mcp\n"
        "from verl_ext.protocols.base import Call\n"
        f"async def main():\n    environment = Mcp(command={[*SERVER, '--deaf']!r}, tools=['fork'])\n"
        "    await environment.open({'raw_prompt': []})\n"
        "    print((await environment.call(Call('fork', {}, 0))).output, flush=True)\n    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    command, env = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(tmp_path)}
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    server, child = map(int, worker.stdout.readline().split())
    worker.kill()
    worker.communicate()
    await ended(server)
    await ended(child)
    assert not [*tmp_path.glob("retool-mcp-*")]


@pytest.mark.nightly
@pytest.mark.parametrize("shared", [False, True])
async def test_episodes_that_are_given_up_leave_no_process_and_no_file(config, give_up, shared):
    me, count = psutil.Process(), 200
    calls = [("put", {"item": "a"}), ("wait", {"seconds": 0.01})]
    Environments(entry(), config)
    before = me.num_fds()
    assert await give_up(entry(shared=shared), config, calls, count=count, within_s=0.3) < count
    async with asyncio.timeout(20):
        await none_is_left()
        while me.num_fds() > before:
            await asyncio.sleep(0.01)
