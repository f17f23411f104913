#!/usr/bin/env bash
# verl 0.9.1 as it is, on the tiny task; scripts/bench/chaos.py calls it.
#
# Usage: PYTHON=FILE SANDBOX_URL=URL [JUDGE_URL=URL] bash scripts/bench/stock/run_verl.sh FOLDER NOTES
#   FOLDER has stock.yaml, the whole config; NOTES gets metrics
set -euo pipefail
export PYTHONPATH VERL_USE_EXTERNAL_MODULES=stock_verl HF_HUB_OFFLINE=1
export SAGEMAKER_CONTAINER_LOG_LEVEL=WARNING # else a package that vLLM imports hides the warnings of all others
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERL_FILE_LOGGER_PATH=$2/metrics-$(date +%s).jsonl # one file per start
export VERL_FILE_LOGGER_PATH
exec "$PYTHON" -m verl.trainer.main_ppo --config-dir="$1" --config-name=stock hydra.run.dir="$1/hydra"
