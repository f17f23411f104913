#!/usr/bin/env bash
# Break what a run needs (sandbox, verifier, rollout servers, learner, disk), and see what the run does (docs/evidence/faults.md).
#
# Usage: bash scripts/chaos.sh [--side ours|verl|trl] [--quick] [--only FAULT ...] [--seed N] [--from FOLDER] [--out FOLDER] [--results FILE]
#   --side   verl: stock 0.9.1 with its own tool loop, sampler and checkpoints; trl: TRL's GRPOTrainer, which
#            scripts/bench_vs_trl.sh installs. Both use our sandbox, and the same model, sizes, seed and faults
#   --quick  five faults, at most 35 minutes on two cores
# `.venv/bin/python scripts/chaos.py --help` names the faults. The full disk is a small tmpfs, which needs root.
# Starts from the SFT model of the quickstart in outputs/quickstart, and makes it if it is missing. Prints a table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1-} == --help ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit 0
fi

RUN=outputs/quickstart
for ((i = 1; i < $#; i++)); do
  next=$((i + 1))
  if [[ ${!i} == --from ]]; then RUN=${!next}; fi
done

export RETOOL_HARDWARE=${RETOOL_HARDWARE:-cpu} # the tiny model runs on a CPU
bash scripts/setup_env.sh
if [[ ! -e $RUN/sft/merged ]]; then
  .venv/bin/python -m verl_ext.quickstart --out "$RUN" --stage data --stage sft --stage merge
fi
exec .venv/bin/python scripts/chaos.py "$@"
