"""Two domains in one real run that is killed: shares of the trained groups, sizes, and what a checkpoint keeps."""

import shutil
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from tests.e2e.conftest import read_metrics
from tests.e2e.test_resume import Run
from verl_ext.ledger.prompts import read_tally
from verl_ext.outcome import PromptEnd
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

SETTINGS = [
    "++reward.reward_kwargs.random_reward_p=0.5",  # such a small model solves nothing, and equal groups teach nothing
    "algorithm.filter_groups.max_num_gen_batches=4",
    "+retool.domains={even:{weight:3},odd:{weight:1,n:6}}",
    *("retool.curriculum.enable=true", "trainer.test_freq=4"),
]


def two_domains(small: Path, folder: Path) -> Path:
    """Copy a quickstart folder; its rows alternate between two data sources."""
    shutil.copytree(small / "data", folder / "data")
    (folder / "sft").mkdir()
    (folder / "sft" / "merged").symlink_to(small / "sft" / "merged")
    for path in (folder / "data").rglob("*.parquet"):
        table = pd.read_parquet(path)
        if "data_source" in table:
            table["data_source"] = ["odd" if number % 2 else "even" for number in range(len(table))]
            table.to_parquet(path)
    return folder


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_quotas_hold_over_a_kill_and_the_books_balance(small: Path, tmp_path: Path, mode: str) -> None:
    with running_server() as url:
        run = Run(mode, tmp_path / "rl", two_domains(small, tmp_path / "two"), url)
        run.kill_at("rollout:5" if mode == "separate_async" else "rollout:4", *SETTINGS)
        run.finish(*SETTINGS)
    assert run.starts[0][:2] == [1, 2] and run.starts[-1] == [3, 4]
    tally = read_tally(run.out)
    assert tally.faults() == [] and set(tally.domains.values()) == {"even", "odd"}
    assert {tally.sizes[uid] for uid, name in tally.domains.items() if name == "odd"} == {6}
    steps = dict(read_metrics(run.out, lambda data: "domain/odd/share" in data))
    shares = [steps[step]["domain/even/share"] for step in range(1, 5)]  # of 4 groups
    if mode == "sync":
        assert shares == [0.75] * 4
    else:  # a domain whose groups are not ready lends its part of a batch
        assert 2.75 <= sum(shares) <= 3.25
    assert steps[4]["domain/odd/run_share"] == 1 - sum(shares) / 4, "the sums of the run began anew"
    trained = Counter(tally.domains[uid] for uid, end in tally.ends.items() if end is PromptEnd.TRAINED)
    assert trained["even"] > trained["odd"] > 0
    assert steps[4]["curriculum/even/untried"] < steps[1]["curriculum/even/untried"]
