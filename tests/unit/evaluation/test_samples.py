from pathlib import Path

import pytest

from tests.unit.evaluation.rows import evaluation, row, write
from verl_ext.evaluation.pass_rates import check_match, tally
from verl_ext.evaluation.samples import NoSamples, Sample, find_samples, read_past_samples, read_samples
from verl_ext.records import store
from verl_ext.runs.folder import NoRun


def test_a_row_of_records_is_a_sample(tmp_path):
    path = store.path_of(tmp_path, "trajectories", 4, validate=True)
    turn = {"call": None, "server": None, "started_s": None, "generate_s": None}
    call = {"turn": 0, "tool": "python", "code": "1/0", "stdout": "", "stderr": "ZeroDivisionError"}
    whole = {
        "uid": "u", "session": 2, "step": 4, "validate": True, "problem": "hash", "id": "template", "domain": "mine",
        "prompt": "<|im_start|>user\n1+1?<|im_end|>\n", "ground_truth": "2", "end_reason": "max_tokens",
        "turns": [
            turn | {"role": "model", "text": "<code>1/0</code>", "tokens": 4, "start": 0},
            turn | {"role": "tool", "text": "error", "tokens": 1, "start": 4},
            turn | {"role": "model", "text": "2<|im_end|>", "tokens": 2, "start": 5},
        ],
        "calls": [
            call | {"status": "ZeroDivisionError", "fault": "model", "attempts": 1},
            call | {"status": "timeout", "fault": "model", "attempts": 1},
            call | {"status": "malformed:empty_code", "fault": "model", "attempts": None},
        ],
        "acc": 1.0, "score": 0.5, "model_tokens": 6, "verdict": {"extracted": "2.0", "normalised": "2"},
    }  # fmt: skip
    raised = {"uid": "u", "session": 3, "problem": "hash", "end_reason": "raised"}
    store.write(path, "trajectories", [whole, raised])
    sample, lost = read_samples(path)
    assert sample == Sample(
        uid="u_2_0", prompt="user\n1+1?\n", ground_truth="2", pred="2.0", data_source="mine", end_reason="max_tokens",
        turns=(("model", "<code>1/0</code>"), ("tool", "error"), ("model", "2<|im_end|>")), acc=1.0, score=0.5,
        tool_calls=2, tool_errors=2, tool_timeouts=1, response_tokens=6, id="template", problem="hash", normalised="2",
    )  # fmt: skip
    assert (sample.output, sample.model_turns, sample.is_truncated) == ("<code>1/0</code>error2", 2, True)
    assert sample.failure is None and lost.failure == "unverified"


def test_a_run_stands_for_its_last_whole_validation_and_the_quickstart_for_its_last_evaluation(tmp_path):
    run, quickstart = tmp_path / "run", tmp_path / "quickstart"
    evaluated = write(run / "evaluation" / "global_step_30", [], step=30)
    before = write(quickstart / "eval" / "before", [])
    assert find_samples(run) == evaluated and find_samples(quickstart) == before and find_samples(before) == before
    last = [write(run, [], step=step) for step in (5, 20)][-1]
    write(run, [], step=25, light=True)
    assert find_samples(run) == last
    assert find_samples(quickstart) == before
    after = write(quickstart / "eval" / "after", [])
    assert find_samples(quickstart) == after


# Past runs, for pass rates -------------------------------------------------------------------------------------------

PROBLEMS = "abc"


def rates(path: Path) -> list[tuple[int, int]]:
    rows = [{"prompt": [{"role": "user", "content": f"Find {text}."}]} for text in PROBLEMS]
    tallies, _ = tally(read_past_samples(path)[1], rows)
    return [(each.judged, each.correct) for each in tallies]


def recorded(text: str, acc: float | None, session: int = 0, end_reason: str = "answer"):
    prompt = f"<|im_start|>user\nFind {text}.<|im_end|>\n<|im_start|>assistant\n"
    return {"uid": text, "session": session, "prompt": prompt, "end_reason": end_reason, "acc": acc}


def test_all_records_of_a_run_count_except_failed_samples(tmp_path):
    rows = [recorded("a", 1.0), recorded("a", 0.0, 1), recorded("b", 1.0), recorded("a", None, 2, "sandbox_failure")]
    raised = {"uid": "a", "session": 3, "end_reason": "raised"}
    run = tmp_path / "rl"
    store.write(store.path_of(run, "trajectories", 1), "trajectories", [*rows, raised])
    validated = write(run, [recorded("c", 1.0), recorded("b", None, 1, "verifier_unknown")], step=1)
    assert rates(run) == rates(tmp_path) == [(2, 1), (1, 1), (1, 1)], "the quickstart's folder has the run in rl/"
    assert rates(validated) == [(0, 0), (0, 0), (1, 1)]
    what, samples = read_past_samples(run)
    assert sorted(filter(None, (sample.failure for sample in samples))) == ["sandbox_failure", "unverified"]
    assert what == f"6 samples of {validated.parent} (2 files)"


def test_a_run_without_records_stands_for_its_evaluations(tmp_path):
    (tmp_path / "run" / "hydra").mkdir(parents=True)
    (tmp_path / "run" / "hydra" / "config.yaml").write_text("model: {path: m}\n")
    for step in (10, 20):
        evaluation(tmp_path / "run" / "evaluation" / f"global_step_{step}", [recorded("a", step > 10)])
    assert rates(tmp_path / "run") == [(2, 1), (0, 0), (0, 0)]
    assert rates(tmp_path / "run" / "evaluation" / "global_step_10") == [(1, 0), (0, 0), (0, 0)]


def test_what_is_no_source_is_named(tmp_path):
    with pytest.raises(NoSamples, match="there is no such file or folder"):
        read_past_samples(tmp_path / "nowhere")
    with pytest.raises(NoRun, match="it holds nothing"):
        read_past_samples(tmp_path)
    (tmp_path / "metrics-1.jsonl").write_text('{"step": 1, "data": {"train/acc": 1}}\n')
    with pytest.raises(NoSamples, match="Looked for records/"):
        read_past_samples(tmp_path)


def test_samples_of_other_problems_are_an_error_that_shows_one(tmp_path):
    _, samples = read_past_samples(write(tmp_path, [row("Find other.", 0, 1)]))
    _, unknown = tally(samples, [{"prompt": [{"role": "user", "content": "Find a."}]}])
    with pytest.raises(
        NoSamples, match="None of the 1 samples in /run belongs to a problem of /data.*user Find other. assi"
    ):
        check_match(unknown, samples, [Path("/run")], Path("/data"))
    check_match(unknown - 1, samples, [Path("/run")], Path("/data"))
