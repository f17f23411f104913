import json
import os
from pathlib import Path

import pytest

from tests.unit.evaluation.test_pass_rates import prompt, rendered, sample_row
from verl_ext.evaluation.pass_rates import tally
from verl_ext.evaluation.past_samples import NoSamples, check_match, read_past_samples
from verl_ext.records import store
from verl_ext.runs.folder import NoRun

PROBLEMS = "abc"  # of the data file: "Find a.", ...


def write(path: Path, rows: list[dict], tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def logged(text: str, acc: int, number: int = 0, finish_reason: str = "answer", validate: bool = False, **reward):
    """A record of the trajectory log, whose prompt keeps the template's special tokens."""
    return {
        "uid": f"{text}-{number}",
        "session": 0,
        "step": 1,
        "validate": validate,
        "finish_reason": finish_reason,
        "reward": {"acc": float(acc), "unverified": 0.0, "sandbox_failure": 0.0} | reward,
        "prompt": f"<|im_start|>user\nFind {text}.<|im_end|>\n<|im_start|>assistant\n",
        "turns": [{"text": "\\boxed{1}"}],
    }


def dumped(text: str, score: float, number: int = 0):
    """A row of trainer.rollout_data_dir: no `acc`, no sign of a failure but the reward 0."""
    return {
        "input": rendered(f"Find {text}."),
        "output": "",
        "gts": "1",
        "score": score,
        "step": 3,
        "uid": f"{text}-{number}_0_0",
    }


def judged(text: str, acc: int, number: int = 0, **fields):
    """A row of a validation dump."""
    return sample_row(f"Find {text}.", acc, number, **fields)


def rates(path: Path) -> list[tuple[int, int]]:
    tallies, _ = tally(read_past_samples(path).samples, [{"prompt": prompt(f"Find {text}.")} for text in PROBLEMS])
    return [(each.judged, each.correct) for each in tallies]


def recorded(text: str, acc: float | None, session: int = 0, end_reason: str = "answer"):
    prompt = f"<|im_start|>user\nFind {text}.<|im_end|>\n<|im_start|>assistant\n"
    return {"uid": text, "session": session, "prompt": prompt, "end_reason": end_reason, "acc": acc}


def test_a_runs_records_count_before_all_else_and_without_failed_samples(tmp_path):
    rows = [recorded("a", 1.0), recorded("a", 0.0, 1), recorded("b", 1.0), recorded("a", None, 2, "sandbox_failure")]
    raised = {"uid": "a", "session": 3, "end_reason": "raised"}
    store.write(store.path_of(tmp_path, "trajectories", 1), "trajectories", [*rows, raised])
    validated = store.path_of(tmp_path, "trajectories", 1, validate=True)
    store.write(validated, "trajectories", [recorded("c", 1.0), recorded("b", None, 1, "verifier_unknown")])
    write(tmp_path / "trajectories" / "host-1.jsonl", [logged("a", 1)])
    assert rates(tmp_path) == [(2, 1), (1, 1), (1, 1)] and rates(validated) == [(0, 0), (0, 0), (1, 1)]
    failed = [sample.failure for sample in read_past_samples(tmp_path).samples if sample.failure]
    assert sorted(failed) == ["sandbox_failure", "unverified"]


def test_the_log_of_runs_before_counts_before_its_other_dumps_and_without_failed_samples(tmp_path):
    rows = [logged("a", 1, 0), logged("a", 0, 1), logged("b", 1), logged("c", 1, validate=True)]
    rows += [logged("a", 0, 2, sandbox_failure=1.0, finish_reason="sandbox_failure")]
    rows += [logged("a", 0, 3, unverified=1.0), logged("b", 0, 1, finish_reason="aborted")]
    write(tmp_path / "trajectories" / "host-1.jsonl", rows)
    write(tmp_path / "validation" / "0.jsonl", [judged("a", 0)])
    assert rates(tmp_path) == rates(tmp_path / "trajectories") == [(2, 1), (1, 1), (1, 1)]
    failed = [sample.failure for sample in read_past_samples(tmp_path).samples if sample.failure]
    assert sorted(failed) == ["sandbox_failure", "server_failure", "unverified"]


def test_rotated_files_and_several_attempts_at_a_response_count_once(tmp_path):
    old = write(tmp_path / "trajectories" / "host-1.jsonl.1", [logged("a", 1, 0)])
    os.utime(old, (0, 0))
    again = [logged("b", 0, 0, sandbox_failure=1.0), logged("b", 1, 0), logged("b", 0, 1)]
    write(tmp_path / "trajectories" / "host-1.jsonl", again, tail='{"uid": "torn')
    assert rates(tmp_path) == [(1, 1), (2, 1), (0, 0)]


def test_validation_dumps_of_all_steps_and_evaluations_are_read(tmp_path):
    for step in (0, 10):
        write(tmp_path / "run" / "validation" / f"{step}.jsonl", [judged("a", step > 0), judged("b", 1)])
    write(tmp_path / "run" / "hydra" / "config.yaml", [])
    assert rates(tmp_path / "run") == rates(tmp_path / "run" / "validation") == [(2, 1), (2, 2), (0, 0)]
    samples = [judged("c", 1), judged("c", 0, 1, sandbox_failure=1.0)]
    file = write(tmp_path / "evaluation" / "samples.jsonl", samples)
    assert rates(file) == rates(file.parent) == [(0, 0), (0, 0), (1, 1)]


def test_verls_rollout_dumps_have_the_reward_only_and_what_it_does_not_tell_is_left_out(tmp_path):
    """+1 right, +0.4 right with a length penalty, -1 and -0.6 (all of the tool bonus) wrong, 0 failed, -0.2 either."""
    scores = [1.0, 0.4, -1.0, -0.6, -0.60000002, 0.0, -0.2]
    folder = tmp_path / "rollouts"
    write(folder / "3.jsonl", [dumped("a", score, number) for number, score in enumerate(scores)])
    assert rates(tmp_path) == rates(folder) == [(5, 2), (0, 0), (0, 0)]
    assert "only groups that were trained on" in read_past_samples(folder).what


def test_of_the_quickstarts_folder_its_rl_run_is_taken(tmp_path):
    write(tmp_path / "rl" / "metrics-1.jsonl", [{"step": 1, "data": {"train/acc": 1}}])
    write(tmp_path / "rl" / "trajectories" / "host-1.jsonl", [logged("a", 1)])
    write(tmp_path / "sft" / "metrics-1.jsonl", [{"step": 1, "data": {"train/loss": 1}}])
    assert rates(tmp_path) == [(1, 1), (0, 0), (0, 0)]


def test_what_is_no_source_is_named(tmp_path):
    with pytest.raises(NoSamples, match="there is no such file or folder"):
        read_past_samples(tmp_path / "nowhere")
    with pytest.raises(NoRun, match="it holds nothing"):
        read_past_samples(tmp_path)
    write(tmp_path / "metrics-1.jsonl", [{"step": 1, "data": {"train/acc": 1}}])
    with pytest.raises(NoSamples, match="Looked for records/trajectories/.*trainer.validation_data_dir"):
        read_past_samples(tmp_path)
    broken = write(tmp_path / "trajectories" / "host-1.jsonl", [logged("a", 1), logged("b", 1) | {"reward": None}])
    with pytest.raises(ValueError, match=f"{broken}, line 2: .*Expected a record of the trajectory log"):
        read_past_samples(broken)


def test_samples_of_other_problems_are_an_error_that_shows_one(tmp_path):
    samples = read_past_samples(write(tmp_path / "0.jsonl", [judged("other", 1)])).samples
    _, unknown = tally(samples, [{"prompt": prompt("Find a.")}])
    with pytest.raises(
        NoSamples, match="None of the 1 samples in /run belongs to a problem of /data.*user Find other. assi"
    ):
        check_match(unknown, samples, [Path("/run")], Path("/data"))
    check_match(unknown - 1, samples, [Path("/run")], Path("/data"))
