"""The real agent loop, reward manager and store between a scripted server and a scripted sandbox."""

import asyncio
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

from verl_ext.datasets.rows import DataError
from verl_ext.episode import EpisodeKey
from verl_ext.evaluation.meter import Meter
from verl_ext.evaluation.samples import failure_of, read_samples
from verl_ext.evaluation.store import Store
from verl_ext.records import store
from verl_ext.runs.folder import path_of

SETTINGS = {"n": 2}


@dataclass
class FakeServer:
    """Writes a call in the first turn and `answer(prompt text, seed)` in the second."""

    tokenizer: Any
    answer: Callable[[str, int], str]
    interface: str = "fake"
    max_model_len: int | None = 256
    seeded: bool = True
    prompts: list[str] = field(default_factory=list)
    params: list[dict] = field(default_factory=list)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, priority: int = 0):
        from verl.workers.rollout.replica import TokenOutput

        text = self.tokenizer.decode(prompt_ids)
        self.prompts.append(text)
        self.params.append(sampling_params)
        await asyncio.sleep(0)
        if "<interpreter>" not in text:
            ids = self.tokenizer.encode("<code>print(1+1)</code>")
        else:
            said = self.answer(text, sampling_params.get("seed"))
            ids = [*self.tokenizer.encode(said), self.tokenizer.eos_token_id]
        return TokenOutput(token_ids=ids, stop_reason="completed", extra_fields={})


class FakeSandbox:
    def __init__(self) -> None:
        self.fails = 0

    async def run(self, code: str, **limits: Any) -> Any:
        from verl_ext.sandbox.client import RunResult

        if self.fails:
            self.fails -= 1
            return RunResult("sandbox_failure", "", "", None, 0.0, 0.0, 4, "connection refused")
        return RunResult("ok", "2\n", "", 0, queue_s=0.0, run_s=0.0, attempts=1, message="")

    async def aclose(self) -> None: ...


@pytest.fixture(scope="module")
def config():
    from verl_ext.evaluation.settings import load_config

    sampling = "actor_rollout_ref.rollout.val_kwargs"
    return load_config(
        "tiny_dapo",
        [f"{sampling}.temperature=0.5", f"{sampling}.top_p=0.9", "retool.validation.retries=0"],
    )


def problem(index: int, truth: str = "2", **more: Any) -> dict[str, Any]:
    question = f"{index}+1?"
    return {
        "uid": f"mine:{index}",
        "index": index,
        "data_source": "mine",
        "ability": "math",
        "raw_prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": truth},
        "extra_info": {},
        "problem": question,
    } | more


def sample(
    config, tokenizer, folder, rows, answer, *, n=2, sandbox=None, concurrency=4, seeded=True, meter=None
) -> tuple[dict, FakeServer]:
    """Run an evaluation to its end; returns the rows by key, and the server."""
    from verl_ext.evaluation.sampling import Sampler, make_tasks

    server = FakeServer(tokenizer, answer, seeded=seeded)

    async def run() -> dict:
        sampler = Sampler(config, tokenizer, server, "qwen2")
        await sampler.check_prompts(rows)
        kept = Store(folder, SETTINGS, {})
        try:
            await sampler.run(make_tasks(rows, n, 0), kept, concurrency=concurrency, meter=meter)
        finally:
            kept.join()
        return kept.rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_ext.environments.interpreter.shared_client", lambda settings: sandbox or FakeSandbox())
        return asyncio.run(run()), server


def samples_in(folder):
    """What the records of an evaluation's folder have."""
    return read_samples(path_of(folder, "trajectories", 0, validate=True))


def test_samples_go_through_the_loop_and_the_reward_manager_of_training(config, tokenizer, tmp_path):
    rows, server = sample(config, tokenizer, tmp_path, [problem(1), problem(2, "3")], lambda *_: "\\boxed{2}")
    assert set(rows) == {EpisodeKey(f"mine:{i}", number) for i in (1, 2) for number in (0, 1)}
    row = rows[EpisodeKey("mine:1", 0)]
    assert (row["acc"], row["verdict"]["extracted"], row["ground_truth"], row["end_reason"]) == (
        1.0,
        "2",
        "2",
        "answer",
    )
    assert rows[EpisodeKey("mine:2", 0)]["acc"] == 0.0
    assert json.loads(row["tool_use"])["ok"] == 1
    params = server.params[0]
    assert (params["temperature"], params["top_p"], params["stop"]) == (0.5, 0.9, ["</code>"])
    samples = {sample.uid: sample for sample in samples_in(tmp_path)}
    assert set(samples) == set(map(str, rows))
    first = samples["mine:1_0_0"]
    assert first.prompt == "user\n1+1?\nassistant\n"
    assert first.output == "<code>print(1+1)</code>\n<interpreter>\n2\n</interpreter>\n\\boxed{2}"
    assert (first.tool_calls, first.model_turns, first.is_truncated) == (1, 2, False)


