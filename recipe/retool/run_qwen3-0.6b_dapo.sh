#!/usr/bin/env bash
# DAPO RL of Qwen3-0.6B with a code interpreter, after SFT. Every hyper-parameter is in configs/qwen3-0.6b_dapo.yaml or the YAMLs that it lists.
# Machine: one GPU of 24 GB, or of 16 GB with +lora=rl actor_rollout_ref.rollout.gpu_memory_utilization=0.7, and 24 GB of host memory,
# by the doctor's estimate. We have not run it at this size.
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen3-0.6b_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.save_freq=10]
#   MODEL_PATH   merged SFT checkpoint             outputs/qwen3-0.6b_sft/merged
#   TRAIN_FILE   problems, parquet                 data/dapo_math_17k.parquet
#   VAL_FILE     validation problems, parquet      data/aime_2025.parquet
#   SANDBOX_URL  sandbox; several with commas      http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints, metrics, validation  outputs/qwen3-0.6b_dapo
#   NNODES       nodes of 1 GPU                    1; with more than 1, start Ray on all of them first
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-outputs/qwen3-0.6b_sft/merged}
NNODES=${NNODES:-1}
dapo qwen3-0.6b_dapo
