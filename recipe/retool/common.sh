# shellcheck shell=bash
# Sourced by the launchers in this folder: it goes to the repository's root, finds Python, sorts arguments, checks inputs and
# the run (verl_ext/doctor), and holds the commands of SFT and RL. Paths in variables are relative to the repository's root.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

if [[ ${1-} == --help ]]; then # the launcher's own header; Hydra's help is `--hydra-help`
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "recipe/retool/$(basename "$0")"
  exit 0
fi

if [[ -z ${PYTHON-} ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; else PYTHON=python; fi
fi
export VERL_USE_EXTERNAL_MODULES=verl_ext

# Hydra expects its options (`--cfg job`) before all overrides (`key=value`, `~key`), and the launchers add overrides.
OPTIONS=() OVERRIDES=() PRINT_ONLY=false
for arg in "$@"; do
  case $arg in
    --cfg | --cfg=* | -c | --info | --info=* | -i | --hydra-help) OPTIONS+=("$arg") PRINT_ONLY=true ;;
    -*) OPTIONS+=("$arg") ;;
    objective=*) OVERRIDES+=("+$arg") ;; # appended to the run's defaults, so that it overrides the run's own values
    *=* | ~*) OVERRIDES+=("$arg") ;;
    *) OPTIONS+=("$arg") ;; # the value of the option before it
  esac
done

# require NAME KEY HINT: the path in variable NAME exists, unless the command line overrides KEY or Hydra only prints.
require() {
  local override
  if $PRINT_ONLY || [[ -e ${!1} ]]; then return; fi
  for override in "${OVERRIDES[@]}"; do
    if [[ $override == "$2="* || ($2 == data.* && $override == +task=*) ]]; then return; fi # a task may name its files
  done
  echo "$(basename "$0"): $1=${!1} does not exist. $3" >&2
  exit 1
}

# quoted VALUE: quote a text for a Hydra override; it may contain quotes, brackets or spaces.
quoted() {
  local quote="'"
  printf "'%s'" "${1//$quote/\\$quote}"
}

# sandbox_urls: the override with all sandboxes that SANDBOX_URL names. An IPv6 address contains brackets itself.
sandbox_urls() {
  local url urls=() list
  IFS=, read -ra urls <<< "${SANDBOX_URL:-http://127.0.0.1:8080}"
  for url in "${urls[@]}"; do list+=${list:+,}$(quoted "$url"); done
  printf 'retool.sandbox.urls=[%s]' "$list"
}

# doctor CONFIG [OPTION...] OVERRIDE...: run the quick checks of verl_ext/doctor; a FAIL ends the launcher. DOCTOR=0 skips them.
doctor() {
  if $PRINT_ONLY || [[ ${DOCTOR:-1} == 0 ]]; then return; fi
  "$PYTHON" -m verl_ext.doctor --quick --config-name "$@" >&2 || {
    echo "$(basename "$0"): not started, see above. Correct what FAIL lines name, or start it anyway with DOCTOR=0." >&2
    exit 1
  }
}

# logger_folders: where verl's loggers `tensorboard` and `wandb` write, unless these variables say so already.
logger_folders() {
  export TENSORBOARD_DIR=${TENSORBOARD_DIR:-$OUTPUT_DIR/tensorboard} WANDB_DIR=${WANDB_DIR:-$OUTPUT_DIR}
}

# torchrun ends its ranks at SIGHUP even if `nohup` makes the shell ignore it, unless you name the signals to handle.
HANGUP=()
if [[ $(trap -p HUP) == "trap -- '' "* ]] && ! $PRINT_ONLY && "$PYTHON" -c '
import importlib.util as util, pathlib
spec = util.find_spec("torch")
run = spec and pathlib.Path(spec.origin).parent / "distributed" / "run.py"
raise SystemExit(not (run and "--signals-to-handle" in run.read_text()))' > /dev/null; then
  HANGUP=("--signals-to-handle=SIGTERM,SIGINT,SIGQUIT")
fi

