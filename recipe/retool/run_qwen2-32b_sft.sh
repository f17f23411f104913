#!/usr/bin/env bash
# SFT of Qwen2.5-32B-Instruct on ReTool traces. Every hyper-parameter is in configs/qwen2-32b_sft.yaml or the YAMLs that it lists.
# Machines: 2 nodes of 8 GPUs of 80 GB (start it on each of them), or 1 of 141 GB (NNODES=1), with 186 GiB of host memory each, by
# the doctor's estimate; disk: 390 GB per checkpoint, up to four at once. Time: 372 steps; a public log of the published run shows
# 7 s per step. We have not run it at this size.
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen2-32b_sft.sh [--cfg job] [Hydra overrides, e.g. trainer.total_epochs=1]
#   MODEL_PATH      Hugging Face folder or hub name   Qwen/Qwen2.5-32B-Instruct
#   TRAIN_FILE      traces, parquet                   data/retool_sft.parquet
#   OUTPUT_DIR      checkpoints and metrics           outputs/qwen2-32b_sft; a folder that all nodes share
#   NNODES          nodes                             2
#   NPROC_PER_NODE  GPUs per node                     8
#   NODE_RANK       0 to NNODES - 1                   0
#   MASTER_ADDR     address of node 0                 needed if NNODES > 1
#   MASTER_PORT     a free port of node 0             29500
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-data/retool_sft.parquet}
NNODES=${NNODES:-2}
sft qwen2-32b_sft
