"""The real agent loop, gateway, openai client and starters, between a scripted LLM server and a scripted sandbox."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.conftest import ScriptedSandbox
from tests.unit.rollout import own_agents
from verl_ext.episode import summary_of
from verl_ext.outcome import RolloutEnd
from verl_ext.rollout.client import TurnRequests
from verl_ext.sandbox.client import RunResult

AGENTS = "tests.unit.rollout.own_agents"
BOX = "\\boxed{2}"


class Server:
    """Says the next of `answers` to each request: a text, with the end token; or tokens; or what it raises."""

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers, self.asked = tokenizer, iter(answers), []

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority=0):
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append({"prompt_ids": prompt_ids, "id": request_id, **sampling_params})
        said = next(self.answers)
        if callable(said):
            said = await said()
        if isinstance(said, Exception):
            raise said
        said, fields = said if isinstance(said, tuple) else (said, {"global_steps": 7})
        stop = "completed"
        if said in ("aborted", "error"):
            said, stop = [], said
        if isinstance(said, str):
            said = self.tokenizer.encode(said, add_special_tokens=False) + [self.tokenizer.eos_token_id]
        ids = said[: sampling_params["max_tokens"]]
        log_probs = [-(i + 1) / 1000 for i in range(len(ids))] if sampling_params.get("logprobs") else None
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason=stop, extra_fields=fields)


@pytest.fixture
def make_loop(tokenizer, tmp_path, monkeypatch):
    """The loop of a run with this agent; `sandbox` answers its environment."""
    from verl_ext.rollout.standalone import make_loop

    def make(run, server, results=(), response_length=200, sandbox=None, **settings):
        sandbox = sandbox or ScriptedSandbox(results)
        monkeypatch.setattr("verl_ext.environments.interpreter.shared_client", lambda _: sandbox)
        agent = {"run": run, **settings.pop("own", {})}
        retool = {
            "protocol": "code",
            "repair_json": False,
            "max_tool_calls": 3,
            "run_last_code": False,
            "max_malformed_calls": 3,
            "max_tool_response_tokens": 48,
            "traceback": "last_line",
            "recorder": {"enable": True, "token_share": 1.0, "keep_steps": 1, "max_gb": 1},
            "agent": agent,
            "sandbox": {
                "urls": ["http://127.0.0.1:1"],
                "max_concurrency": 4,
                "timeout_s": 5,
                "memory_limit_mb": 256,
                "max_calls_per_s": None,
                "queue_timeout_s": 5,
                "echo_last_expression": False,
            },
        } | settings
        rollout = {
            "response_length": response_length,
            "prompt_length": 5000,
            "seed": 0,
            "multi_turn": {"max_parallel_calls": 1},
            "agent": {"agent_loop_manager_class": "verl_ext.rollout.workers.LeanAgentLoopManager"},
        }
        config = {"actor_rollout_ref": {"rollout": rollout}, "retool": retool, "data": {}}
        config |= {"trainer": {"default_local_dir": str(tmp_path)}}
        return make_loop(OmegaConf.create(config), server, server.tokenizer, [], hf_model_type="qwen2")

    return make


@pytest.fixture
def play(make_loop, tokenizer):
    """Play one episode; returns it and the server."""

    def run(agent, answers, *, row=None, sampling=None, tokenizer=tokenizer, **settings):
        server = Server(tokenizer, answers)

        async def roll():
            run = f"{AGENTS}:{agent}" if isinstance(agent, str) and ":" not in agent else agent
            loop = make_loop(run, server, **settings)
            task = {"uid": "p", "session_id": 0, "raw_prompt": [{"role": "user", "content": "1+1?"}], **(row or {})}
            try:
                return await loop.roll_out({"temperature": 1.0, "logprobs": True} | (sampling or {}), **task)
            finally:
                await loop.aclose()
                left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                if left:
                    _, left = await asyncio.wait(left, timeout=5)
                assert not left, "nothing runs on"

        return asyncio.run(roll()), server

    return run


def test_a_linear_agent_gives_one_row_of_what_was_sampled(play, tokenizer, encode):
    episode, server = play("twice", ["\\boxed{1}", BOX])
    end = [tokenizer.eos_token_id]
    first, second = encode("\\boxed{1}") + end, encode(BOX) + end
    between = encode("\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")
    row = episode.row
    assert len(episode.rows) == 1 and episode.finish_reason == RolloutEnd.ANSWER
    assert row.prompt_ids == server.asked[0]["prompt_ids"]
    assert row.ids == first + between + second
    assert row.mask == [1] * len(first) + [0] * len(between) + [1] * len(second)
    assert row.log_probs[: len(first)] == [-(i + 1) / 1000 for i in range(len(first))]
    assert server.asked[1]["prompt_ids"] == row.prompt_ids + first + between
    assert {version for *_, version in row.version_spans} == {7}
    assert server.asked[0]["temperature"] == 1.0 and episode.agent.turns == 2
    assert [turn.text for turn in episode.turns] == ["\\boxed{1}<|im_end|>", BOX + "<|im_end|>"]
    assert episode.turns[0].reply.shown == ["2+2?"] and episode.turns[0].reply.role == "user"
    assert [turn.parent for turn in episode.turns] == [None, None]
    summary_of(episode)


def test_versions_lost_servers_and_what_else_a_server_sends_are_kept(play, encode):
    text = encode(BOX)
    requests = TurnRequests("a:1", [(3, 6), (len(text) - 3, 7)], ["c:1"])
    more = TurnRequests("b:1", [(1, 8)], [])
    answers = [(text, {"turn": requests, "x": 1}), ([text[0]], {"turn": more, "x": 2})]
    episode, _ = play("twice", answers, response_length=len(text) + 90)
    second = episode.row.model_spans[1][0]
    assert episode.row.version_spans == [(0, 3, 6), (3, len(text), 7), (second, second + 1, 8)]
    assert episode.lost_servers == ["c:1"] and episode.from_server == {"x": 2}
    assert [turn.server for turn in episode.turns] == ["a:1", "b:1"]


def test_the_agent_is_told_its_task_and_not_the_truth(play, tokenizer):
    info = {"index": 5, "id": "a5", "agent": {"repo": "x"}, "answer": 42, "gold_calls": "[]"}
    row = {"data_source": "d", "reward_model": {"ground_truth": "42"}, "extra_info": info}
    _, server = play("says_what_it_got", [BOX], row=row, response_length=900)
    shown = tokenizer.decode(server.asked[0]["prompt_ids"])
    assert "42" not in shown and "gold" not in shown and "truth" not in shown
    told = [("agent", {"repo": "x"}), ("data_source", "d"), ("id", "a5"), ("index", 5)]
    assert repr(told)[1:-1] in shown


@pytest.mark.parametrize("agent", ["runs_code", "in_a_thread"])
def test_a_tool_of_the_environment_is_called_and_counted(play, agent):
    episode, _server = play(agent, ["\\boxed{1}", BOX], results=["2\n"])
    use, turn = episode.use, episode.turns[0]
    assert (use.calls, use.ok, use.code_lines) == (1, 1, 1) and use.tool_s > 0
    assert [(call.tool, call.result.stdout) for call in turn.calls] == [("code_interpreter", "2\n")]
    assert episode.agent.agent_s < use.tool_s + use.generate_s + 5
    if agent == "runs_code":
        assert turn.reply.shown == ["2"] and use.first_call_token == turn.tokens, "the turn does not show the call"


def test_the_example_with_tools_plays(play, qwen_tokenizer):
    call = 'I count.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(2)"}}\n</tool_call>'
    settings = {"protocol": "hermes", "tokenizer": qwen_tokenizer}  # so that the tools count as the prompt's
    episode, _ = play("docs/own_agent/tools_agent.py:solve", [call, BOX], results=["2\n"], **settings)
    assert len(episode.rows) == 1 and episode.use.calls == 1
    turn = episode.turns[0]
    assert [(call.tool, call.arguments, call.result.stdout) for call in turn.calls] == [
        ("code_interpreter", {"code": "print(2)"}, "2\n")
    ]
    assert turn.reply.shown == ["2"] and turn.reply.role == "tool" and 0 < episode.use.first_call_token < turn.tokens


def test_a_tool_of_the_agents_own_is_recorded_with_what_it_said(play, qwen_tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    episode, _ = play("own_tool", [call, BOX], tokenizer=qwen_tokenizer, response_length=900)
    assert [(call.tool, call.arguments, call.result.output) for call in episode.turns[0].calls] == [
        ("add", {"a": 1}, "the sum")
    ]
    assert (episode.use.ok, len(episode.rows)) == (1, 1)


def test_the_example_with_programs_plays_as_one_row(play, encode, tokenizer):
    call = encode("<code>print(1+1)</code>")
    episode, server = play("docs/own_agent/code_agent.py:solve", [call, BOX], results=["2\n"])
    between = encode("\n<interpreter>\n2\n</interpreter>\n")
    assert episode.row.ids == call + between + encode(BOX) + [tokenizer.eos_token_id]
    assert episode.row.mask == [1] * len(call) + [0] * len(between) + [1] * (len(encode(BOX)) + 1)
    assert len(episode.rows) == 1 and server.asked[0]["stop"] == ["</code>"]
    assert 0 < episode.use.first_call_token < len(call) and episode.turns[0].calls[0].result.stdout == "2\n"


def test_bad_arguments_are_told_and_counted_as_malformed(play):
    episode, _ = play("calls_badly", [BOX])
    assert episode.finish_reason == RolloutEnd.ANSWER
    assert dict(episode.use.malformed) == {"missing_argument": 1, "unknown_tool": 1} and episode.use.calls == 0
    assert [call.malformed for call in episode.turns[0].calls] == ["missing_argument", "unknown_tool"]


def test_an_output_is_cut_as_in_the_built_in_loop(play):
    _, server = play("runs_code", ["\\boxed{1}", BOX], results=["7" * 3000], response_length=500)
    assert 48 <= len(server.asked[1]["prompt_ids"]) - len(server.asked[0]["prompt_ids"]) < 150


def test_branches_are_rows_and_the_last_row_has_the_newest_answer(play, tokenizer, encode):
    episode, _ = play("branches", ["\\boxed{1}", BOX, "\\boxed{6}"])
    assert len(episode.rows) == 2 and episode.agent.rows == 2
    assert tokenizer.decode(episode.row.ids) == "\\boxed{6}<|im_end|>"
    assert [(turn.row, turn.parent, turn.start) for turn in episode.turns][2] == (1, -1, 0)
    assert [turn.row for turn in episode.turns] == [0, 0, 1]


def test_the_newest_rows_are_kept(play, tokenizer):
    episode, _ = play("branches", ["\\boxed{1}", BOX, "\\boxed{6}"], own={"max_rows": 1})
    assert len(episode.rows) == 1 and episode.agent.rows_left_out == 1
    assert [turn.text for turn in episode.turns] == ["\\boxed{6}<|im_end|>"]


def ends(play, agent, answers, **settings):
    episode, _ = play(agent, answers, own=settings)
    return episode.finish_reason, len(episode.turns)


def test_each_end_of_an_agent(play, encode):
    assert ends(play, "once", [BOX]) == (RolloutEnd.ANSWER, 1)
    assert ends(play, "once", [encode("1+1") * 100]) == (RolloutEnd.MAX_TOKENS, 1)
    assert ends(play, "never_stops", [BOX] * 9, max_turns=2) == (RolloutEnd.MAX_TURNS, 2)
    assert ends(play, "gives_up_when_refused", [BOX] * 9, max_turns=2) == (RolloutEnd.MAX_TURNS, 2)
    reason, turns = ends(play, "never_stops", [BOX] * 99)
    assert reason == RolloutEnd.MAX_TOKENS and turns > 2


def test_an_agent_that_takes_no_refusal_ends_before_its_time(play):
    episode, _ = play("asks_on_and_on", [BOX] * 3, own={"max_turns": 3})
    assert (episode.finish_reason, len(episode.rows)) == (RolloutEnd.MAX_TURNS, 3)
    assert 32 < episode.agent.requests < 40


@pytest.mark.parametrize("agent", ["thinks_for_long", "does_not_let_go", "closes"])
def test_an_agent_that_works_for_too_long_is_the_models_failure_and_scored(play, agent, monkeypatch):
    monkeypatch.setattr("verl_ext.rollout.starters.GRACE_S", 0.1)
    episode, _ = play(agent, [BOX], own={"timeout_s": 0.3})
    assert episode.finish_reason == RolloutEnd.TIMEOUT and len(episode.turns) == 1
    assert 0.3 <= episode.agent.agent_s < 5


def test_the_agents_clock_stops_while_the_model_writes(play):
    async def slow():
        await asyncio.sleep(4.0)
        return BOX

    episode, _ = play("once", [slow], own={"timeout_s": 3.0})
    assert episode.finish_reason == RolloutEnd.ANSWER and episode.agent.agent_s < 3.0 < episode.use.generate_s


def test_a_crash_after_an_answer_is_scored_and_logged_with_its_traceback(play, caplog):
    episode, _ = play("crashes_later", [BOX])
    assert episode.finish_reason == RolloutEnd.AGENT_ERROR and len(episode.turns) == 1
    assert "own_agents.py" in episode.exception and "KeyError: 'what the model wrote'" in episode.exception
    assert "crashes_later" in caplog.text


def test_an_agent_that_exits_ends_no_more_than_its_episode(play):
    episode, _ = play("exits", [BOX])
    assert episode.finish_reason == RolloutEnd.AGENT_ERROR and "SystemExit(1)" in episode.exception


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ("crashes_at_once", "crashed before the model had answered: .*KeyError"),
        ("asks_nothing", "asked the model noth"),
    ],
)
def test_an_agent_that_gets_no_answer_is_our_failure(play, agent, told):
    from verl_ext.rollout.agents import AgentFailed

    with pytest.raises(AgentFailed, match=f"(?s){told}"):
        play(agent, [])


def test_calls_that_end_an_episode_before_any_answer_are_our_failure(play):
    from verl_ext.rollout.agents import AgentFailed
    from verl_ext.sandbox.client import RunResult

    ran = RunResult("ok", "2", "", 0, queue_s=0.0, run_s=3.0, attempts=1, message="")
    with pytest.raises(AgentFailed, match="calls that ended the episode .timeout. before the model had answered"):
        play("calls_before_it_asks", [BOX], results=[ran], turn_s=1.0)
    episode, _ = play("calls_before_it_asks", [BOX], results=[ran], turn_s=5.0)
    assert episode.finish_reason == RolloutEnd.ANSWER


def test_a_prompt_that_does_not_fit_is_our_failure(play):
    from verl_ext.rollout.agents import AgentFailed

    with pytest.raises(AgentFailed, match="refused with context_length_exceeded .*have 26 tokens"):
        play("says_what_it_got", [BOX], response_length=10)


def test_servers_that_gave_up_exclude_the_episode(play):
    episode, server = play("once", ["aborted"] * 3)  # the client tries twice more
    assert episode.finish_reason == RolloutEnd.ABORTED and len(server.asked) == 3
    assert (episode.row.mask, episode.turns) == ([0], [])
    episode, server = play("twice", [BOX, "aborted", "error", BOX])
    assert episode.finish_reason == RolloutEnd.ANSWER and len(episode.turns) == 2, "a further try made it good"


def test_a_request_that_servers_gave_up_excludes_the_episode_whatever_another_got(play):
    episode, _ = play("fails_in_one_of_two", ["aborted", BOX])
    assert episode.finish_reason == RolloutEnd.ABORTED


def test_an_answer_without_a_text_is_an_answer(play, tokenizer):
    answer = [len(tokenizer)]  # embeddings are padded: such a token has no text
    episode, _ = play("asks_and_runs", [answer], results=["2\n"])
    assert (episode.row.ids, episode.use.first_call_token) == (answer, 0)


def test_what_the_servers_client_raises_is_raised(play):
    with pytest.raises(ZeroDivisionError):
        play("once", [ZeroDivisionError()] * 3)
    episode, _ = play("once", [ZeroDivisionError(), BOX])
    assert episode.finish_reason == RolloutEnd.ANSWER


def test_a_sandbox_that_failed_excludes_the_episode(play):
    failure = RunResult("sandbox_failure", "", "", None, queue_s=0.0, run_s=0.0, attempts=4, message="refused")
    episode, _ = play("runs_code", [BOX, BOX], results=[failure])
    assert episode.finish_reason == RolloutEnd.SANDBOX_FAILURE and len(episode.turns) == 1
    episode, _ = play("runs_code", ["\\boxed{1}", BOX], results=[failure, "2"], row={"call_retries": 1})
    assert episode.finish_reason == RolloutEnd.ANSWER, "a validation calls again"


def test_an_environment_that_erred_is_raised(play):
    with pytest.raises(ZeroDivisionError):
        play("runs_code", [BOX, BOX], results=(1 / 0 for _ in range(1)))


def test_the_environment_opens_scores_and_closes(play):
    episode, _server = play("twice", [BOX, BOX], environment=f"{AGENTS}:World")
    assert own_agents.World.log == ["opened", "scored answer 2", "closed"]
    assert episode.score.acc == 0.5


def test_seeds_of_a_repeatable_run_are_its_requests_own_whatever_their_order(play):
    def seeds(*questions):
        row = {"extra_info": {"agent": list(questions)}}
        _, server = play("at_once", [BOX] * len(questions), row=row, repeatable=True)
        return {(tuple(asked["prompt_ids"]), asked["seed"]) for asked in server.asked}

    first, second = seeds(0, 1, 2, 2), seeds(2, 1, 2, 0)
    assert first == second and len({seed for _, seed in first}) == 4, "equal prompts have seeds of their own"


def test_without_log_probs_a_row_has_none(play):
    episode, _ = play("twice", [BOX, BOX], sampling={"logprobs": False})
    assert episode.row.log_probs is None and sum(episode.row.mask) > 0


def test_a_cancelled_episode_leaves_nothing_behind(make_loop, tokenizer):
    async def forever():
        await asyncio.sleep(60)

    async def run():
        loop = make_loop(f"{AGENTS}:closes", server := Server(tokenizer, [BOX, forever]))
        task = {"uid": "p", "session_id": 0, "raw_prompt": [{"role": "user", "content": "1+1?"}]}
        rolling = asyncio.ensure_future(loop.roll_out({"logprobs": True}, **task))
        while not server.asked:
            await asyncio.sleep(0.01)
        rolling.cancel()
        await asyncio.wait([rolling])
        assert rolling.cancelled()
        await loop.aclose()
        await asyncio.sleep(0.05)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(run()) == []


def test_an_agent_that_is_none_is_refused_at_the_start(make_loop, tokenizer):
    for run, told in [
        (f"{AGENTS}:one_argument", "no function of two arguments"),
        (f"{AGENTS}:none", "cannot be loaded: AttributeError"),
        (["no-such-command"], "there is no command 'no-such-command'"),
        ("solve", "expected null"),
    ]:
        with pytest.raises(ValueError, match=told):
            make_loop(run, SimpleNamespace(tokenizer=tokenizer))


def test_the_built_in_loop_stays_the_default(make_loop, tokenizer):
    from verl_ext.rollout.loop import RetoolAgentLoop

    assert type(make_loop(None, SimpleNamespace(tokenizer=tokenizer))) is RetoolAgentLoop
