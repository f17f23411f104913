"""Measure data/prepare_dapo_math_17k.py at the published size of 1,791,700 rows: its time and memory.

`RETOOL_FULL_SCALE=1 pytest -m slow -s tests/e2e/test_prepare_scale.py` prints both: on 2 cores 128 s and 1.9 GB, and
for as many rows that are all different 252 s and 3.0 GB. Without the variable, as in CI, the test takes a fortieth of
the rows. They are generated: numbered problems as long as the real ones, in the published columns with the published
instructions.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest

from verl_ext.datasets.problems import features
from verl_ext.datasets.rows import write_parquet

REPO = Path(__file__).resolve().parents[2]
SHARE = 1 if os.environ.get("RETOOL_FULL_SCALE") else 40
ROWS, DISTINCT = 1_791_700 // SHARE, 17_917 // SHARE
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("distinct", [DISTINCT, ROWS], ids=["each 100 times", "all different"])
def test_the_published_size_is_prepared_within_4_gb(tmp_path, distinct):
    import pandas as pd

    source, out = tmp_path / "source.parquet", tmp_path / "out.parquet"
    cached = [row(number) for number in range(DISTINCT)]
    write_parquet((cached[i % DISTINCT] if distinct == DISTINCT else row(i) for i in range(ROWS)), source, features())

    command = [
        sys.executable,
        str(REPO / "data" / "prepare_dapo_math_17k.py"),
        "--input",
        str(source),
        "--out",
        str(out),
    ]
    started = time.monotonic()
    pid = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    wall_s, peak_gb = time.monotonic() - started, usage.ru_maxrss * 1024 / 1e9
    print(f"\n{ROWS:,} rows, {distinct:,} distinct: {wall_s:.0f} s, peak {peak_gb:.2f} GB", flush=True)
    assert os.waitstatus_to_exitcode(status) == 0
    assert peak_gb < 4
    kept = pd.read_parquet(out, columns=["extra_info", "reward_model"])
    assert len(kept) == distinct
    for i in (0, 1, distinct - 1):
        assert kept["extra_info"][i]["id"] == str(i) and kept["reward_model"][i]["ground_truth"] == str(i % 1000)
