"""The life of an environment in the real agent loop: it is opened once and closed in any case."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_ext.environments import by_name
from verl_ext.environments.base import Environment, Opening
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable
from verl_ext.episode import CallResult, Score
from verl_ext.outcome import RolloutEnd
from verl_ext.reward.numbers import BrokenReward
from verl_ext.rollout import lives

PARAMETERS = {"type": "object", "properties": {}, "required": []}
SCHEMA = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": PARAMETERS}}


def called(*names: str) -> str:
    calls = [json.dumps({"name": name, "arguments": {}}) for name in names]
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


@pytest.fixture
def say(tokenizer):
    """Turns of the model: texts with the end token."""
    return lambda *texts: [tokenizer.encode(t, add_special_tokens=False) + [tokenizer.eos_token_id] for t in texts]


class World(Environment):
    """An environment that says what the test wants; `log` has what was asked of it."""

    def __init__(self, replies: Any = (), score: Score | None = None, raises: dict[str, Exception] | None = None):
        super().__init__()
        self.replies, self.told, self.raises, self.log = list(replies), score, raises or {}, []

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.raises:
            raise self.raises[what]

    async def open(self, task: Any) -> Opening:
        self._note("open")
        return Opening([{"role": "user", "content": "How many?"}], {"count": SCHEMA})

    async def call(self, call: Any) -> CallResult:
        self._note("call")
        return CallResult(str(self.log.count("call")))

    async def reply(self, text: str) -> list[dict] | None:
        self._note("reply")
        return [{"role": "user", "content": self.replies.pop(0)}] if self.replies else None

    async def score(self, episode: Any) -> Score | None:
        self._note("score")
        return self.told

    async def close(self) -> None:
        self._note("close")


@pytest.fixture
def live(roll_out, tokenizer, monkeypatch):
    """Roll out in a world; returns the episode and the server."""

    def run(world: World, turns: list, makes: Any = None, **settings: Any) -> tuple[Any, Any]:
        monkeypatch.setattr(by_name.Environments, "make", lambda self: makes() if makes else world)
        settings = {"protocol": "hermes", "response_length": 300} | settings
        episode, server, _ = roll_out(tokenizer, turns, **settings)
        return episode, server

    return run


def test_an_environment_gives_the_prompt_the_tools_their_answers_and_the_score(live, say, tokenizer):
    world = World(score=Score.graded(1.0, "2", "counted"))
    episode, server = live(world, say(called("count"), called("count"), "2"))
    assert world.log == ["open", "call", "call", "reply", "score", "close"]
    assert "How many?" in tokenizer.decode(episode.row.prompt_ids)
    told = tokenizer.decode(server.calls[2]["prompt_ids"])
    assert told.index("<|im_start|>tool\n1<|im_end|>") < told.index("<|im_start|>tool\n2<|im_end|>")
    assert episode.score.acc == 1.0 and episode.finish_reason == "answer" and episode.use.ok == 2


class Ended(World):
    """One whose calls end the episode."""

    async def call(self, call: Any) -> CallResult:
        self._note("call")
        return CallResult("submitted", error="killed" if len(self.log) > 2 else None, ends=RolloutEnd.ANSWER)


def test_a_call_may_end_the_episode_and_the_model_reads_nothing_more(live, say):
    world, (turn,) = Ended(score=Score.graded(1.0, "", "counted")), say(called("count", "count"))
    episode, server = live(world, [turn], max_parallel_calls=2)
    assert world.log == ["open", "call", "call", "score", "close"] and episode.finish_reason == "answer"
    assert episode.row.ids == turn and episode.row.mask == [1] * len(turn) and len(server.calls) == 1
    assert (episode.use.ok, dict(episode.use.errors), episode.score.acc) == (1, {"killed": 1}, 1.0)
    assert [call.result.output for call in episode.turns[0].calls] == ["submitted"] * 2


def test_an_environment_may_answer_a_turn_as_the_user_would(live, say, tokenizer):
    world = World(replies=["Are you <|im_end|> sure?"])
    first, second = say("1", "2")
    episode, server = live(world, [first, second])
    reply = episode.row.ids[len(first) : -len(second)]
    assert tokenizer.decode(reply) == (
        "\n<|im_start|>user\nAre you <|im_end|> sure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert reply.count(tokenizer.eos_token_id) == 1, "what it says can end no turn"
    assert episode.row.mask == [1] * len(first) + [0] * len(reply) + [1] * len(second)
    assert server.calls[1]["prompt_ids"] == episode.row.prompt_ids + first + reply
    assert world.log == ["open", "reply", "reply", "score", "close"] and episode.finish_reason == "answer"


def test_a_reply_that_leaves_no_room_to_answer_ends_the_response(live, say):
    (first,) = say("1")
    episode, _ = live(World(replies=["word " * 50]), [first], response_length=len(first) + 20)
    assert episode.finish_reason == "max_tokens" and episode.row.ids == first


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(lives, "RETRY_PAUSE_S", 0.001)


def test_an_environment_that_never_opens_is_the_infrastructures_failure_and_each_try_is_closed(live, no_pause):
    world = World(raises={"open": ToolUnavailable("no machine is free")})
    episode, server = live(world, [])
    assert episode.finish_reason == "sandbox_failure" and episode.exception == "no machine is free"
    assert world.log == ["open", "close"] * lives.ATTEMPTS and server.calls == [] and sum(episode.row.mask) == 0


def test_an_environment_is_opened_again_with_a_new_object(live, say, no_pause, monkeypatch):
    broken, whole = World(raises={"open": ToolUnavailable("not yet")}), World()
    worlds = iter([broken, whole])
    live(whole, say("2"), makes=lambda: next(worlds))
    assert broken.log == ["open", "close"] and whole.log == ["open", "reply", "score", "close"]


def test_a_call_with_state_is_made_once_and_one_without_is_repeated_in_a_validation(live, say, no_pause):
    class Flaky(World):
        async def call(self, call: Any) -> CallResult:
            self._note("call")
            return CallResult("", failure="gone") if self.log.count("call") == 1 else CallResult("42")

    class Stateless(Flaky):
        is_stateless = True

    world = Flaky()
    episode, _ = live(world, say(called("count")), prompt={"call_retries": 2})
    assert world.log.count("call") == 1 and episode.finish_reason == "sandbox_failure"
    world = Stateless()
    episode, _ = live(world, say(called("count"), "42"), prompt={"call_retries": 2})
    assert world.log.count("call") == 2 and episode.finish_reason == "answer"


@pytest.mark.parametrize(("limit", "ends"), [("turn_s", 1), ("episode_s", 2)])
def test_calls_that_run_too_long_end_the_response_as_the_models_failure_and_it_is_scored(live, say, limit, ends):
    class Slow(World):
        async def call(self, call: Any) -> CallResult:
            self._note("call")
            return CallResult("done", run_s=3.0, queue_s=100.0)

    world = Slow()
    episode, _ = live(
        world, say(called("count"), called("count"), "2"), **{limit: {"turn_s": 2.0, "episode_s": 5.0}[limit]}
    )
    assert episode.finish_reason == "timeout" and episode.end.fault == "model"
    assert world.log.count("call") == ends and world.log[-2:] == ["score", "close"]


def test_the_calls_of_a_turn_count_together(live, say):
    class Slow(World):
        async def call(self, call: Any) -> CallResult:
            return CallResult("done", run_s=0.6)

    episode, _ = live(Slow(), say(called("count", "count")), turn_s=1.0, max_parallel_calls=2)
    assert episode.finish_reason == "timeout"


def test_a_call_that_raises_stops_its_siblings_before_the_environment_is_closed(live, say):
    class Torn(World):
        async def call(self, call: Any) -> CallResult:
            number = self.log.count("call")
            self._note("call")
            if number:
                raise KeyError("a bug")
            try:
                await asyncio.sleep(60)
            finally:
                self.log.append("stopped")

    world = Torn()
    with pytest.raises(KeyError, match="a bug"):
        live(world, say(called("count", "count")), max_parallel_calls=2)
    assert world.log == ["open", "call", "call", "stopped", "close"]


@pytest.mark.parametrize("score", [Score.graded(5.0, "", "x"), Score(None, "", "wrong", "x"), 0.0, 1.0])
def test_a_score_that_is_none_stops_the_run(live, say, score):
    with pytest.raises(BrokenReward, match="World returned"):
        live(World(score=score), say("2"))


def test_an_unknown_score_of_an_environment_says_where_it_is_from(live, say):
    episode, _ = live(World(score=Score(None, "", "unknown", "the judge slept")), say("2"))
    assert episode.score.method == f"{lives.BY_ENVIRONMENT}the judge slept"


def test_an_environment_that_cannot_close_costs_no_episode(live, say, caplog):
    episode, _ = live(World(raises={"close": OSError("gone")}), say("2"))
    assert episode.finish_reason == "answer" and "could not be closed" in caplog.text


def test_replays_of_a_notebook_are_counted(live, say):
    class Replayed(World):
        async def call(self, call: Any) -> CallResult:
            return CallResult("2", replays=1)

    episode, _ = live(Replayed(), say(called("count"), called("count"), "2"))
    assert episode.use.replays == 2


def test_a_score_is_asked_for_again_and_a_failed_one_is_unverified(live, say, no_pause):
    world = World(raises={"score": ToolUnavailable("the judge is down")})
    episode, _ = live(world, say("2"))
    assert world.log.count("score") == lives.ATTEMPTS
    assert episode.score.is_unverified and episode.score.acc is None and "the judge is down" in episode.score.method


def test_a_reply_that_fails_is_the_infrastructures_failure(live, say):
    world = World(raises={"reply": ToolUnavailable("the user is away")})
    episode, _ = live(world, say("2"))
    assert episode.finish_reason == "sandbox_failure" and world.log == ["open", "reply", "close"]


def test_an_environment_that_does_not_answer_is_the_infrastructures_failure(live, say, no_pause, monkeypatch):
    class Silent(World):
        async def reply(self, text: str) -> None:
            self._note("reply")
            await asyncio.sleep(60)

    monkeypatch.setattr(lives, "ANSWER_S", 0.05)
    world = Silent()
    episode, _ = live(world, say("2"))
    assert episode.finish_reason == "sandbox_failure" and world.log[-1] == "close"


@pytest.mark.parametrize("at", ["open", "call", "reply", "score"])
def test_an_error_of_ours_is_raised_and_the_environment_is_closed(live, say, at):
    world = World(raises={at: KeyError("a bug")})
    with pytest.raises(KeyError, match="a bug"):
        live(world, say(called("count"), "2"))
    assert world.log[-1] == "close" and world.log.count("close") == 1


@pytest.mark.parametrize(
    ("turn", "settings", "end"),
    [
        (([5, 6], "aborted", {}), {}, "aborted"),
        ([5] * 300, {"response_length": 30}, "max_tokens"),
    ],
)
def test_an_environment_is_closed_after_an_abort_and_after_a_limit(live, turn, settings, end):
    world = World()
    episode, _ = live(world, [turn], **settings)
    assert episode.finish_reason == end and world.log[-1] == "close"
    assert ("score" in world.log) == (end == "max_tokens"), "nothing is scored that the infrastructure failed"


def test_an_episode_that_is_cancelled_closes_its_environment(live, say):
    class Waiting(World):
        async def call(self, call: Any) -> CallResult:
            self._note("call")
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    world = Waiting()
    with pytest.raises(asyncio.CancelledError):
        live(world, say(called("count")))
    assert world.log == ["open", "call", "close"]


def test_an_environment_that_does_not_close_holds_no_episode(live, say, caplog, monkeypatch):
    class Stuck(World):
        async def close(self) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(lives, "CLOSE_S", 0.05)
    episode, _ = live(Stuck(), say("2"))
    assert episode.finish_reason == "answer" and "was not closed in 0.05 s" in caplog.text


# Tools of verl -----------------------------------------------------------------------------------------------------


@pytest.fixture
def counter():
    """A tool of verl's that counts the calls of an instance; `log` has what was asked of it."""
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    class Counter(BaseTool):
        log: list = []
        running = 0

        async def create(self, instance_id=None, **kwargs):
            self.log.append(("create", kwargs))
            if "refused" in kwargs["create_kwargs"]:
                raise ToolError("no such start")
            self.count = 0
            return "the instance", ToolResponse()

        async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
            self.running += 1
            assert self.running == 1, "an instance runs one call at a time"
            await asyncio.sleep(0.01)
            self.running -= 1
            self.count += 1
            self.log.append((instance_id, agent_data.messages[0]["content"], agent_data.tools_kwargs))
            return ToolResponse(text=str(self.count)), 0.0, {}

        async def release(self, instance_id, **kwargs):
            self.log.append(("release", instance_id))
            if self.config.get("breaks"):
                raise OSError("a bug")

    def make(**config: Any) -> Any:
        tool = Counter(config, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        tool.log = []
        return tool

    return make


def test_a_tool_has_one_instance_in_an_episode_and_runs_the_calls_of_a_turn_in_order(roll_out, tokenizer, say, counter):
    tool, kwargs = counter(), {"count": {"create_kwargs": {"start": 1}}}
    episode, server, _ = roll_out(
        *(tokenizer, say(called("count", "count"), called("count"), "3")),
        **{"protocol": "hermes", "response_length": 300, "max_parallel_calls": 2, "tools": [tool]},
        prompt={"tools_kwargs": kwargs},
    )
    ran = ("the instance", "1+1?", kwargs)
    assert tool.log == [("create", {"create_kwargs": {"start": 1}}), ran, ran, ran, ("release", "the instance")]
    told = tokenizer.decode(server.calls[2]["prompt_ids"])
    assert [told.find(f"<|im_start|>tool\n{n}<|im_end|>") > 0 for n in (1, 2, 3)] == [True] * 3
    assert episode.use.calls == 3


def test_a_call_of_an_instance_is_made_once_even_if_its_backend_fails(roll_out, qwen_tokenizer, counter):
    tool = counter()

    async def fail(instance_id, parameters, **kwargs):
        tool.log.append("execute")
        raise ConnectionError("lost after it counted")

    tool.execute = fail
    turn = qwen_tokenizer.encode(called("count")) + [qwen_tokenizer.eos_token_id]
    episode, *_ = roll_out(qwen_tokenizer, [turn], tools=[tool], protocol="hermes", response_length=300)
    assert tool.log.count("execute") == 1 and episode.finish_reason == "sandbox_failure"


def test_a_tool_that_was_not_selected_has_no_instance(roll_out, tokenizer, say, counter):
    tool, settings = counter(), {"protocol": "hermes", "response_length": 300}
    prompt = {"extra_info": {"tool_selection": ["code_interpreter"]}}
    roll_out(tokenizer, say("3"), tools=[tool], prompt=prompt, **settings)
    assert tool.log == []


def test_a_row_that_a_tool_refuses_is_named(roll_out, tokenizer, say, counter):
    prompt = {"tools_kwargs": {"count": {"create_kwargs": {"refused": 1}}}}
    with pytest.raises(ValueError, match=r"'count' refused tools_kwargs.count.create_kwargs=.*no such start"):
        roll_out(tokenizer, say("3"), tools=[counter()], prompt=prompt, protocol="hermes", response_length=300)


def test_a_tool_that_cannot_release_costs_no_episode(roll_out, tokenizer, say, counter, caplog):
    tool = counter(breaks=True)
    episode, *_ = roll_out(tokenizer, say("3"), tools=[tool], protocol="hermes", response_length=300)
    assert episode.finish_reason == "answer" and "count could not release its instance" in caplog.text


def test_the_tool_of_the_guide_keeps_state_within_a_response(roll_out, tokenizer, say):
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    guide = (Path(__file__).parents[3] / "docs" / "guides" / "tools.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "class Notes" in block)
    names = {"BaseTool": BaseTool, "ToolResponse": ToolResponse}
    exec(code, names)
    (settings,) = re.findall(r"```yaml\n(tools:\n.*?)```", guide, re.DOTALL)
    schema = OmegaConf.create(settings).tools[0].tool_schema
    tool = names["Notes"]({}, OpenAIFunctionToolSchema.model_validate(OmegaConf.to_container(schema)))
    turns = [f'<tool_call>{{"name": "note", "arguments": {{"text": "{word}"}}}}</tool_call>' for word in ("a", "b")]
    for _ in range(2):  # another response begins anew
        _, server, _ = roll_out(tokenizer, say(*turns, "3"), tools=[tool], protocol="hermes", response_length=300)
        assert "<|im_start|>tool\n['a', 'b']<|im_end|>" in tokenizer.decode(server.calls[2]["prompt_ids"])
    assert tool.notes == {}
