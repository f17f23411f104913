#!/usr/bin/env bash
# DAPO RL of Qwen2.5-7B-Instruct with a code interpreter. Every hyper-parameter is in configs/qwen2-7b_dapo.yaml or the YAMLs that it lists.
# Machine: 8 GPUs of 80 GB and 149 GiB of host memory, by the doctor's estimate; disk: 91 GB per checkpoint, up to five at once.
# We have not run it at this size.
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen2-7b_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.save_freq=10]
#   MODEL_PATH   merged SFT checkpoint             outputs/qwen2-7b_sft/merged
#   TRAIN_FILE   problems, parquet                 data/dapo_math_17k.parquet
#   VAL_FILE     validation problems, parquet      data/aime_2025.parquet
#   SANDBOX_URL  sandbox; several with commas      http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints, metrics, validation  outputs/qwen2-7b_dapo
#   NNODES       nodes of 8 GPUs                   1; with more than 1, start Ray on all of them first
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-outputs/qwen2-7b_sft/merged}
NNODES=${NNODES:-1}
dapo qwen2-7b_dapo
