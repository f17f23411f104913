"""tests/processes.py, which the stages of the GPU acceptance use on a user's machine."""

import os
import subprocess
from pathlib import Path

from tests.processes import stop_at


def test_a_run_that_stops_at_a_moment_keeps_its_pythonpath(tmp_path: Path) -> None:
    """With `--wheels` the GPU acceptance has verl there."""
    moment, stopped = stop_at("update:5", tmp_path / "a run")
    assert not stopped.exists()
    code = "import os; print(os.environ['PYTHONPATH'], os.environ['VERL_USE_EXTERNAL_MODULES'])"
    for given, kept in (({"PYTHONPATH": "/given"}, ":/given"), ({}, "")):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | moment | given
        command = [moment["PYTHON"], "-c", code]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert said.endswith(f"tests/e2e{kept} verl_ext,moments\n")
