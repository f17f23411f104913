"""The sandbox needs nothing from training. tests/e2e/test_sandbox_alone.py runs it in an environment without it."""

import subprocess
import sys
from pathlib import Path

from tests.unit.sandbox.server_process import REPOSITORY

TRAINING = ["verl", "torch", "ray", "transformers"]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def run_python(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_module_of_the_sandbox_imports_what_is_of_training():
    modules = [module_name(path) for path in sorted((REPOSITORY / "verl_ext/sandbox").rglob("*.py"))]
    assert {"verl_ext.sandbox.client", "verl_ext.sandbox.server.api"} < set(modules)
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    assert run_python("-c", code + f"print([name for name in {TRAINING} if name in sys.modules])") == "[]\n"


def test_package_itself_needs_the_standard_library_alone_where_verl_is_not_installed():
    code = f"import sys\nsys.path.append({str(REPOSITORY)!r})\nimport verl_ext\nprint('imported')"
    assert run_python("-I", "-S", "-c", code) == "imported\n"  # -S: without site-packages
