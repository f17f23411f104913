#!/usr/bin/env bash
# DAPO RL of the tiny model on the tiny tool task, on a CPU: about 3 minutes. Settings: configs/tiny_dapo.yaml
#
# Usage: [NAME=value ...] bash recipe/retool/run_tiny_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=5]
#   DATA_DIR     of data/tiny_tools/prepare.py      outputs/quickstart/data
#   MODEL_PATH   merged SFT checkpoint              outputs/quickstart/sft/merged
#   SANDBOX_URL  sandbox; several with commas       http://127.0.0.1:8080
#   OUTPUT_DIR   checkpoints and metrics            outputs/quickstart/rl
# DOCTOR=0 starts it without the checks of verl_ext/doctor.
# The same command again goes on from the last checkpoint. scripts/quickstart.sh starts the sandbox and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DATA_DIR=${DATA_DIR:-outputs/quickstart/data}
MODEL_PATH=${MODEL_PATH:-outputs/quickstart/sft/merged}
OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-outputs/quickstart/rl}")
export VERL_FILE_LOGGER_PATH=$OUTPUT_DIR/metrics-$(date +%s).jsonl # one file per start: verl's file logger never appends
logger_folders

require DATA_DIR data.train_files "Make it: python data/tiny_tools/prepare.py --out $DATA_DIR"
require MODEL_PATH actor_rollout_ref.model.path "Run SFT and merge its last checkpoint (recipe/README.md), or set MODEL_PATH."

OVERRIDES=(data.train_files="'$DATA_DIR/rl_train.parquet'" data.val_files="'$DATA_DIR/eval.parquet'"
  actor_rollout_ref.model.path="'$MODEL_PATH'" retool.sandbox.urls="[${SANDBOX_URL:-http://127.0.0.1:8080}]"
  trainer.default_local_dir="'$OUTPUT_DIR'" "${OVERRIDES[@]}")
$PRINT_ONLY || forget_dead_ray
doctor tiny_dapo "${OVERRIDES[@]}"
$PRINT_ONLY || mkdir -p "$OUTPUT_DIR"

WARM=(-m verl_ext.cpu.warm_python) # the run's processes start by fork, without their imports
if $PRINT_ONLY; then WARM=(); fi

exec "$PYTHON" "${WARM[@]}" -m verl.trainer.main_ppo --config-dir=configs --config-name=tiny_dapo "${OPTIONS[@]}" \
  "${OVERRIDES[@]}"
