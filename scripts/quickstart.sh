#!/usr/bin/env bash
# Set up .venv, then teach a language model to use a code interpreter on a CPU.
# Needs Python 3.11 to 3.13, gcc, git and libnuma. The stages are in verl_ext/quickstart/pipeline.py.
set -euo pipefail

usage() { # here, and not only in pipeline.py: it must also work before anything is installed
    cat <<'EOF_USAGE'
Usage: bash scripts/quickstart.sh [options]
Set up .venv (3.4 GB), then teach a language model to use a code interpreter: SFT, DAPO RL, evaluation and report,
with the real verl and vLLM, on a CPU. Run it again to reuse finished stages and resume an interrupted one.
  --model NAME      tiny (default): 390,000 random parameters, minutes. small: SmolLM2-135M-Instruct with weights from
                    4 bits, about an hour. Or a Hugging Face folder or hub name
  --data FILE       your own problems with answers, JSONL or parquet, in outputs/FILE; the next three go with it
  --traces FILE     traces of problems like these for SFT, from retool traces; the tiny model needs them
  --tools FILE.py   functions that the model can call
  --reward FILE.py:NAME[=WEIGHT]  a function of (episode, row) that is added to the reward; also without --data
  --stage STAGE     run only this stage: data, sft, merge, rl, eval or report (may be repeated)
  --fresh           delete the output folder first
  --out DIR         the output folder; default: outputs/quickstart, with --model small outputs/small, with --from FOLDER
                    FOLDER-2, FOLDER-3, ...
  --from FOLDER     start another RL run from this quickstart's data and SFT model, e.g. --from outputs/quickstart
                    --rl KEY=VALUE
  --compare text    also without the tool, on the same problems: text RL from its own SFT, in OUT-text; a page shows both
  --seed N          for data, initial weights and sampling; default: 0
  --prepare ARG     argument of data/tiny_tools/prepare.py or data/small/prepare.py (may be repeated, like the next two)
  --sft KEY=VALUE   Hydra override of configs/tiny_sft.yaml or smollm2_sft.yaml
  --rl KEY=VALUE    Hydra override of configs/tiny_dapo.yaml or smollm2_dapo.yaml
Relative paths start at the repository's root. The tiny model uses the CPU even if there is a GPU; the small one uses
what .venv was made for. RETOOL_HARDWARE=gpu makes another .venv.
EOF_USAGE
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for arg in "$@"; do
    case $arg in -h | --help) usage && exit ;; esac
done
rung=tiny
for python in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do # refuse a wrong option before the install
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
        rung=$("$python" -I verl_ext/quickstart/options.py "$@")
        break
    fi
done
# The stack that .venv has; for the tiny model always a CPU's, because its settings are for no other.
hardware=${RETOOL_HARDWARE:-$(head -n 1 .venv/retool-env.txt 2>/dev/null || true)}
if [ "$rung" = tiny ]; then
    if [ "${hardware:-cpu}" != cpu ]; then
        echo "quickstart.sh: the tiny model runs on a CPU, but RETOOL_HARDWARE or .venv is for a GPU." \
            "Use a separate clone with RETOOL_HARDWARE=cpu, or --model small." >&2
        exit 2
    fi
    hardware=cpu
fi
[ -z "$hardware" ] || export RETOOL_HARDWARE=$hardware
bash scripts/setup_env.sh
exec .venv/bin/python -m verl_ext.quickstart "$@"
