#!/usr/bin/env bash
# DAPO RL of the tiny model on the tiny tool task, on a CPU: about 3 minutes. Settings: configs/tiny_dapo.yaml
#
# Usage: [NAME=value ...] bash recipe/retool/run_tiny_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=5]
#   DATA_DIR     from data/tiny_tools/prepare.py    outputs/quickstart/data
#   MODEL_PATH   merged SFT checkpoint              outputs/quickstart/sft/merged
#   SANDBOX_URL  sandbox; several with commas       http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints and metrics            outputs/quickstart/rl
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. scripts/quickstart.sh starts the sandbox and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

quickstart_dapo tiny_dapo quickstart data/tiny_tools
