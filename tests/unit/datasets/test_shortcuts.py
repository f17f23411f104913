import json
from fractions import Fraction
from pathlib import Path

import pytest
from shortcuts import describe_shortcuts, random_pair, shortcut_rates

REPO = Path(__file__).parents[3]


def test_a_random_pair_hits_by_what_one_can_count():
    """6 and 2: +: 8 8, -: 4 -4, *: 12 12, /: 3 1/3. Of these 8, two are 8, one is 4, two are 12, one is 3."""
    numbers = [Fraction(6), Fraction(2)]
    assert [random_pair(numbers, Fraction(answer)) for answer in (8, 4, 12, 3, 7)] == [0.25, 0.125, 0.25, 0.125, 0.0]


def test_rates_are_means_over_all_problems():
    problems = [
        ("Ann has 9 pens and 4 cups. How many more?", "5"),  # 9 - 4; a pair: 1 of 8
        ("2 boxes, 1,000 pens and 3.5 coins. In all?", "1005.5"),
        ("One pen and 7 cups", "8"),  # a single number: no rule applies
        ("12 pens in 4 cups", "3"),  # 12 / 4; a pair: 1 of 8
        ("2 pens in each of 3 cups", "6"),  # a pair: 2 of 8
        ("0 of 8 cups", "8"),  # nothing is divided by 0. A pair: 0 + 8, 8 + 0 and 8 - 0, of 8
    ]
    assert shortcut_rates(problems) == pytest.approx(
        {
            "largest minus smallest": 2 / 6,
            "sum of all numbers": 2 / 6,
            "product of all numbers": 1 / 6,
            "largest over smallest if whole, else their difference": 3 / 6,
            "largest over smallest if whole, else the product of all": 2 / 6,
            "random pair and operator": (1 + 1 + 2 + 3) / 8 / 6,
        }
    )
    assert (
        describe_shortcuts({"x_ood": problems}).splitlines()[1].startswith("  x_ood: largest minus smallest 33.3%, sum")
    )


def test_a_source_without_problems_has_no_line():
    said = describe_shortcuts({"svamp": [], "sums": iter([("2 pens and 3 cups. In all?", "5")])})
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == ["  sums"]


def test_a_fifth_of_svamp_falls_to_largest_minus_smallest():
    rows = [json.loads(line) for line in (REPO / "data" / "svamp" / "svamp.jsonl").read_text().splitlines()]
    assert len(rows) == 1000 and all(row["problem"] and row["answer"] == row["answer"].strip() for row in rows)
    rates = shortcut_rates([(row["problem"], row["answer"]) for row in rows])
    assert rates["largest minus smallest"] == pytest.approx(0.213)
