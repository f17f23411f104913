#!/usr/bin/env bash
# SFT of Qwen3-0.6B on ReTool traces. Every hyper-parameter is in configs/qwen3-0.6b_sft.yaml or the YAMLs that it lists.
# Machine: one GPU of 24 GB, or of 16 GB with +lora=sft, and 16 GB of host memory, by the doctor's estimate.
# We ran it once at this size, with random weights (docs/evidence/gpu.md).
# To merge a LoRA checkpoint with its adapters:
#   VERL_USE_EXTERNAL_MODULES=verl_ext python -m verl.model_merger merge --backend fsdp --local_dir CKPT --target_dir MERGED
#
# Usage: [NAME=value ...] bash recipe/retool/run_qwen3-0.6b_sft.sh [--cfg job] [Hydra overrides, e.g. trainer.total_epochs=1]
#   MODEL_PATH      Hugging Face folder or hub name   Qwen/Qwen3-0.6B
#   TRAIN_FILE      traces, parquet                   data/retool_sft.parquet
#   OUTPUT_DIR      checkpoints and metrics           outputs/qwen3-0.6b_sft; a folder that all nodes share
#   NNODES          nodes                             1
#   NPROC_PER_NODE  GPUs per node                     1
#   NODE_RANK       0 to NNODES - 1                   0
#   MASTER_ADDR     address of node 0                 needed if NNODES > 1
#   MASTER_PORT     a free port of node 0             29500
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. `--cfg job` only prints the run, on any machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
TRAIN_FILE=${TRAIN_FILE:-data/retool_sft.parquet}
NNODES=${NNODES:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-1}
sft qwen3-0.6b_sft
