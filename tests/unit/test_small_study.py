"""`scripts/small_study.py` tells kinds of errors apart by rules."""

import json
from pathlib import Path

import pytest

from verl_ext.records.samples import read_dump

REPO = Path(__file__).resolve().parents[2]
PROMPT = "user\nPut the answer in \\boxed{}.\n\nAnn has 12 pens and buys 3 bags of 5.\nassistant\n"
BASE = {"input": PROMPT, "gts": "27", "verdict": "different", "method": "integer", "finish_reason": "answer"}
BASE |= {"data_source": "word_problems", "id": "rate-7", "score": -1.0, "acc": 0.0, "tool_calls": 1.0}
BASE |= dict.fromkeys(("tool_errors", "tool_timeouts", "truncated", "unverified", "sandbox_failure"), 0.0)
BASE |= {"model_turns": 2.0, "response_tokens": 30.0}


@pytest.fixture(scope="module")
def study(load_script):
    return load_script("small_study")


def response(code: str, output: str, answer: str) -> dict:
    text = f"<code>\n{code}\n</code>\n<interpreter>\n{output}\n</interpreter>\nThe answer is \\boxed{{{answer}}}."
    return {"output": text, "pred": answer}


CASES = {
    "right": response("print(12 + 3 * 5)", "27", "27") | {"acc": 1.0},
    "no answer": {"output": "<code>\nprint(12)\n</code>\n<interpreter>\n12\n</interpreter>\n", "pred": ""},
    "its last program failed": response("print(12 +)", "SyntaxError: invalid syntax", "12") | {"tool_errors": 1.0},
    "the answer is not what the program printed": response("print(12 * 3)", "36", "63"),
    "a number of its program is not in the problem": response("print(12 + 7)", "19", "19"),
    "numbers of the problem, another formula": response("print(12 + 3 + 5)", "20", "20"),
}


def test_each_kind_of_error_is_told_by_its_rule(study, tmp_path):
    rows = [BASE | case | {"uid": f"u{i}_0_0"} for i, case in enumerate(CASES.values())]
    for when in ("before", "after"):
        folder = tmp_path / "run" / "eval" / when
        folder.mkdir(parents=True)
        (folder / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [study.kind_of(sample) for sample in read_dump(folder / "0.jsonl")] == [*CASES] == [*study.ERRORS]
    found = study.study_of(tmp_path / "run", problems=0)  # no seed: it is not evaluated again
    table = study.error_table({"control": found})
    assert table[0][1] == "control" and {row[1] for row in table[1:]} == {"16.7% -> 16.7%"}


def test_greedy_accuracy_and_pass_at_k_of_each_run_and_model(study):
    def found(greedy):
        mean = {"value": 0.3, "low": 0.2, "high": 0.4}
        return {"greedy": mean | {"value": greedy}, "sampled": mean, "pass@k": {str(k): k / 10 for k in (1, 2, 4, 8)}}

    studies = {"control": {}, "seed_0": {"evaluated": {"SFT": found(0.35), "after RL": found(0.6)}}}
    _, *rows = study.evaluation_table(studies)
    assert rows[0] == ["seed_0, SFT", "0.350 [0.200, 0.400]", "0.300 [0.200, 0.400]", "0.200", "0.400", "0.800"]
    assert rows[1][:2] == ["seed_0, after RL", "0.600 [0.200, 0.400]"] and len(rows) == 2


def test_a_number_printed_with_a_point_is_the_same_number(study, tmp_path):
    path = tmp_path / "0.jsonl"
    path.write_text(json.dumps(BASE | response("print(12 * 3 / 5)", "7.20", "7.2") | {"uid": "u_0_0"}) + "\n")
    assert study.kind_of(read_dump(path)[0]) == "numbers of the problem, another formula"
