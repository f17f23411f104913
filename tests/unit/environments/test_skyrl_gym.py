"""The environment `skyrl_gym` with an environment of SkyRL-gym's form, in the real agent loop."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from verl_ext.environments import skyrl_gym
from verl_ext.environments.by_name import Environments
from verl_ext.environments.skyrl_gym import SkyRlGym
from verl_ext.environments.tool_errors import ToolUnavailable

GUESS = '''
import threading

class Guess:
    """Guess a number; as of SkyRL-gym, whose base class only holds defaults."""
    open, made, waiting, gate = [], [], [], threading.Event()

    def __init__(self, env_config=None, extras=None):
        self.wait()
        self.config, self.extras, self.turns = env_config, extras, 0
        self.number = int(extras["reward_spec"]["ground_truth"])
        self.open.append(self)
        self.made.append(self)

    def wait(self):
        self.waiting.append(self)
        self.gate.wait(10)
        self.waiting.remove(self)

    def init(self, prompt):
        prompt[0]["content"] += f" It is at most {self.config.get('most', 100)}."
        return prompt, {}

    def step(self, action):
        from verl_ext.environments.tool_errors import ToolError
        self.turns += 1
        if "slow" in action:
            self.wait()
        if "tool" in action:
            raise ToolError("say a number")
        if action.startswith("/"):
            __builtins__["open"](action)
        if "host" in action:
            raise ConnectionError("the store is away")
        if "silent" in action:
            return {"observations": [], "reward": 0.0, "done": False, "metadata": {}}
        if action in ("nan", "inf", "None", "much"):
            reward = {"nan": float("nan"), "inf": float("inf"), "None": None, "much": 7}[action]
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        guess = int(action)
        done = guess == self.number or self.turns == self.extras.get("max_turns", 9)
        say = [] if done else [{"role": "tool", "content": "too " + ("small" if guess < self.number else "large")}]
        return {"observations": say, "reward": 2.0 * (guess == self.number) + 0.1, "done": done, "metadata": {}}

    def close(self):
        self.open.remove(self)

class NoStep:
    init = close = print
'''
TASK = {
    "raw_prompt": [{"role": "user", "content": "Guess."}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3},
    "data_source": "guess",
}


@pytest.fixture
def guess(tmp_path):
    """The entry of an environment, its class, and a function that opens one."""
    (tmp_path / "guess.py").write_text(GUESS)
    entry = f"{tmp_path}/guess.py:Guess"

    async def open(**settings: Any) -> SkyRlGym:
        environment = SkyRlGym(None, env=entry, **settings)
        await environment.open(TASK)
        return environment

    from verl_ext.settings.objects import load_object

    open.entry, open.kind = entry, load_object(entry)
    open.kind.gate.set()
    return open


async def wait_until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_each_turn_is_a_step_and_the_last_reward_is_the_score(guess, roll_out, tokenizer):
    ids = [tokenizer.encode(turn, add_special_tokens=False) + [tokenizer.eos_token_id] for turn in ("3", "9", "7")]
    entry = {"name": "skyrl_gym", "env": guess.entry, "config": {"most": 10}, "success": 2.1}
    settings = {"protocol": "hermes", "response_length": 400, "environment": entry}
    episode, _server, _ = roll_out(tokenizer, ids, prompt=TASK, **settings)
    assert "Guess. It is at most 10." in tokenizer.decode(episode.row.prompt_ids)
    text = tokenizer.decode(episode.row.ids)
    assert text.count("<|im_start|>user\n") == 2 and text.index("too small") < text.index("too large")
    assert episode.finish_reason == "answer" and episode.score.acc == 1.0 and episode.score.verdict == "correct"
    assert guess.kind.open == [] and TASK["raw_prompt"][0]["content"] == "Guess.", "closed, and the row is as it was"
    (made,) = guess.kind.made
    assert made.extras["reward_spec"] == {"method": "rule", "ground_truth": "7"} and made.extras["extra_info"] == {
        "index": 3
    }


@pytest.mark.parametrize(
    ("turns", "success", "acc"),
    [
        (["7<|im_end|>"], 2.1, 1.0),
        (["3"], 2.1, 0.1 / 2.1),  # not done: the reward of its last step
        (["much"], 2.1, 1.0),  # at most 1
        ([], 2.1, 0.0),
        (["7"], None, None),  # the row's verifier
    ],
)
async def test_acc_is_the_share_of_a_full_success(guess, turns, success, acc):
    environment = await guess(success=success)
    for turn in turns:
        await environment.reply(turn)
    score = await environment.score(None)
    assert (score.acc if score else None) == pytest.approx(acc)
    await environment.close()
    await environment.close()
    assert guess.kind.open == []


async def test_the_environment_is_told_the_number_of_turns(guess):
    environment = await guess(max_turns=2)
    assert await environment.reply("1") == [{"role": "user", "content": "too small"}]
    assert await environment.reply("1") is None, "done at the second"
    await environment.close()


@pytest.mark.parametrize("action", ["nan", "inf", "None"])
async def test_a_reward_that_is_no_number_is_refused_and_not_scored(guess, action):
    environment = await guess()
    with pytest.raises(ValueError, match="guess.py:Guess gave the reward .*; expected a"):
        await environment.reply(action)
    await environment.close()


async def test_whose_error_an_exception_of_a_step_is(guess):
    environment = await guess()
    assert await environment.reply("tool") == [{"role": "user", "content": "ToolError: say a number"}]
    (message,) = await environment.reply("/no/such/file")
    assert "No such file" in message["content"], "the model named it"
    with pytest.raises(ToolUnavailable, match="the store is away"):
        await environment.reply("host")
    with pytest.raises(ValueError, match="invalid literal") as raised:
        await environment.reply("seven")
    assert "Raised by the environment" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="is not done, but has no observation"):
        await environment.reply("silent")
    await environment.close()


async def test_a_step_that_takes_too_long_ends_the_episode_with_its_reward_so_far(guess, monkeypatch):
    monkeypatch.setattr(skyrl_gym, "CLOSE_S", 5.0)
    environment = await guess(step_s=0.2, success=2.1)
    await environment.reply("3")
    guess.kind.gate.clear()
    assert await environment.reply("slow 7") is None
    assert (await environment.score(None)).acc == pytest.approx(0.1 / 2.1), "neither excluded nor forgiven"
    guess.kind.gate.set()
    await environment.close()
    assert guess.kind.open == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "Guess", "step_s": 600}, "step_s is 600; expected a number of seconds above 0 and below 600"),
        ({"env": "nowhere.py:Guess"}, "cannot be loaded"),
        ({"env": "json:loads"}, "expected a class"),
        ({"env": "NoStep"}, "has no method step"),
        ({"env": "Guess", "success": 0}, "success is 0"),
        ({"env": "Guess", "reward": 1}, "got the settings"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_when_the_run_starts(guess, settings, message):
    if ":" not in settings["env"]:
        settings = settings | {"env": guess.entry.replace("Guess", settings["env"])}
    with pytest.raises(ValueError, match=message):
        Environments({"name": "skyrl_gym", **settings}, None)


# Episodes that are given up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["open", "step"])
async def test_what_runs_in_a_thread_when_an_episode_is_given_up_is_waited_for_and_then_closed(guess, at):
    environment = SkyRlGym(None, env=guess.entry)
    if at == "step":
        await environment.open(TASK)
    guess.kind.gate.clear()
    task = asyncio.create_task(environment.open(TASK) if at == "open" else environment.reply("slow 7"))
    await wait_until(lambda: guess.kind.waiting)
    task.cancel()
    closing = asyncio.create_task(environment.close())
    await asyncio.wait([closing], timeout=0.02)
    assert not closing.done(), "it waits for the thread"
    guess.kind.gate.set()
    await closing
    assert guess.kind.open == [] and len(guess.kind.made) == 1


async def test_200_episodes_that_are_given_up_leave_no_environment_open(guess, give_up):
    entry = {"name": "skyrl_gym", "env": guess.entry}
    assert await give_up(entry, None, (), task=TASK, turns=["3", "4", "5"], within_s=0.01) < 200
    assert guess.kind.open == [] and guess.kind.made
