#!/bin/bash
# mini-swe-agent, unchanged, in a virtual environment of its own: python -m venv mini && mini/bin/pip install mini-swe-agent
#     MINI=$PWD/mini/bin/mini bash recipe/retool/run_qwen3-4b_dapo.sh retool.agent.run='[bash,docs/own_agent/mini_swe_agent.sh]'
# Its commands run where it runs, without a sandbox: use containers for tasks that you do not trust.
set -euo pipefail
export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_SILENT_STARTUP=1 MSWEA_GLOBAL_CONFIG_DIR=$PWD LITELLM_LOCAL_MODEL_COST_MAP=True
task=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["messages"][-1]["content"])')
# Commands as text between fences, which any model can write; without the last two options they are tool calls.
exec "${MINI:-mini}" -t "$task" -m "openai/$OPENAI_MODEL" -y --exit-immediately -o "$PWD/trajectory.json" \
    -c mini_textbased.yaml --model-class litellm_textbased < /dev/null