def test_seven_rows_with_one_last_message_are_seven_problems(config, tokenizer, tmp_path):
    """Other golds, ids, indices, sources or system messages; the eighth repeats the first. Only the answer 3 is wrong:
    that of six problems is right, so that best@4 is 6/7."""
    from verl_ext.evaluation.figures import evaluate
    from verl_ext.evaluation.problems import read_sets

    row = {"data_source": "mine", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math"}
    row |= {"reward_model": {"ground_truth": "2"}, "extra_info": {"id": "a"}}
    system = [{"role": "system", "content": "Be brief."}, *row["prompt"]]
    changes = [
        *({}, {"reward_model": {"ground_truth": "3"}}, {"extra_info": {"id": "b"}}, {"extra_info": {"index": 0}}),
        *({"extra_info": {"index": 1}}, {"data_source": "yours"}, {"prompt": system}, {}),
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row | change) + "\n" for change in changes))
    rows = read_sets([str(file)], protocol="code")
    sample(config, tokenizer, tmp_path / "out", rows, lambda *_: "\\boxed{2}", n=4)
    samples = samples_in(tmp_path / "out")
    overall = evaluate(samples, k=4, draws=10)["overall"]
    assert (overall.num_problems, overall.num_samples, overall.n) == (7, 32, 4)
    assert overall.metrics["acc/best@k"].value == pytest.approx(6 / 7)


def test_a_sample_has_the_same_seed_in_every_run_and_another_than_all_others(config, tokenizer, tmp_path):
    from verl_ext.evaluation.sampling import make_tasks

    tasks = make_tasks([problem(1), problem(2)], 3, seed=0)
    assert [(task.row["index"], task.number) for task in tasks[:3]] == [(1, 0), (2, 0), (1, 1)]
    assert len({task.seed for task in tasks} | {task.seed for task in make_tasks([problem(1)], 1, seed=1)}) == 7
    _, server = sample(config, tokenizer, tmp_path, [problem(1)], lambda *_: "\\boxed{2}", n=1)
    assert [params["seed"] for params in server.params] == [tasks[0].seed] * 2  # the server varies it by turn


def test_a_server_that_takes_no_seeds_gets_none_and_the_rows_have_none(config, tokenizer, tmp_path):
    rows, server = sample(config, tokenizer, tmp_path, [problem(1)], lambda *_: "\\boxed{2}", seeded=False)
    assert all("seed" not in each for each in server.params) and len(server.params) == 4
    assert all("seed" not in json.loads(row["sampling"]) for row in rows.values())
    rows, _ = sample(config, tokenizer, tmp_path / "seeded", [problem(1)], lambda *_: "\\boxed{2}")
    assert len({json.loads(row["sampling"])["seed"] for row in rows.values()}) == 2


def test_an_interrupted_run_goes_on_with_what_is_missing(config, tokenizer, tmp_path):
    problems = [problem(i) for i in range(3)]
    done = []

    def dies_at_the_third(text: str, seed: int) -> str:
        done.append(text)
        if len(done) == 3:
            raise KeyboardInterrupt
        return "\\boxed{2}"

    with pytest.raises(KeyboardInterrupt):
        sample(config, tokenizer, tmp_path, problems, dies_at_the_third, concurrency=1)
    before = samples_in(tmp_path)
    assert len(before) == 2
    rows, server = sample(config, tokenizer, tmp_path, problems, lambda *_: "\\boxed{2}")
    assert samples_in(tmp_path)[:2] == before
    assert len(rows) == 6 and len(server.prompts) == 2 * 4  # two turns of each missing sample
    rows, server = sample(config, tokenizer, tmp_path, problems, lambda *_: "\\boxed{2}")
    assert len(rows) == 6 and server.prompts == []


