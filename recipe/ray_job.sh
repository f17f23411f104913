#!/usr/bin/env bash
# Start an RL run as a Ray job: it continues when you close this shell, and Ray keeps its log. It needs Ray's dashboard, which
# requirements/gpu.txt includes and requirements/cpu.txt does not. Without the dashboard, call the launcher on the head node.
#
#   DASHBOARD=true bash scripts/ray_cluster.sh head                     on the first machine; start workers as usual
#   NNODES=2 TRAIN_FILE=... bash recipe/ray_job.sh run_qwen2-32b_dapo.sh [Hydra overrides]     there, or through an SSH tunnel
#   ray job list; ray job logs -f ID; ray job stop ID
#
# Variables: RAY_API_SERVER_ADDRESS (http://127.0.0.1:8265), REPO (path of this repository on the cluster; default: as here),
# PYTHON (default: .venv's). The launcher's variables and RAY_AUTH_MODE (default: token) are passed on.
set -euo pipefail

launcher=${1:?expected a launcher of recipe/retool, such as run_qwen2-32b_dapo.sh}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ! -f $here/recipe/retool/$launcher ]]; then
  echo "ray_job.sh: there is no recipe/retool/$launcher. Expected one of: $(cd "$here/recipe/retool" && echo run_*_dapo*.sh)" >&2
  exit 1
fi
if [[ -z ${PYTHON-} ]]; then
  if [[ -x $here/.venv/bin/python ]]; then PYTHON=$here/.venv/bin/python; else PYTHON=python; fi
fi

export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
VARIABLES=(RAY_AUTH_MODE="$RAY_AUTH_MODE")
for name in MODEL_PATH TRAIN_FILE VAL_FILE DATA_DIR SANDBOX_URL OUTPUT_DIR NNODES RETOOL_HARDWARE DOCTOR; do
  if [[ -n ${!name-} ]]; then VARIABLES+=("$name=${!name}"); fi
done

exec "$PYTHON" -c 'import sys; from ray.scripts.scripts import main; sys.exit(main())' \
  job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- \
  env "${VARIABLES[@]}" bash "${REPO:-$here}/recipe/retool/$launcher" "$@"
