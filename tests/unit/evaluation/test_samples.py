import pytest

from tests.unit.evaluation.test_figures import row, write
from verl_ext.evaluation.samples import Sample, read_dump
from verl_ext.records import store


def test_of_a_session_with_several_outputs_the_last_counts(tmp_path):
    rows = [row("a", 0, 0, uid="u_0_1", pred="last"), row("a", 0, 1, uid="u_0_0"), row("a", 1, 1, uid="u_1_0")]
    kept = read_dump(write(tmp_path / "dump.jsonl", rows))
    assert [(sample.uid, sample.pred) for sample in kept] == [("u_0_1", "last"), ("u_1_0", "7")]


def test_of_several_attempts_at_a_sample_the_last_counts(tmp_path):
    rows = [row("a", 0, 0, finish_reason="server_failure") | {"acc": None}, row("a", 1, 0), row("a", 0, 1)]
    kept = read_dump(write(tmp_path / "dump.jsonl", rows))
    assert [(sample.uid, sample.acc) for sample in kept] == [
        ("uuid-a_0_0", 1.0),
        ("uuid-a_1_0", 0.0),
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({key: value for key, value in row("a", 0, 1).items() if key != "tool_calls"}, "no key tool_calls"),
        (row("a", 0, 1) | {"acc": 1.5}, "acc is 1.5"),
        (row("a", 0, 1, pred=None), "pred is None, not a string"),
        (row("a", 0, 1, tool_errors=None), "tool_errors is None, not a finite number"),
        (row("a", 0, 1, response_tokens=float("nan")), "response_tokens is nan"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(tmp_path, broken, message):
    path = write(tmp_path / "40.jsonl", [row("a", 1, 1), broken])
    with pytest.raises(ValueError, match=f"40.jsonl, line 2: {message}"):
        read_dump(path)


def test_a_row_of_records_is_the_sample_that_verls_dump_has_of_the_response(tmp_path):
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
    sample, lost = read_dump(path)
    assert sample == Sample(
        uid="u_2_0", input="user\n1+1?\n", output="<code>1/0</code>error2", gts="2", pred="2.0", data_source="mine",
        finish_reason="max_tokens", acc=1.0, score=0.5, tool_calls=2, tool_errors=2, tool_timeouts=1, model_turns=2,
        response_tokens=6, truncated=1, unverified=0, sandbox_failure=0, id="template", problem="hash",
        normalised="2",
    )  # fmt: skip
    assert sample.failure is None and lost.failure == "unverified"
