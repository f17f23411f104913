#!/usr/bin/env bash
# Set up .venv, then lint and run the tests. Exits non-zero if a part fails, or if a test leaves a process; only `nightly`
# runs the parts after one that failed.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: bash scripts/test.sh [unit|nightly] [pytest arguments]
           what CI runs for a change: linters and the site, all tests that are not `nightly` (18 minutes)
  unit     of that, all but the launches of real commands, which are marked `slow` (10 minutes)
  nightly  every test, also those marked `nightly` (an hour and a half), and the coverage of the unit tests: outputs/coverage.txt
Example: bash scripts/test.sh unit -k lock -x
EOF
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for arg in "$@"; do
    case $arg in -h | --help) usage && exit ;; esac
done
PART=change
case ${1:-} in
    unit | nightly) PART=$1 && shift ;;
esac
case ${1:-} in # a word after an option may be its value; as the first word it is a test, or a mistake
    "" | -*) ;;
    *)
        if [ ! -e "${1%%::*}" ]; then
            echo "test.sh: '$1' is neither a part (unit, nightly) nor an option of pytest nor a file; see --help" >&2
            exit 2
        fi
        ;;
esac

# The stack that .venv has, else a CPU's, because the tests train the tiny model.
RETOOL_HARDWARE=${RETOOL_HARDWARE:-$(head -n 1 .venv/retool-env.txt 2>/dev/null || true)}
export RETOOL_HARDWARE=${RETOOL_HARDWARE:-cpu}
bash scripts/setup_env.sh
PYTHON=.venv/bin/python
say() { printf '[test] %s\n' "$*"; }

# The viewer's pages are tested in a browser. If none can be installed, those tests skip and say so.
if ! command -v chromium chromium-browser google-chrome >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing Chromium for the viewer's tests"
    timeout 180 bash -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium' >/dev/null 2>&1 ||
        say "apt-get could not install it: tests in a browser are skipped"
fi

# All temporary files of the tests, pytest's included, are below this folder, which is removed at the end. Its path is
# short because Ray puts Unix sockets below it, whose paths have at most 107 characters.
TMPDIR=$(mktemp -d /tmp/retool.XXXXXX)
chmod 711 "$TMPDIR" # run as root, the sandbox runs programs below it as another user
export TMPDIR
# Every process that a test starts inherits this, so that one that outlives the tests is recognised and ended.
export RETOOL_TEST_RUN=$TMPDIR
unset PYTHONDONTWRITEBYTECODE # else each of hundreds of processes compiles our modules, and pytest all tests
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

survivors() { # pids of processes that carry our mark, without this shell and its children
    local environ pid
    while read -r environ; do
        pid=${environ//[!0-9]/}
        [ "$pid" = "$$" ] || [ "$(ps -o ppid= -p "$pid" | tr -d ' ')" = "$$" ] || echo "$pid"
    done < <(grep -lszF "RETOOL_TEST_RUN=$TMPDIR" /proc/[0-9]*/environ)
}
finish() {
    local status=$? pids looks=10
    trap - EXIT
    trap '' INT TERM # processes that outlived the tests are ended in any case
    [ "$status" -lt 128 ] || looks=1
    for _ in $(seq $looks); do # processes that were asked to end get the time to do so
        sleep 1
        mapfile -t pids < <(survivors)
        [ ${#pids[@]} != 0 ] || break
    done
    if [ ${#pids[@]} != 0 ]; then
        say "these processes outlived the tests and are killed:" >&2
        ps -o pid,etime,args -p "$(IFS=, && echo "${pids[*]}")" >&2 || true
        kill -9 "${pids[@]}" 2>/dev/null || true
        [ "$status" != 0 ] || status=1
    fi
    rm -rf "$TMPDIR"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Tests that look at what a run leaves in /dev/shm, where other runs also have files, whose threads spin, or that
# compare latencies.
ALONE=(tests/e2e/test_quickstart.py tests/e2e/test_small.py tests/e2e/test_sandbox_faults.py)
COVERAGE=()
case $PART in # `unit`: pyproject.toml
    unit) MARKS=() ;;
    change) MARKS=(-m "not nightly") ;;
    nightly) MARKS=(-m "") COVERAGE=(--cov=verl_ext --cov-report=) ;;
esac
export COVERAGE_FILE=$TMPDIR/coverage
failed=0
run_pytest() { # a night goes on after a part that failed, to show all that is red
    "$PYTHON" -m pytest "${MARKS[@]}" --durations=30 --durations-min=2 "$@" || { [ "$PART" = nightly ] && failed=1; }
}

say "pyright, in the background; ruff, import-linter and shellcheck"
.venv/bin/basedpyright >"$TMPDIR/types" &
types=$!
.venv/bin/ruff check --output-format=concise .
.venv/bin/ruff format --check .
.venv/bin/lint-imports --no-logo --no-cache
git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 .venv/bin/shellcheck
if [ -x .venv/bin/sphinx-build ]; then
    say "the site, with warnings as errors: outputs/site"
    .venv/bin/sphinx-build -q -W -b html -d "$TMPDIR/doctrees" docs outputs/site
else
    say "no site: this .venv has no Sphinx, which only requirements/cpu.txt brings"
fi
wait "$types" || { cat "$TMPDIR/types" && exit 1; }
if [ $# -gt 0 ]; then # the caller chooses
    run_pytest "$@"
else
    say "unit tests"
    run_pytest "${COVERAGE[@]}" tests/unit
    if [ ${#COVERAGE[@]} != 0 ]; then
        mkdir -p outputs
        "$PYTHON" -m coverage report >outputs/coverage.txt || failed=1 # there is no data
        say "coverage of verl_ext by the unit tests, without processes that they start: $(tail -n 1 outputs/coverage.txt)"
    fi
    if [ "$PART" != unit ]; then
        say "end-to-end tests, two at a time because a run often waits"
        run_pytest -n 2 --no-loadscope-reorder "${ALONE[@]/#/--ignore=}" tests/e2e
        say "end-to-end tests that need the machine to themselves"
        run_pytest "${ALONE[@]}"
    fi
fi
[ "$failed" = 0 ]
