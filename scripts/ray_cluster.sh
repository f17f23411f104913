#!/usr/bin/env bash
# Run Ray on several machines, for the RL launchers of recipe/retool. All must see the repository and outputs/ at the same path.
#
#   bash scripts/ray_cluster.sh head                   on the first machine
#   bash scripts/ray_cluster.sh worker 10.0.0.1:6379   on each other machine, with the first one's address
#   bash scripts/ray_cluster.sh wait 2                 on the first: wait until 2 nodes have joined, at most 10 minutes
# Then, on the first: RAY_AUTH_MODE=token NNODES=2 bash recipe/retool/run_qwen2-32b_dapo.sh
# Head and worker run until you stop them (Ctrl-C, SIGTERM), and then end their processes. Nobody can join or run anything
# without the token: the head makes ~/.ray/auth_token if there is none; the other machines need the same file (or RAY_AUTH_TOKEN).
#
# Variables: RAY_PORT (6379), NODE_IP (what Ray finds), NUM_GPUS and NUM_CPUS (all), PYTHON (.venv's), DASHBOARD (false; true
# for recipe/ray_job.sh, which uses 127.0.0.1:8265 of the head).
# Ray's workers keep the environment that Ray was started in. Set everything here that a run needs on every node, such as
# WANDB_API_KEY, HF_HOME, NCCL_* and SANDBOX_TOKEN.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")" >&2; }

if [[ -z ${PYTHON-} ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; else PYTHON=python; fi
fi
ray() { exec "$PYTHON" -c 'import sys; from ray.scripts.scripts import main; sys.exit(main())' "$@"; }

export VERL_USE_EXTERNAL_MODULES=verl_ext # verl does not pass it on to other nodes
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [[ ${1-} == head && $RAY_AUTH_MODE == token && -z ${RAY_AUTH_TOKEN-} && ! -e ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
  (ray get-auth-token --generate) > /dev/null
fi

OPTIONS=(--block --disable-usage-stats)
if [[ -n ${NODE_IP-} ]]; then OPTIONS+=(--node-ip-address="$NODE_IP"); fi
if [[ -n ${NUM_GPUS-} ]]; then OPTIONS+=(--num-gpus="$NUM_GPUS"); fi
if [[ -n ${NUM_CPUS-} ]]; then OPTIONS+=(--num-cpus="$NUM_CPUS"); fi

case ${1-} in
  head)
    ray start --head --port="${RAY_PORT:-6379}" --include-dashboard="${DASHBOARD:-false}" "${OPTIONS[@]}"
    ;;
  worker)
    ray start --address="${2:?give the head as HOST:PORT, such as 10.0.0.1:6379}" "${OPTIONS[@]}"
    ;;
  wait)
    "$PYTHON" - "${2:?give the number of nodes}" <<'PYTHON'
import sys
import time

import ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + 600
while not ray.is_initialized():  # the head itself may still be starting
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        if time.monotonic() > deadline:
            sys.exit("ray_cluster.sh: no Ray head has started on this machine within 10 minutes. Start it: ray_cluster.sh head")
        time.sleep(1)
while (nodes := [node for node in ray.nodes() if node["Alive"]]) and len(nodes) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"ray_cluster.sh: {len(nodes)} of {wanted} nodes have joined after 10 minutes. Is the head's port open?")
    time.sleep(1)
for node in nodes:
    gpus = node["Resources"].get("GPU", 0)
    print(f"{node['NodeManagerAddress']}: {gpus:g} GPUs")
PYTHON
    ;;
  --help | -h) usage ;;
  *)
    usage
    exit 2
    ;;
esac
