from tests.unit.evaluation.rows import write
from verl_ext.evaluation.samples import Sample, find_samples, read_samples
from verl_ext.records import store


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
