#!/usr/bin/env bash
# An RL run as a Ray job: it goes on when this shell is closed, and Ray keeps its log. Needs Ray's dashboard, which
# requirements/gpu.txt has and requirements/cpu.txt has not; without it, call the launcher on the head node.
#
#   DASHBOARD=true bash scripts/ray_cluster.sh head                     on the first machine; workers as without a job
#   NNODES=2 TRAIN_FILE=... bash recipe/ray_job.sh run_qwen2-32b_dapo.sh [Hydra overrides]     there, or through an SSH tunnel
#   ray job list; ray job logs -f ID; ray job stop ID
#
# Variables: RAY_API_SERVER_ADDRESS (http://127.0.0.1:8265), REPO (this repository on the cluster: this one's path), PYTHON
# (.venv's); the launcher's own are handed on if they are set, and so is RAY_AUTH_MODE (token).
set -euo pipefail

launcher=${1:?which launcher of recipe/retool? Such as run_qwen2-32b_dapo.sh}
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
