"""scripts/test.sh: which parts run after one that failed, and what the script then returns."""

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# Stands in for pytest and coverage: notes the last argument of each call of pytest, and fails for one argument.
PYTHON = """#!/bin/bash
[ "$2" = pytest ] || { [ "$3" != "$FAILS" ]; exit; }
for last; do :; done
echo "$last" >>"$CALLS"
[ "$last" != "$FAILS" ]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose linters find nothing."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("basedpyright", "ruff", "lint-imports", "shellcheck", "chromium"):
        (programs / name).symlink_to("/bin/true")
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup_env.sh").write_text("")
    (tmp_path / "scripts" / "test.sh").write_bytes((REPO / "scripts" / "test.sh").read_bytes())
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


ALONE = "tests/e2e/test_sandbox_faults.py"


@pytest.mark.parametrize(
    ("part", "fails", "calls", "status"),
    [
        (["nightly"], "tests/unit", ["tests/unit", "tests/e2e", ALONE], 1),
        (["nightly"], ALONE, ["tests/unit", "tests/e2e", ALONE], 1),
        (["nightly"], "nothing", ["tests/unit", "tests/e2e", ALONE], 0),
        (["nightly"], "report", ["tests/unit", "tests/e2e", ALONE], 1),  # of coverage
        ([], "tests/unit", ["tests/unit"], 1),
        ([], "nothing", ["tests/unit", "tests/e2e", ALONE], 0),
        (["unit"], "nothing", ["tests/unit"], 0),
        (["-x", "tests/unit/test_lock.py"], "tests/unit/test_lock.py", ["tests/unit/test_lock.py"], 1),
    ],
)
def test_only_a_night_goes_on_after_a_part_that_failed(part, fails, calls, status, checkout):
    noted = checkout / "calls"
    path = f"{checkout}/.venv/bin:{os.environ['PATH']}"  # with Chromium, else the script installs it
    environment = os.environ | {"CALLS": str(noted), "FAILS": fails, "PATH": path}
    command = ["bash", checkout / "scripts" / "test.sh", *part]
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert (noted.read_text().split(), ended.returncode) == (calls, status), ended.stderr
