import json
import runpy
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
DATA = REPO / "tests" / "data"


@pytest.fixture
def prepare(monkeypatch, capsys):
    """Run data/prepare_<name>.py as a command; return what it printed."""

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(REPO / "data" / f"prepare_{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def read(path):
    import pandas as pd

    return pd.read_parquet(path).to_dict("records")


def test_aime_is_there_without_a_network(prepare, tmp_path):
    printed = prepare("aime", "--out", tmp_path)
    for year, first in (("2024", "45"), ("2025", "70")):
        rows = read(tmp_path / f"aime_{year}.parquet")
        assert len(rows) == 30 and {row["data_source"] for row in rows} == {f"aime_{year}"}
        assert rows[0]["reward_model"]["ground_truth"] == first
        assert all(0 <= int(row["reward_model"]["ground_truth"]) <= 999 for row in rows)
        assert f"aime_{year}.parquet: 30 rows" in printed


def test_the_two_spellings_of_aime_have_the_same_answers():
    """The built-in answers against another data set's, in whatever order and with leading zeros."""
    for year in ("2024", "2025"):
        ours = [json.loads(line) for line in (REPO / f"data/aime/aime_{year}.jsonl").read_text().splitlines()]
        others = [json.loads(line) for line in (DATA / "aime_other_spelling.jsonl").read_text().splitlines()]
        theirs = [row["answer"] for row in others if row["id"].startswith(year)]
        assert sorted(int(row["answer"]) for row in ours) == sorted(map(int, theirs))


@pytest.mark.parametrize(("answer", "message"), [("1000", "AIME's are from 0 to 999"), ("1/2", "1 of 2 rows")])
def test_a_set_that_cannot_be_aime_is_refused(prepare, tmp_path, answer, message):
    source = tmp_path / "a.jsonl"
    rows = [{"problem": "Find a", "answer": "1"}, {"problem": "Find b", "answer": answer}]
    source.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(SystemExit, match=message):
        prepare("aime", "--input", source, "--name", "x", "--out", tmp_path / "x.parquet")


def test_dapo_in_its_official_form(prepare, tmp_path):
    out = tmp_path / "d.parquet"
    printed = prepare(
        "dapo_math_17k", "--input", DATA / "dapo_official_form.jsonl", "--out", out, "--protocol", "hermes"
    )
    assert "3 rows, 3 distinct, 3 kept" in printed
    rows = read(out)
    assert [row["reward_model"]["ground_truth"] for row in rows][:2] == ["34", "37"]
    assert next(row["extra_info"]["id"] for row in rows) == "svs-0"
    for row in rows:
        (message,) = row["prompt"]
        assert message["content"].endswith("\nThe answer format must be: \\boxed{'The final answer goes here.'}")
        assert "Answer:" not in message["content"] and "<code>" not in message["content"]


def test_dapo_reports_what_it_leaves_out(prepare, tmp_path):
    printed = prepare("dapo_math_17k", "--input", DATA / "dapo_rows.jsonl", "--out", tmp_path / "d.parquet")
    assert "dropped 7: the same problem has different answers" in printed
    assert "dapo-35: 64 and 6 | Determine the greatest power of $2$" in printed
    assert "| user: Solve the following problem step by step." in printed


def test_any_jsonl_with_columns_by_name(prepare, tmp_path):
    source, out = tmp_path / "mine.jsonl", tmp_path / "mine.parquet"
    rows = [
        {"task": {"text": "Find the half", "gold": r"\frac12"}},
        {"task": {"text": "Find the third", "gold": 3}},
        {"task": {"text": "Find the half.", "gold": "0.5"}},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    columns = ["--problem-column", "task.text", "--answer-column", "task.gold"]
    prepare("jsonl", "--input", source, "--name", "mine", "--out", out, *columns)
    assert [(row["data_source"], row["reward_model"]["ground_truth"]) for row in read(out)] == [
        ("mine", r"\frac12"),
        ("mine", "3"),
    ]
    assert [row["extra_info"]["id"] for row in read(out)] == ["line 1", "line 2"]
    prepare("jsonl", "--input", source, "--name", "mine", "--out", out, *columns, "--integer-answers")
    assert [row["reward_model"]["ground_truth"] for row in read(out)] == ["3"]
    with pytest.raises(
        SystemExit, match="line 1, column task.solution: the row has no task.solution; it has text, gold"
    ):
        prepare(
            "jsonl", "--input", source, "--name", "m", "--out", out, *columns[:2], "--answer-column", "task.solution"
        )


def test_an_evaluation_set_of_ones_own_may_overlap_with_aime(prepare, tmp_path):
    out = tmp_path / "x.parquet"
    args = ["--input", DATA / "aime_other_spelling.jsonl", "--name", "x", "--out", out]
    assert "60 kept" in prepare("jsonl", *args, "--split", "test")
    assert "dropped 58: overlap with an evaluation set" in prepare("jsonl", *args)
    assert len(read(out)) == 2
