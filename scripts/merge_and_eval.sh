#!/usr/bin/env bash
# Merge a checkpoint of an SFT or RL run into a Hugging Face folder, unless that is done already, and evaluate it with tools.
#
# Usage: [SANDBOX_URL=...] bash scripts/merge_and_eval.sh CKPT_DIR [arguments and overrides of retool evaluate]
#   CKPT_DIR   a run's folder (its newest complete step), its global_step_N, or global_step_N/actor, from any number of ranks.
#              In the quickstart's folder, its RL run, or its SFT run if there is none
# Writes into the run's folder: merged_step_N, the model, always in bf16 because verl's merger has no other type; and
# evaluation/global_step_N with samples, result.md and result.json. The same command continues an interrupted one. Example:
#   bash scripts/merge_and_eval.sh outputs/qwen2-32b_dapo --data aime_2025 --n 30 --compare outputs/qwen2-32b_sft/evaluation/global_step_372
set -euo pipefail

if [[ $# == 0 || $1 == -* ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  [[ ${1-} == --help || ${1-} == -h ]] && exit 0 || exit 2
fi
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON-} ]]; then
  if [[ -x $ROOT/.venv/bin/python ]]; then PYTHON=$ROOT/.venv/bin/python; else PYTHON=python; fi
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m verl_ext.evaluation --checkpoint "$@"
