import pytest

from tests.unit.evaluation.test_figures import row, write
from verl_ext.records.samples import read_dump


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
