#!/usr/bin/env bash
# SFT of the tiny model on the tiny tool task, on a CPU with two ranks: about 3 minutes. Settings: configs/tiny_sft.yaml
#
# Usage: [NAME=value ...] bash recipe/retool/run_tiny_sft.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=50]
#   DATA_DIR        of data/tiny_tools/prepare.py          outputs/quickstart/data
#   MODEL_PATH      of data/tiny_tools/build_model.py      outputs/quickstart/model
#   OUTPUT_DIR      checkpoints and metrics                outputs/quickstart/sft
#   NPROC_PER_NODE  ranks                                  2
# DOCTOR=0 starts it without the checks of verl_ext/doctor.
# The same command again goes on from the last checkpoint. scripts/quickstart.sh makes the data and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DATA_DIR=${DATA_DIR:-outputs/quickstart/data}
MODEL_PATH=${MODEL_PATH:-outputs/quickstart/model}
OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-outputs/quickstart/sft}")
export VERL_FILE_LOGGER_PATH=$OUTPUT_DIR/metrics-$(date +%s).jsonl # one file per start: verl's file logger never appends
logger_folders

require DATA_DIR data.train_files "Make it: python data/tiny_tools/prepare.py --out $DATA_DIR"
require MODEL_PATH model.path "Make it: python data/tiny_tools/build_model.py --out $MODEL_PATH"

OVERRIDES=(data.train_files="'$DATA_DIR/sft_train.parquet'" data.val_files="'$DATA_DIR/sft_val.parquet'"
  model.path="'$MODEL_PATH'" trainer.default_local_dir="'$OUTPUT_DIR'" "${OVERRIDES[@]}")
doctor tiny_sft --nnodes=1 --nproc-per-node="${NPROC_PER_NODE:-2}" "${OVERRIDES[@]}"
$PRINT_ONLY || mkdir -p "$OUTPUT_DIR"

TORCHRUN=(-m verl_ext.cpu.warm_python -m torch.distributed.run --standalone --nproc-per-node="${NPROC_PER_NODE:-2}")
if $PRINT_ONLY; then TORCHRUN=(); fi

exec "$PYTHON" "${TORCHRUN[@]}" -m verl.trainer.sft_trainer --config-dir=configs --config-name=tiny_sft "${OPTIONS[@]}" \
  "${OVERRIDES[@]}"
