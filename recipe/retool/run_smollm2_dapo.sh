#!/usr/bin/env bash
# DAPO RL of SmolLM2-135M-Instruct on word problems, on one GPU, or on a CPU if there is none. Settings: configs/smollm2_dapo.yaml
# The model's weights come from 4 bits (data/small/build_model.py), unless SFT started from another model.
# On two cores it takes 30 to 58 minutes and at most 14 GB (docs/evidence/small-models.md).
#
# Usage: [NAME=value ...] bash recipe/retool/run_smollm2_dapo.sh [--cfg job] [Hydra overrides, e.g. trainer.total_training_steps=2]
#   DATA_DIR         from data/small/prepare.py        outputs/small/data
#   MODEL_PATH       merged SFT checkpoint             outputs/small/sft/merged
#   SANDBOX_URL      sandbox; several with commas      http://127.0.0.1:8080
#   OUTPUT_DIR       checkpoints and metrics           outputs/small/rl
#   RETOOL_HARDWARE  cpu or gpu                        gpu if `nvidia-smi -L` answers
# DOCTOR=0 skips the checks of verl_ext/doctor.
# Run the same command again to continue from the last checkpoint. scripts/quickstart.sh --model small starts the sandbox and calls this.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! has_gpu; then
  OVERRIDES=(+hardware=cpu_small "${OVERRIDES[@]}")
  all_cores # vLLM and the actor take turns
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB: 23,000 tokens; a step has about 11,000
fi
quickstart_dapo smollm2_dapo small data/small
