"""Run scripts/filter_by_pass_rate.py --generate with the tiny launcher's real rollouts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_problems_are_filtered_by_the_launchers_own_rollouts(small, tmp_path):
    import pandas as pd

    data, out = tmp_path / "problems.parquet", tmp_path / "hard.parquet"
    problems = pd.read_parquet(small / "data" / "rl_train.parquet").iloc[:40]
    problems.to_parquet(data)
    command = [sys.executable, "scripts/filter_by_pass_rate.py", "--data", str(data), "--out", str(out)]
    command += ["--samples", "3", "--chunk", "24", "--max-rate", "0.5"]
    command += ["--generate", "recipe/retool/run_tiny_dapo.sh"]
    environment = os.environ | {"MODEL_PATH": str(small / "sft" / "merged")}
    for attempt in range(2):
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
        logs = "".join(log.read_text()[-3000:] for log in tmp_path.rglob("chunk_*.log"))
        assert done.returncode == 0, done.stdout + done.stderr + logs
        assert done.stdout.count("done already") == 2 * attempt
    rates = [json.loads(line) for line in out.with_suffix(".pass_rates.jsonl").read_text().splitlines()]
    assert len(rates) == 40 and all(rate["samples"] == 3 for rate in rates)
    kept = [rate["row"] for rate in rates if rate["pass_rate"] <= 0.5]
    assert [info["index"] for info in pd.read_parquet(out)["extra_info"]] == [
        problems["extra_info"].iloc[row]["index"] for row in kept
    ]
