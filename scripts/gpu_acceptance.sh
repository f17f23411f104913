#!/usr/bin/env bash
# Test a machine with a GPU in stages, and print what was expected and seen. A stage takes at most 8 minutes, all of them 30.
#
# Usage: bash scripts/gpu_acceptance.sh [STAGE...] [--device cpu] [--out FOLDER] [--minutes N] [--list] [--help]
#   PYTHON   default: .venv/bin/python, or python3 if there is none: the first stages need only torch and transformers
# `--list` names the stages and what each lacks here. The table is also in outputs/gpu_acceptance/acceptance.md, with date
# and commit, below the tables of earlier runs.
# Exit status: 0 all chosen stages passed; 1 one failed; 2 a wrong option; 3 some did not run (the table says why).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${PYTHON-} ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
exec "$PYTHON" -m scripts.gpu_acceptance "$@"
