#!/usr/bin/env bash
# Accept a machine with a GPU: stages of at most 8 minutes, 30 in all, each alone too, and a table of expected against seen.
#
# Usage: bash scripts/gpu_acceptance.sh [STAGE...] [--device cpu] [--wheels FOLDER] [--out FOLDER] [--minutes N] [--list] [--help]
#   PYTHON   default: .venv/bin/python where it is, else python3: the first stages need torch and transformers alone
# `--list` names the stages and what each lacks here; `--help` has the options of single stages. Where no package index answers,
# `python scripts/gpu_wheels.py make` makes the folder of wheels elsewhere.
# The table is also in outputs/gpu_acceptance/acceptance.md, with date and commit, beside the rows of earlier runs.
# Exit status: 0 all chosen stages passed, 1 one failed, 3 none failed and some did not run (the table says why), 2 a wrong option.
# `pytest -m gpu` runs the same stages as tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${PYTHON-} ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
exec "$PYTHON" -m tests.gpu "$@"