def test_what_sandbox_or_server_failed_is_never_wrong_and_tried_again(config, tokenizer, tmp_path):
    from verl_ext.evaluation.figures import evaluate
    from verl_ext.rollout.servers import ServerFailure

    def fails_for_two(text: str, seed: int) -> str:
        if "2+1" in text:
            raise ServerFailure("HTTP 503")
        return "\\boxed{2}"

    sandbox = FakeSandbox()
    sandbox.fails = 1
    problems = [problem(1), problem(2)]
    rows, _ = sample(config, tokenizer, tmp_path, problems, fails_for_two, sandbox=sandbox, concurrency=1)
    failed, judged, refused = (rows[EpisodeKey(*key)] for key in (("mine:1", 0), ("mine:1", 1), ("mine:2", 0)))
    assert [failure_of(row) for row in (failed, judged, refused)] == ["sandbox_failure", None, "server_failure"]
    assert failed["acc"] is None and refused["acc"] is None and refused["exception"] == "HTTP 503"
    figures = evaluate(samples_in(tmp_path), draws=10)["mine"]
    assert figures.excluded == {"sandbox_failure": 1, "server_failure": 2, "unverified": 0}
    assert figures.metrics["acc/mean@k"].value == 1.0

    rows, server = sample(config, tokenizer, tmp_path, problems, lambda *_: "\\boxed{2}")
    assert all(failure_of(row) is None and row["acc"] == 1.0 for row in rows.values()) and len(rows) == 4
    assert len(server.prompts) == 2 * 3
    assert evaluate(samples_in(tmp_path), draws=10)["mine"].num_samples == 4


def test_a_call_that_the_sandbox_fails_is_made_again_and_the_response_stays(config, tokenizer, tmp_path, monkeypatch):
    """Sampling it again would favour responses without calls."""
    from omegaconf import OmegaConf

    monkeypatch.setattr("verl_ext.rollout.lives.RETRY_PAUSE_S", 0.0)
    sandbox = FakeSandbox()
    sandbox.fails = 2
    patient = OmegaConf.merge(config, {"retool": {"validation": {"retries": 2}}})
    rows, server = sample(patient, tokenizer, tmp_path, [problem(1)], lambda *_: "\\boxed{2}", n=1, sandbox=sandbox)
    (row,) = rows.values()
    assert (failure_of(row), row["acc"], len(server.prompts)) == (None, 1.0, 2)


WORLD = """
from pathlib import Path

from verl_ext.environments.base import Environment
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import Score

class World(Environment):
    async def score(self, episode):
        if not Path(__file__).with_name("up").exists():
            raise ToolUnavailable("the judge is down")
        return Score.graded(1.0, "", "world")
"""


def test_a_response_that_its_environment_could_not_score_is_sampled_again(config, tokenizer, tmp_path, monkeypatch):
    """Its world is gone, and the verifier of its data source knows nothing of it."""
    from omegaconf import OmegaConf

    monkeypatch.setattr("verl_ext.rollout.lives.RETRY_PAUSE_S", 0.0)
    (tmp_path / "world.py").write_text(WORLD)
    worldly = OmegaConf.merge(config, {"retool": {"environment": f"{tmp_path}/world.py:World"}})
    answer = {"answer": lambda *_: "I am done.", "n": 1}
    rows, _ = sample(worldly, tokenizer, tmp_path / "out", [problem(1)], **answer)
    assert [failure_of(row) for row in rows.values()] == ["unverified"]
    (tmp_path / "up").touch()
    meter = Meter()
    rows, server = sample(worldly, tokenizer, tmp_path / "out", [problem(1)], **answer, meter=meter)
    (row,) = rows.values()
    assert meter.used.requests == 2 * 2, "both responses have two turns"
    assert server.prompts and (failure_of(row), row["acc"], row["verdict"]["rule"]) == (None, 1.0, "world")


def test_a_response_that_no_verifier_could_judge_is_judged_again_not_sampled_again(
    config, tokenizer, tmp_path, monkeypatch
):
    from verl_ext.reward.score import Score
    from verl_ext.reward.verifiers.mathematics import MathVerifier

    async def unknown(self, *args):
        return Score(None, "2", "unknown", "sympy timed out")

    with monkeypatch.context() as patch:
        patch.setattr(MathVerifier, "verify", unknown)
        rows, _ = sample(config, tokenizer, tmp_path, [problem(1)], lambda *_: "\\boxed{2}", n=1)
    assert [failure_of(row) for row in rows.values()] == ["unverified"]
    path = path_of(tmp_path, "trajectories", 0, validate=True)
    (before,) = store.read(path).to_pylist()

    meter = Meter()
    rows, server = sample(config, tokenizer, tmp_path, [problem(1)], lambda *_: "\\boxed{3}", n=1, meter=meter)
    (row,) = store.read(path).to_pylist()
    tokens = sum(turn["tokens"] for turn in before["turns"] if turn["role"] == "model")
    assert (meter.used.requests, meter.used.completion_tokens) == (2, tokens), "of its two turns, counted once"
    assert server.prompts == [] and (failure_of(row), row["acc"], row["end_reason"]) == (None, 1.0, "answer")
    for name in ("prompt", "turns", "calls", "tool_use", "model_tokens", "sampling", "timings"):
        assert row[name] == before[name], name
    assert json.loads(row["reward_parts"])["response_tokens"] == row["model_tokens"]


