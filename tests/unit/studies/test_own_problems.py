"""The problems of the study of own problems: different ones, with their right answers."""

import re

from scripts.studies.own_problems import PROBLEMS, of_mawps, of_sentences

KINDS = {
    "buys": lambda a, b: a + b,
    "gave": lambda a, b: a - b,
    "in each box": lambda a, b: a * b,
    "into boxes of": lambda a, b: a // b,
}


def test_the_answers_of_the_sentences_are_right():
    rows = of_sentences()
    assert len({row["problem"] for row in rows}) == len(rows) == PROBLEMS
    found = set()
    for row in rows:
        (kind,) = (each for each in KINDS if each in row["problem"])
        found.add(kind)
        assert int(row["answer"]) == KINDS[kind](*map(int, re.findall(r"\d+", row["problem"]))), row
    assert found == {*KINDS}


def test_the_problems_of_mawps_get_their_numbers(tmp_path):
    text = "How much is number0 and number1 ?,8.0 2.5,+ number0 number1,10.5"
    (tmp_path / "train.csv").write_text(
        f"Question,Numbers,Equation,Answer\n{text}\n{text}\nnumber0 ?,3.0,number0,3.0\n"
    )
    rows = sorted(of_mawps(tmp_path / "train.csv"), key=lambda row: row["answer"])
    assert rows == [
        {"problem": "How much is 8 and 2.5 ?", "answer": "10.5"},
        {"problem": "3 ?", "answer": "3"},
    ]
