#!/usr/bin/env bash
# SFT of SmolLM2-135M-Instruct on word problems, on one GPU, or on a CPU if there is none. Settings: configs/smollm2_sft.yaml
# The model's weights come from 4 bits (data/small/build_model.py); MODEL_PATH names any other, such as the published ones on the hub.
# On two cores it takes 2 to 3 minutes and at most 5.5 GB (docs/evidence/small-models.md).
#
# Usage: [NAME=value ...] bash recipe/retool/run_smollm2_sft.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=2]
#   DATA_DIR         from data/small/prepare.py                            outputs/small/data
#   MODEL_PATH       from data/small/build_model.py; folder or hub name    outputs/small/model
#   OUTPUT_DIR       checkpoints and metrics                               outputs/small/sft
#   NPROC_PER_NODE   ranks                                                 1
#   RETOOL_HARDWARE  cpu or gpu                                            gpu if `nvidia-smi -L` answers
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. scripts/quickstart.sh --model small makes model and data and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! has_gpu; then
  OVERRIDES=(+hardware=cpu_small_sft "${OVERRIDES[@]}")
  all_cores
fi
quickstart_sft smollm2_sft small data/small 1
