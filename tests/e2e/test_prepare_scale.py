"""Measure the memory of data/prepare_dapo_math_17k.py at the published size of 1,791,700 rows.

The rows are generated: numbered problems as long as the real ones, each 100 times, in the published columns with the
published instructions.
"""

import os
import random
import sys
from pathlib import Path

import pytest

from verl_ext.datasets.problems import features
from verl_ext.datasets.rows import write_parquet

REPO = Path(__file__).resolve().parents[2]
ROWS, DISTINCT = 1_791_700, 17_917
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
BEHIND = '\n\nRemember to put your answer on its own line after "Answer:".'


def problem(number: int) -> str:
    """Make a problem of about 260 characters, as long as the real ones are on average; all are different."""
    rng = random.Random(number)
    names = rng.sample(["triangle", "circle", "sequence", "polynomial", "lattice", "graph", "function", "matrix"], 4)
    facts = ". ".join(f"The {name} has $\\frac{{{rng.randrange(999)}}}{{x_{{{i}}}}}$" for i, name in enumerate(names))
    return f"Problem {number}: let $x_0, \\dots, x_4$ be reals such that the following holds. {facts}. Find $m+n$."


def row(number: int) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": BEFORE + problem(number) + BEHIND}],
        "ability": "MATH",
        "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": str(number % 1000)},
        "extra_info": {"index": number, "split": "train", "id": str(number)},
    }


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_published_size_is_prepared_within_4_gb(tmp_path):
    import pandas as pd

    source, out = tmp_path / "source.parquet", tmp_path / "out.parquet"
    cached = [row(number) for number in range(DISTINCT)]
    write_parquet((cached[i % DISTINCT] for i in range(ROWS)), source, features())

    script = str(REPO / "data" / "prepare_dapo_math_17k.py")
    command = [sys.executable, script, "--input", str(source), "--out", str(out)]
    pid = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert usage.ru_maxrss * 1024 < 4e9  # bytes
    kept = pd.read_parquet(out, columns=["extra_info", "reward_model"])
    assert len(kept) == DISTINCT
    for i in (0, 1, DISTINCT - 1):
        assert kept["extra_info"][i]["id"] == str(i) and kept["reward_model"][i]["ground_truth"] == str(i % 1000)
