#!/usr/bin/env bash
# Set up .venv, then lint and run the tests. Exits non-zero on the first part that fails, or if a test leaves a process.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: bash scripts/test.sh [unit|slow|all] [pytest arguments]
  unit   ruff and import-linter, then the fast tests (about five minutes)
  slow   the slow unit tests, and those that run the real commands end to end
  all    both, the fast tests, then the slow ones (default)
Example: bash scripts/test.sh unit -k lock -x
EOF
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for arg in "$@"; do
    case $arg in -h | --help) usage && exit ;; esac
done
PART=all
case ${1:-} in
    unit | slow | all) PART=$1 && shift ;;
esac
case ${1:-} in # what follows an option may be its value; what comes first is a test, or a mistake
    "" | -*) ;;
    *)
        if [ ! -e "${1%%::*}" ]; then
            echo "test.sh: '$1' is no part (unit, slow, all), no option of pytest and no file; see --help" >&2
            exit 2
        fi
        ;;
esac

# The stack that .venv has, else a CPU's: the tests train the tiny model, which is for a CPU.
RETOOL_HARDWARE=${RETOOL_HARDWARE:-$(head -n 1 .venv/retool-env.txt 2>/dev/null || true)}
export RETOOL_HARDWARE=${RETOOL_HARDWARE:-cpu}
bash scripts/setup_env.sh
PYTHON=.venv/bin/python
say() { printf '[test] %s\n' "$*"; }

# The viewer's pages are tested in a browser. Where none can be had, those tests skip and say so.
if ! command -v chromium chromium-browser google-chrome >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Chromium for the tests of the viewer"
    timeout 180 bash -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium' >/dev/null 2>&1 ||
        say "apt-get could not install it: the tests in a browser are skipped"
fi

# Temporary files of the tests, pytest's own included, go with this folder. The path is short because Ray puts Unix
# sockets below it, whose paths end at 107 characters.
TMPDIR=$(mktemp -d /tmp/retool.XXXXXX)
chmod 711 "$TMPDIR" # the sandbox, run as root, has programs below it run as another user
export TMPDIR
# Inherited by every process a test starts, so that one that outlives the tests is found and ended as ours.
export RETOOL_TEST_RUN=$TMPDIR
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

survivors() { # pids of processes that carry our mark, without this shell and its children
    local environ pid
    for environ in $(grep -lszF "RETOOL_TEST_RUN=$TMPDIR" /proc/[0-9]*/environ); do
        pid=${environ//[!0-9]/}
        [ "$pid" = "$$" ] || [ "$(ps -o ppid= -p "$pid" | tr -d ' ')" = "$$" ] || echo "$pid"
    done
}
finish() {
    local status=$? pids looks=10
    trap - EXIT
    trap '' INT TERM # what outlived the tests is ended in any case
    [ "$status" -lt 128 ] || looks=1
    for _ in $(seq $looks); do # what was told to end is given the time to do so
        sleep 1
        pids=$(survivors)
        [ -n "$pids" ] || break
    done
    if [ -n "$pids" ]; then
        say "these processes outlived the tests and are ended now:" >&2
        # shellcheck disable=SC2086
        ps -o pid,etime,args -p $(echo $pids | tr ' ' ',') >&2 || true
        # shellcheck disable=SC2086
        kill -9 $pids 2>/dev/null || true
        [ "$status" != 0 ] || status=1
    fi
    rm -rf "$TMPDIR"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# pytest's exit code 5 means that nothing was selected, as when `-k` names only a test of the other part.
run_pytest() {
    local status=0
    "$PYTHON" -m pytest "$@" || status=$?
    [ "$status" != 5 ] || return 0
    [ "$status" = 0 ] || exit "$status"
    SELECTED=1
}
SELECTED=0

SLOW=(-m "slow or gpu" --timeout=1800 --durations=0 --durations-min=5)
# End-to-end tests that start no training and put no load on the machine that would disturb a unit test.
NO_TRAINING=(tests/e2e/test_prepare_scale.py tests/e2e/test_sandbox_alone.py)
# One looks at what is left of a run in /dev/shm, where runs beside it have files too; the threads of the next spin; the
# last compares latencies.
ALONE=(tests/e2e/test_quickstart.py tests/e2e/test_small.py tests/e2e/test_sandbox_faults.py)

if [ "$PART" != slow ]; then
    say "ruff and import-linter"
    .venv/bin/ruff check --output-format=concise .
    .venv/bin/ruff format --check .
    .venv/bin/lint-imports --no-logo --no-cache
    if [ -x .venv/bin/sphinx-build ]; then # the CPU's lock has it
        say "the site, with warnings as errors: outputs/site"
        .venv/bin/sphinx-build -q -W -b html -d "$TMPDIR/doctrees" docs outputs/site
    fi
fi
if [ $# -gt 0 ]; then # of the caller's choice
    [ "$PART" = slow ] || run_pytest "$@"
    [ "$PART" = unit ] || run_pytest "${SLOW[@]}" "$@"
else
    case $PART in
        unit) say "fast tests" && run_pytest ;;
        slow) say "slow unit tests" && run_pytest -m slow tests/unit ;;
        all)
            say "unit tests, the slow ones included, and the end-to-end tests without training"
            run_pytest -m "" -n 2 tests/unit "${NO_TRAINING[@]}"
            SLOW+=("${NO_TRAINING[@]/#/--ignore=}")
            ;;
    esac
    if [ "$PART" != unit ]; then
        say "end-to-end tests, two at a time: a run often waits (a GPU test skips where there is no GPU)"
        run_pytest "${SLOW[@]}" -n 2 --no-loadscope-reorder "${ALONE[@]/#/--ignore=}" tests/e2e tests/gpu
        say "end-to-end tests that run alone"
        run_pytest "${SLOW[@]}" "${ALONE[@]}"
    fi
fi
[ "$SELECTED" = 1 ] || exit 5
