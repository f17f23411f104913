"""The checks of scripts/studies/check_reward.py on the excerpts in tests/data, and that they can fail."""

import json
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
DATA = REPO / "tests" / "data"


@pytest.fixture(scope="module")
def script():
    from scripts.studies import check_reward

    return check_reward


def read(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_labelled_pairs_are_judged_right_without_a_false_positive(script, capsys):
    assert script.check_pairs(read("math_equivalence.jsonl")), capsys.readouterr().out


def test_a_false_positive_fails_the_check(script):
    pairs = read("math_equivalence.jsonl")
    wrong = {"kind": "answer", "pred": "42", "gold": "42", "equal": False, "category": "integer_aime"}
    assert not script.check_pairs([*pairs, wrong])


@pytest.mark.parametrize("name", ["aime2024", "aime2025", "dapo"])
def test_gold_equals_its_spellings_and_no_other_gold(script, capsys, name):
    golds = [{"answer": answer} for answer in json.loads((DATA / "golds.json").read_text())[name]]
    assert script.check_golds(golds), capsys.readouterr().out


def test_gold_that_equals_another_fails_the_check(script):
    assert not script.check_golds([{"answer": r"\frac{1}{2}"}, {"answer": "0.5"}])


def test_disagreements_with_recorded_verdicts_are_explained(script, capsys):
    """14 traces, among them each kind of disagreement that the full file has."""
    assert script.check_traces(read("graded_traces.jsonl"))
    printed = capsys.readouterr().out
    for reason in ("no box", "a rounded decimal", "something other than the box", "right side of an equation"):
        assert reason in printed
    assert "not explained" not in printed


def test_disagreement_that_no_rule_explains_fails_the_check(script):
    trace = {"messages": [{"role": "assistant", "content": r"\boxed{41}"}], "ground_truth": "42"}
    assert not script.check_traces([trace | {"upstream_correct": True, "extracted_answer": "42"}])


LABELLED = [
    {"gold_answer": "1/2", "llm_response": r"so \boxed{0.5}", "gold_judgment": "A"},
    {"gold_answer": "10", "llm_response": r"so \boxed{10\text{ million}}", "gold_judgment": "B"},
    {"gold_answer": "7", "llm_response": r"so \boxed{8}", "gold_judgment": "A"},  # a wrong label
    {"gold_answer": "7", "llm_response": "so 7", "gold_judgment": "A"},
    {"gold_answer": "7", "llm_response": "cut off", "gold_judgment": "C"},
]


def test_labelled_file_is_judged_by_both_graders(script, capsys, tmp_path):
    """By hand: 2 of 4 for both; ours finds no box in the fourth, math-verify takes the second for right."""
    file = tmp_path / "labelled.json"
    file.write_text(json.dumps(LABELLED))
    assert script.main(["labelled", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "4 rows, 3 labelled right; left out: {'label left open': 1}" in printed
    ours, theirs = (next(line for line in printed.splitlines() if line.startswith(n)) for n in ("ours", "math-verify"))
    assert ours.split() == ["ours", "2", "(", "50.0%)", "0", "2", "100.0%", "33.3%"]
    assert theirs.split() == ["math-verify", "2", "(", "50.0%)", "1", "1", "66.7%", "66.7%"]
    assert "labelled right, ours wrong by integer, math-verify False: '8' against '7'" in printed

    assert script.main(["labelled", str(file), "--boxed-only"]) == 0
    assert "3 rows, 2 labelled right; left out: {'no box': 1, 'label left open': 1}" in capsys.readouterr().out


def test_labelled_file_of_other_columns_is_read_or_refused(script, capsys, tmp_path):
    rows = [{"truth": "7", "said": r"\boxed{7}", "right": True, "other": 1}]
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ["--gold", "truth", "--response", "said"]
    assert script.main(["labelled", str(file), *names, "--label", "right"]) == 0
    assert "1 rows, 1 labelled right" in capsys.readouterr().out
    for more, message in (([], "No column for label among truth, said, right, other"), (["--label", "said"], "label")):
        with pytest.raises(SystemExit):
            script.main(["labelled", str(file), *names, *more])
        assert message in capsys.readouterr().err


def test_figures_of_both_graders_on_the_labelled_pairs_are_printed(script, capsys):
    pairs = read("math_equivalence.jsonl")[:20]
    assert script.check_pairs(pairs)
    printed = capsys.readouterr().out
    assert "ours" in printed and "math-verify" in printed and "false pos." in printed
