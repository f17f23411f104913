#!/usr/bin/env bash
# DAPO RL of Qwen2.5-32B-Instruct with a code interpreter. Every hyper-parameter is in configs/qwen2-32b_dapo.yaml.
# Machines: 2 nodes of 8 GPUs, or 1 (NNODES=1). Time: a public log of the published run, on 8 GPUs, shows 81 minutes a step
# (42 rollouts, 9 old log-probs, 30 update). Not run by us at this size.
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen2-32b_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.save_freq=10]
#   MODEL_PATH   merged SFT checkpoint             outputs/qwen2-32b_sft/merged
#   TRAIN_FILE   problems, parquet                 data/dapo_math_17k.parquet
#   VAL_FILE     validation problems, parquet      data/aime_2025.parquet
#   SANDBOX_URL  sandbox; several with commas      http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints, metrics, validation  outputs/qwen2-32b_dapo
#   NNODES       nodes of 8 GPUs                   2; with more than 1, start Ray on all of them first
# The same command again goes on from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-outputs/qwen2-32b_sft/merged}
TRAIN_FILE=${TRAIN_FILE:-data/dapo_math_17k.parquet}
VAL_FILE=${VAL_FILE:-data/aime_2025.parquet}
OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-outputs/qwen2-32b_dapo}")
METRICS=$OUTPUT_DIR/metrics-$(date +%s).jsonl # one file per start: verl's file logger never appends

require MODEL_PATH actor_rollout_ref.model.path "Run SFT and merge its checkpoint (recipe/README.md), or set MODEL_PATH."
require TRAIN_FILE data.train_files "Set TRAIN_FILE to a parquet file of problems (recipe/README.md)."
require VAL_FILE data.val_files "Set VAL_FILE to a parquet file of problems (recipe/README.md)."
$PRINT_ONLY || mkdir -p "$OUTPUT_DIR"

exec "$PYTHON" -m verl.trainer.main_ppo --config-dir=configs --config-name=qwen2-32b_dapo "${OPTIONS[@]}" \
  actor_rollout_ref.model.path="'$MODEL_PATH'" data.train_files="'$TRAIN_FILE'" data.val_files="'$VAL_FILE'" \
  retool.sandbox.urls="[${SANDBOX_URL:-http://127.0.0.1:8080}]" trainer.default_local_dir="'$OUTPUT_DIR'" \
  ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="'$METRICS'" \
  trainer.nnodes="${NNODES:-2}" "${OVERRIDES[@]}"
