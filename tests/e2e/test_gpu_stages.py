"""Test the GPU acceptance's stages that start verl, on a CPU; tests/unit/test_gpu_acceptance.py has the others."""

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
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert [(stage, what, ok) for _, stage, what, _, _, ok, _ in rows[2:]] == [
        ("buckets", "0.00318 GB by verl's buckets", "ok"),
        ("sft", "killed after the checkpoint of step", "ok"),
        ("sft", "first step of the resumed run", "ok"),
        ("sft", "steps of SFT of the resumed run", "ok"),
        ("sft", "losses of the resumed run against a CPU's", "ok"),
        ("sft", "merged", "ok"),
    ]
