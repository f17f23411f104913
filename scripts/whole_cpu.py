"""Collect the variables of a process that has all cores of a CPU, as the small model's launchers set them."""

import subprocess
from pathlib import Path

COMMON = "recipe/retool/common.sh"


def whole_cpu() -> dict[str, str]:
    """Return this process's variables, plus those that recipe/retool/run_smollm2_dapo.sh adds on a CPU if unset."""
    command = f"set -euo pipefail; source {COMMON}; all_cores; env -0"
    repo = Path(__file__).resolve().parents[1]
    told = subprocess.run(["bash", "-c", command], cwd=repo, check=True, capture_output=True, text=True).stdout
    return {"VLLM_CPU_KVCACHE_SPACE": "1"} | dict(line.split("=", 1) for line in told.split("\0") if line)
