"""Test tool RL and text RL side by side, `quickstart --compare text`, with few rows and steps."""

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.e2e.conftest import pipeline
from verl_ext.records import store
from verl_ext.runs.folder import judged_files

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

OVERRIDES = [
    *("--sft=trainer.total_training_steps=10", "--sft=trainer.save_freq=10", "--sft=trainer.test_freq=-1"),
    *("--rl=trainer.total_training_steps=1", "--rl=trainer.save_freq=1", "--rl=data.train_batch_size=4"),
    *("--rl=actor_rollout_ref.actor.ppo_mini_batch_size=4", "--rl=actor_rollout_ref.rollout.n=4"),
    "--rl=algorithm.filter_groups.max_num_gen_batches=1",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run both; return their folders."""
    out = tmp_path_factory.mktemp("compare") / "tiny"
    pipeline(out, "--compare", "text", *OVERRIDES, timeout_s=2400)
    return out, out.with_name("tiny-text")


def test_both_have_the_same_problems_and_all_steps(runs: tuple[Path, Path]) -> None:
    for run in runs:
        assert [entry["status"] for entry in json.loads((run / "stages.json").read_text())] == ["done"] * 7
    for name in ("rl_train", "eval"):
        tool, text = (pd.read_parquet(run / "data" / f"{name}.parquet") for run in runs)
        assert tool.equals(text)


def test_text_rl_writes_one_turn_and_calls_nothing(runs: tuple[Path, Path]) -> None:
    rows = store.read(store.path_of(runs[1] / "rl", "trajectories", 1)).to_pylist()
    assert rows and {row["protocol"] for row in rows} == {"text"}
    assert all([turn["role"] for turn in row["turns"]] == ["model"] and not row["calls"] for row in rows)
    assert "<code>" in "".join(str(pd.read_parquet(runs[0] / "data" / "sft_train.parquet").messages.tolist()))
    assert "<code>" not in str(pd.read_parquet(runs[1] / "data" / "sft_train.parquet").messages.tolist())


def test_a_page_compares_them_on_the_same_problems(runs: tuple[Path, Path]) -> None:
    content = json.loads((runs[0] / "comparison.json").read_text())
    assert [*content] == ["tiny", "tiny-text"]
    difference = content["tiny-text"]["difference_from_first"]["overall"]
    (file,) = judged_files(runs[1] / "eval" / "after")
    problems = {row["problem"] for row in store.read(file).to_pylist()}
    assert difference["num_problems"] == len(problems) == 32 and difference["num_unmatched"] == 0
    assert "Accuracy, length and time" in (runs[0] / "comparison.html").read_text()
