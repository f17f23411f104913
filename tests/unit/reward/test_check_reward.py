"""The checks of scripts/check_reward.py on the excerpts in tests/data, and that they can fail."""

import json
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
DATA = REPO / "tests" / "data"


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("check_reward")


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
