"""Test the GPU acceptance's stages that start verl, on a CPU; tests/unit/test_gpu_acceptance.py has the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_verls_buckets_and_an_sft_that_is_killed_resumed_and_merged_pass_on_a_cpu(python: str, tmp_path: Path) -> None:
    command = ["bash", str(REPO / "scripts" / "gpu_acceptance.sh"), "--device=cpu", "buckets", "sft"]
    environment = os.environ | {"PYTHON": sys.executable}  # `python` serves the launchers, by the variable
    done = subprocess.run([*command, f"--out={tmp_path}"], capture_output=True, text=True, env=environment)
    logs = [f"{path}:\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(tmp_path.glob("*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    rows = {
        (result["name"], row["what"]): row["ok"]
        for result in json.loads((tmp_path / "acceptance.json").read_text())
        for row in result["rows"]
    }
    assert rows == {
        ("buckets", "0.00318 GB by verl's buckets"): True,
        ("sft", "killed after the checkpoint of step"): True,
        ("sft", "first step of the resumed run"): True,
        ("sft", "steps of SFT of the resumed run"): True,
        ("sft", "losses of the resumed run against a CPU's"): True,
        ("sft", "merged"): True,
    }
