"""Test that `pip install .` in a bare environment gives the sandbox, server and client, and nothing of training.

The packages come from the index that pip is configured with.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TRAINING = {"verl", "ray", "torch", "transformers", "vllm", "wrapt", "numpy"}
PROGRAM = """
import asyncio, importlib.util, sys
from verl_ext.sandbox import SandboxClient, running_server

async def main(url):
    client = SandboxClient([url])
    print(repr((await client.run("print(6 * 7)")).stdout))
    print((await client.run("import time; time.sleep(9)", timeout_s=0.3)).status)
    print((await client.run("1 / 0")).return_code)
    await client.aclose()

with running_server(workers=1) as url:
    asyncio.run(main(url))
print(sorted(name for name in sys.argv[1:] if importlib.util.find_spec(name)))
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_sandbox_runs_if_nothing_else_is_installed(tmp_path):
    source, python = tmp_path / "source", tmp_path / "env/bin/python"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPO / name, source)
    shutil.copytree(REPO / "verl_ext", source / "verl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DATA_DIR")}

    def run(*command: str | Path) -> subprocess.CompletedProcess:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    run(sys.executable, "-m", "venv", tmp_path / "env")
    run(python, "-m", "pip", "install", "--quiet", source)
    done = run(python, "-c", PROGRAM, *sorted(TRAINING))
    assert done.stdout.splitlines() == ["'42\\n'", "timeout", "1", "[]"]
    assert "sandbox: numpy, sympy: not installed" in done.stderr
    size_mb = sum(path.lstat().st_size for path in (tmp_path / "env").rglob("*")) >> 20
    assert size_mb < 80, f"the environment has {size_mb} MB, expected about 50: what do `dependencies` bring now?"
