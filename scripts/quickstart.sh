#!/usr/bin/env bash
# The main job in one command: set up .venv, then teach a tiny language model to use a code interpreter, on a CPU.
# Needs Python 3.11 or 3.12, gcc and git. `bash scripts/quickstart.sh --help` lists the options; verl_ext/pipeline.py has the stages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
  *" -h "* | *" --help "*) ;;
  *) bash scripts/setup_env.sh ;;
esac
exec "$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)" -m verl_ext.pipeline "$@"
