"""Run the commands of docs/tutorials/own-task.md as the page has them, except their folder, the sandbox and Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO
from tests.processes import kill_tree
from verl_ext.records import store
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_the_commands_of_the_page_run_the_example(python: str, tmp_path: Path) -> None:
    page = (REPO / "docs" / "tutorials" / "own-task.md").read_text(encoding="utf-8")
    [commands] = re.findall(r"## Run the example\n.*?```bash\n(.*?)```", page, re.DOTALL)
    commands, started = re.subn(r"retool sandbox .* &\n", "", commands)
    assert started == 1 and commands.count("+task=shop") == 2
    with running_server() as url:
        commands = commands.replace("outputs/shop", str(tmp_path))
        commands = commands.replace("+task=shop", f"+task=shop 'retool.sandbox.urls=[{url}]'")
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with open(tmp_path / "log.txt", "wb") as log:
            run = subprocess.Popen(["bash", "-euc", commands], cwd=REPO, env=environment, stdout=log, stderr=log)
            try:
                code = run.wait(1500)
            finally:
                kill_tree(run.pid)
    said = (tmp_path / "log.txt").read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert "leaves out the tools" not in said, "the template that the page copies shows them"
    trajectories = list(store.rows(tmp_path / "rl"))
    assert len(trajectories) >= 128
    for trajectory in trajectories:
        assert '"name": "price_of"' in trajectory["prompt"] and "code_interpreter" not in trajectory["prompt"]
        assert trajectory["verdict"]["rule"] == "bill", "scored by the verifier of the page"