# sft CONFIG: SFT by torchrun, from the variables that the launcher's header names.
sft() {
  OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-outputs/$1}")
  VERL_FILE_LOGGER_PATH=$OUTPUT_DIR/metrics-$(date +%s).jsonl # one file per start: verl's file logger never appends
  export VERL_FILE_LOGGER_PATH
  logger_folders
  require TRAIN_FILE data.train_files "Create it with: python data/prepare_retool_sft.py, or set TRAIN_FILE."

  local torchrun=(-m torch.distributed.run --nproc-per-node="${NPROC_PER_NODE:-8}" "${HANGUP[@]}")
  if $PRINT_ONLY; then
    torchrun=()
  elif ((NNODES > 1)); then
    : "${MASTER_ADDR:?set it to the address of node 0, or set NNODES=1 for a single machine}"
    torchrun+=(--nnodes="$NNODES" --node-rank="${NODE_RANK:-0}")
    torchrun+=(--master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
  else
    torchrun+=(--standalone)
  fi
  OVERRIDES=(model.path="$(quoted "$MODEL_PATH")" data.train_files="$(quoted "$TRAIN_FILE")"
    trainer.default_local_dir="$(quoted "$OUTPUT_DIR")" "${OVERRIDES[@]}")
  doctor "$1" --nnodes="$NNODES" --nproc-per-node="${NPROC_PER_NODE:-8}" "${OVERRIDES[@]}"
  $PRINT_ONLY || mkdir -p "$OUTPUT_DIR"

  exec "$PYTHON" "${torchrun[@]}" -m verl.trainer.sft_trainer --config-dir=configs --config-name="$1" "${OPTIONS[@]}" \
    "${OVERRIDES[@]}"
}

# has_gpu: decides like scripts/setup_env.sh; RETOOL_HARDWARE=cpu or gpu overrides it.
has_gpu() {
  [[ ${RETOOL_HARDWARE:-$(nvidia-smi -L > /dev/null 2>&1 && echo gpu || echo cpu)} == gpu ]]
}

# quickstart_files FOLDER TOOLS MODEL RUN: set DATA_DIR, MODEL_PATH and OUTPUT_DIR of a quickstart's run, by default in outputs/FOLDER.
quickstart_files() {
  DATA_DIR=${DATA_DIR:-outputs/$1/data}
  MODEL_PATH=${MODEL_PATH:-outputs/$1/$3}
  OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-outputs/$1/$4}")
  VERL_FILE_LOGGER_PATH=$OUTPUT_DIR/metrics-$(date +%s).jsonl # one file per start: verl's file logger never appends
  export VERL_FILE_LOGGER_PATH
  logger_folders
  require DATA_DIR data.train_files "Create it with: python $2/prepare.py --out $DATA_DIR"
}

