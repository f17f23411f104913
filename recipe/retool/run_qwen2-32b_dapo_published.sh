#!/usr/bin/env bash
# DAPO RL of Qwen2.5-32B-Instruct with a code interpreter, as the published run really was.
# Every hyper-parameter is in configs/qwen2-32b_dapo_published.yaml or the YAMLs that it lists.
# Machines: 2 nodes of 8 GPUs of 80 GB and 247 GiB of host memory, or 1 of 141 GB and 430 GiB (NNODES=1), by the doctor's estimate;
# disk: 390 GB per checkpoint, up to five at once. Time: a public log of the published run, on 8 GPUs, shows 81 minutes per step
# (42 rollouts, 9 old log-probs, 30 update). We have not run it at this size.
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen2-32b_dapo_published.sh [--cfg job] [Hydra overrides, e.g. trainer.save_freq=10]
#   MODEL_PATH   merged SFT checkpoint             outputs/qwen2-32b_sft/merged
#   TRAIN_FILE   problems, parquet                 data/dapo_math_17k.parquet
#   VAL_FILE     validation problems, parquet      data/aime_2025.parquet
#   SANDBOX_URL  sandbox; several with commas      http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints, metrics, validation  outputs/qwen2-32b_dapo_published
#   NNODES       nodes of 8 GPUs                   2; with more than 1, start Ray on all of them first
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-outputs/qwen2-32b_sft/merged}
NNODES=${NNODES:-2}
dapo qwen2-32b_dapo_published
