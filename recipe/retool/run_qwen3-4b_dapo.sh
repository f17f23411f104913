#!/usr/bin/env bash
# DAPO RL of Qwen3-4B-Instruct-2507 with a code interpreter. Every hyper-parameter is in configs/qwen3-4b_dapo.yaml or the YAMLs that it lists.
# Machine: one GPU of 80 GB and 53 GiB of host memory, by the doctor's estimate. We have not run it at this size.
# It needs no SFT, because the model already calls tools in hermes' JSON.
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen3-4b_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.save_freq=10]
#   MODEL_PATH   Hugging Face folder or hub name   Qwen/Qwen3-4B-Instruct-2507
#   TRAIN_FILE   problems, parquet                 data/dapo_math_17k.parquet
#   VAL_FILE     validation problems, parquet      data/aime_2025.parquet
#   SANDBOX_URL  sandbox; several with commas      http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints, metrics, validation  outputs/qwen3-4b_dapo
#   NNODES       nodes of 1 GPU                    1; with more than 1, start Ray on all of them first
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B-Instruct-2507}
NNODES=${NNODES:-1}
dapo qwen3-4b_dapo
