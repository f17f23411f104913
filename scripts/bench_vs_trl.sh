#!/usr/bin/env bash
# Compare the time of an RL step with that of Hugging Face TRL's GRPOTrainer with a tool. Both take turns on the same task,
# model, batch and sandbox. TRL's asynchronous trainer, which overlaps tool calls, needs NCCL and is not measured
# (docs/evidence/speed.md).
#
# Usage: bash scripts/bench_vs_trl.sh [--model tiny|small] [--steps N] [--rounds N] [--latencies S ...] [--run FOLDER]
#                                     [--trainers NAME ...]
#   tiny   (default) with the sandbox unchanged, and with 100 ms more per call; about 15 minutes
#   small  SmolLM2-135M-Instruct (weights from 4 bits), sandbox unchanged. A third run, ours without dynamic sampling, does
#          the same work as TRL, which has none. --trainers chooses among verl-retool, TRL and
#          "verl-retool, no dynamic sampling"
# Starts from the SFT model of the quickstart (outputs/quickstart or outputs/small), and makes it if it is missing. Installs
# TRL into a separate environment, outputs/bench_vs_trl/venv (requirements/trl.txt, 1.5 GB). Prints a table; the figures go
# to a new folder below outputs/bench_vs_trl/runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1-} == --help ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
fi

if (source recipe/retool/common.sh && has_gpu); then
  echo "bench_vs_trl.sh: TRL runs on the CPU, but our side would use this machine's GPU. Set RETOOL_HARDWARE=cpu," \
    "in a clone whose .venv is not for GPUs." >&2
  exit 2
fi

MODEL=tiny RUN=
for ((i = 1; i <= $#; i++)); do
  next=$((i + 1))
  case ${!i} in
    --model) MODEL=${!next-} ;;
    --model=*) MODEL=${!i#*=} ;;
    --run) RUN=${!next-} ;;
    --run=*) RUN=${!i#*=} ;;
  esac
done
if [[ -z $RUN ]]; then
  if [[ $MODEL == small ]]; then RUN=outputs/small; else RUN=outputs/quickstart; fi
fi

bash scripts/setup_env.sh
TRL=outputs/bench_vs_trl/venv
if [[ ! -e $TRL/ready ]] || ! cmp -s "$TRL/ready" requirements/trl.txt; then
  echo "[bench] installing TRL into $TRL"
  rm -rf "$TRL"
  .venv/bin/python -m venv "$TRL"
  pin=$(grep -oE '^torch==[^ ]+' requirements/cpu.txt)
  # As in setup_env.sh: the CPU build is in pip's configured indexes, or in PyTorch's own index.
  "$TRL/bin/python" -m pip install --quiet "$pin" 2>"$TRL/pip.log" ||
    "$TRL/bin/python" -m pip install --quiet "$pin" --index-url https://download.pytorch.org/whl/cpu
  "$TRL/bin/python" -m pip install --quiet -r requirements/trl.txt 2>>"$TRL/pip.log"
  cp requirements/trl.txt "$TRL/ready"
fi

if [[ ! -e $RUN/sft/merged ]]; then
  .venv/bin/python -m verl_ext.quickstart --model "$MODEL" --out "$RUN" --stage data --stage sft --stage merge
fi
exec .venv/bin/python scripts/bench_vs_trl.py --run "$RUN" --trl-python "$TRL/bin/python" \
  --out outputs/bench_vs_trl/runs "$@"
