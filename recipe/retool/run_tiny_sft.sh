#!/usr/bin/env bash
# SFT of the tiny model on the tiny tool task, on a CPU with two ranks: about 3 minutes. Settings: configs/tiny_sft.yaml
#
# Usage: [NAME=value ...] bash recipe/retool/run_tiny_sft.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=50]
#   DATA_DIR        from data/tiny_tools/prepare.py        outputs/quickstart/data
#   MODEL_PATH      from data/tiny_tools/build_model.py    outputs/quickstart/model
#   OUTPUT_DIR      checkpoints and metrics                outputs/quickstart/sft
#   NPROC_PER_NODE  ranks                                  2
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. scripts/quickstart.sh makes the data and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

quickstart_sft tiny_sft quickstart data/tiny_tools 2