TERM = """
def ends_briefly(episode, row):
    last = episode.turns[-1]
    return (last.calls == [] and episode.turns[0].calls[0].result.stdout == "2\\n") * episode.sampling["temperature"]
"""


def test_a_response_that_is_judged_again_reaches_the_terms_of_the_run_with_its_turns(
    config, tokenizer, tmp_path, monkeypatch
):
    from omegaconf import OmegaConf

    from verl_ext.reward.score import Score
    from verl_ext.reward.verifiers.mathematics import MathVerifier

    async def unknown(self, *args):
        return Score(None, "2", "unknown", "sympy timed out")

    (tmp_path / "mine.py").write_text(TERM)
    termed, terms = deepcopy(config), {"ends_briefly": f"{tmp_path}/mine.py:ends_briefly"}
    OmegaConf.update(termed, "reward.reward_kwargs.terms", terms, force_add=True)
    with monkeypatch.context() as patch:
        patch.setattr(MathVerifier, "verify", unknown)
        sample(termed, tokenizer, tmp_path / "out", [problem(1)], lambda *_: "\\boxed{2}", n=1)
    rows, server = sample(termed, tokenizer, tmp_path / "out", [problem(1)], lambda *_: "", n=1)
    (row,) = rows.values()
    assert server.prompts == [] and json.loads(row["reward_parts"])["reward_ends_briefly"] == 0.5


def test_infrastructure_that_is_down_stops_the_run(config, tokenizer, tmp_path):
    from verl_ext.evaluation.sampling import GIVE_UP_AFTER, InfrastructureDown

    sandbox = FakeSandbox()
    sandbox.fails = 1000
    with pytest.raises(InfrastructureDown, match=rf"last {GIVE_UP_AFTER} samples failed \(sandbox_failure\)"):
        sample(config, tokenizer, tmp_path, [problem(1)], lambda *_: "", n=40, sandbox=sandbox, concurrency=1)
    samples = samples_in(tmp_path)
    assert len(samples) == GIVE_UP_AFTER and all(sample.acc is None for sample in samples)


def test_failures_among_samples_that_end_well_do_not_stop_the_run(config, tokenizer, tmp_path):
    from verl_ext.evaluation.sampling import GIVE_UP_AFTER

    class EverySecond(FakeSandbox):
        calls = 0

        async def run(self, code: str, **limits: Any) -> Any:
            self.calls += 1
            self.fails = self.calls % 2
            return await super().run(code, **limits)

    number, sandbox = 2 * GIVE_UP_AFTER + 2, EverySecond()
    rows, _ = sample(
        config, tokenizer, tmp_path, [problem(1)], lambda *_: "\\boxed{2}", n=number, sandbox=sandbox, concurrency=1
    )
    assert sum(failure_of(row) == "sandbox_failure" for row in rows.values()) == number // 2 > GIVE_UP_AFTER


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (problem(1, raw_prompt=[{"role": "user", "content": "1" * 100}]), "mine:1 has 1.. tokens, but data.max_prompt"),
        (problem(1, agent_name="retool_xml"), "names the agent loop 'retool_xml', expected one of retool, retool_code"),
    ],
)
def test_what_cannot_be_rolled_out_is_said_before_anything_is(config, tokenizer, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        sample(config, tokenizer, tmp_path, [problem(0), row], lambda *_: "\\boxed{2}")
    assert not [*tmp_path.iterdir()]


def test_a_response_that_the_server_has_no_room_for_is_said_before_anything_is(config, tokenizer, tmp_path):
    from omegaconf import OmegaConf

    longer = OmegaConf.merge(config, {"data": {"max_response_length": 250}})
    with pytest.raises(DataError, match="250 of response, but the server's limit is 256.*--max-tokens"):
        sample(longer, tokenizer, tmp_path, [problem(0)], lambda *_: "")


def test_a_column_names_the_loop_of_a_sample(config, tokenizer, tmp_path):
    rows, server = sample(
        config, tokenizer, tmp_path, [problem(1, agent_name="retool_hermes")], lambda *_: "\\boxed{2}", n=1
    )
    assert server.params[0].get("stop") is None and rows[EpisodeKey("mine:1", 0)]["calls"] == []
