#!/usr/bin/env bash
# SFT of SmolLM2-135M-Instruct on word problems, on one GPU or, where there is none, on a CPU. Settings: configs/smollm2_sft.yaml
# The model's weights come from 4 bits (data/small/build_model.py); MODEL_PATH takes any other, with a hub the published ones.
# On two cores: 2 to 3 minutes, 5.5 GB at the peak (docs/evidence/small-models.md).
#
# Usage: [NAME=value ...] bash recipe/retool/run_smollm2_sft.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=2]
#   DATA_DIR         of data/small/prepare.py                              outputs/small/data
#   MODEL_PATH       of data/small/build_model.py; a folder or a hub name  outputs/small/model
#   OUTPUT_DIR       checkpoints and metrics                               outputs/small/sft
#   NPROC_PER_NODE   ranks                                                 1
#   RETOOL_HARDWARE  cpu or gpu                                            gpu where `nvidia-smi -L` answers
# DOCTOR=0 starts it without the checks of verl_ext/doctor.
# The same command again goes on from the last checkpoint. scripts/quickstart.sh --model small makes model and data and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! has_gpu; then
  OVERRIDES=(+hardware=cpu_small_sft "${OVERRIDES[@]}")
  all_cores
fi
quickstart_sft smollm2_sft small data/small 1