# is_path NAME: whether it is a path; otherwise it may be a name on the hub.
is_path() {
  [[ $1 == outputs/* || $1 == [/.]* ]]
}

# Environment of a process that has all cores of a CPU to itself. Its threads spin for a moment before they sleep: if they slept at
# once (only OMP_WAIT_POLICY=PASSIVE), an update would take longer; if they never slept (ACTIVE), other programs would get no time.
# A CPU with instructions for bf16 multiplies several times as fast if numbers are rounded to bf16 within products of matrices;
# numbers and sums stay fp32. ONEDNN_DEFAULT_FPMATH_MODE=STRICT switches it off; verl_ext/cpu/patches.py makes torch follow it.
all_cores() {
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-300000}
  if grep -qwE 'amx_bf16|avx512_bf16' /proc/cpuinfo; then
    export ONEDNN_DEFAULT_FPMATH_MODE=${ONEDNN_DEFAULT_FPMATH_MODE:-BF16}
  fi
  # Return a freed block of 2 MB or more to the system. By default glibc keeps blocks below 32 MB, and a run grows with every
  # step. Huge pages make a new block cheaper.
  export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-2097152} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-67108864}
  export THP_MEM_ALLOC_ENABLE=${THP_MEM_ALLOC_ENABLE:-1}
  # Use one arena for all threads, so that each can reuse what another frees. With more, the actor grows with every step.
  export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-1}
}

# quickstart_sft CONFIG FOLDER TOOLS RANKS: SFT of the quickstart's model in outputs/FOLDER; TOOLS has prepare.py and build_model.py.
quickstart_sft() {
  local ranks=${NPROC_PER_NODE:-$4} torchrun
  quickstart_files "$2" "$3" model sft
  if is_path "$MODEL_PATH"; then
    require MODEL_PATH model.path "Create it with: python $3/build_model.py --out $MODEL_PATH"
  else
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-0} # otherwise verl_ext/cpu/warm_python.py forbids the hub
  fi
  OVERRIDES=(data.train_files="$(quoted "$DATA_DIR/sft_train.parquet")" data.val_files="$(quoted "$DATA_DIR/sft_val.parquet")"
    model.path="$(quoted "$MODEL_PATH")" trainer.default_local_dir="$(quoted "$OUTPUT_DIR")" "${OVERRIDES[@]}")
  doctor "$1" --nnodes=1 --nproc-per-node="$ranks" "${OVERRIDES[@]}"
  $PRINT_ONLY || mkdir -p "$OUTPUT_DIR"
  torchrun=(-m verl_ext.cpu.warm_python -m torch.distributed.run --standalone --nproc-per-node="$ranks" "${HANGUP[@]}")
  if $PRINT_ONLY; then torchrun=(); fi
  exec "$PYTHON" "${torchrun[@]}" -m verl.trainer.sft_trainer --config-dir=configs --config-name="$1" "${OPTIONS[@]}" \
    "${OVERRIDES[@]}"
}

# quickstart_dapo CONFIG FOLDER TOOLS: RL of the merged SFT model in outputs/FOLDER.
quickstart_dapo() {
  local warm=(-m verl_ext.cpu.warm_python) # the run's processes start by fork, without their imports
  quickstart_files "$2" "$3" sft/merged rl
  if is_path "$MODEL_PATH"; then
    require MODEL_PATH actor_rollout_ref.model.path "Run SFT and merge its last checkpoint (docs/tutorials/train-32b.md), or set MODEL_PATH."
  else
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-0}
  fi
  OVERRIDES=(data.train_files="$(quoted "$DATA_DIR/rl_train.parquet")" data.val_files="$(quoted "$DATA_DIR/eval.parquet")"
    actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")" "$(sandbox_urls)"
    trainer.default_local_dir="$(quoted "$OUTPUT_DIR")" "${OVERRIDES[@]}")
  $PRINT_ONLY || forget_dead_ray
  doctor "$1" "${OVERRIDES[@]}"
  $PRINT_ONLY || mkdir -p "$OUTPUT_DIR"
  if $PRINT_ONLY; then warm=(); fi
  exec "$PYTHON" "${warm[@]}" -m verl.trainer.main_ppo --config-dir=configs --config-name="$1" "${OPTIONS[@]}" "${OVERRIDES[@]}"
}

# Ray notes in a file which cluster was started last, and leaves it there when that cluster is killed. The next run would wait
# for minutes for a dead head.
forget_dead_ray() {
  local file="${RAY_TMPDIR:-${TMPDIR:-/tmp}}/ray/ray_current_cluster" address
  if [[ -n ${RAY_ADDRESS-} || ! -s $file ]]; then return; fi
  address=$(< "$file")
  # shellcheck disable=SC2016 # the inner shell expands $0 and $1
  if timeout 5 bash -c '> "/dev/tcp/$0/$1"' "${address%:*}" "${address##*:}" 2> /dev/null; then return; fi
  echo "$(basename "$0"): no Ray answers at $address, which $file names. Removing the file and starting a new Ray." >&2
  rm -f "$file"
}

# dapo CONFIG: RL on Ray, from the variables that the launcher's header names.
dapo() {
  local metrics
  OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-outputs/$1}")
  metrics=$OUTPUT_DIR/metrics-$(date +%s).jsonl # one file per start: verl's file logger never appends
  logger_folders
  TRAIN_FILE=${TRAIN_FILE:-data/dapo_math_17k.parquet}
  VAL_FILE=${VAL_FILE:-data/aime_2025.parquet}
  if is_path "$MODEL_PATH"; then
    require MODEL_PATH actor_rollout_ref.model.path "Run SFT and merge its checkpoint (docs/tutorials/train-32b.md), or set MODEL_PATH."
  fi
  require TRAIN_FILE data.train_files "Create it with: python data/prepare_dapo_math_17k.py, or set TRAIN_FILE."
  require VAL_FILE data.val_files "Create it with: python data/prepare_aime.py, or set VAL_FILE."
  OVERRIDES=(actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")" data.train_files="$(quoted "$TRAIN_FILE")" data.val_files="$(quoted "$VAL_FILE")"
    "$(sandbox_urls)" trainer.default_local_dir="$(quoted "$OUTPUT_DIR")"
    ++ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$(quoted "$metrics")"
    ++ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR="$(quoted "$TENSORBOARD_DIR")"
    ++ray_kwargs.ray_init.runtime_env.env_vars.WANDB_DIR="$(quoted "$WANDB_DIR")"
    trainer.nnodes="$NNODES" "${OVERRIDES[@]}")
  $PRINT_ONLY || forget_dead_ray
  doctor "$1" "${OVERRIDES[@]}"
  $PRINT_ONLY || mkdir -p "$OUTPUT_DIR"

  exec "$PYTHON" -m verl.trainer.main_ppo --config-dir=configs --config-name="$1" "${OPTIONS[@]}" "${OVERRIDES[@]}"
}
