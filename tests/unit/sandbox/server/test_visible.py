"""What programs may read of the machine, and that the server does not start if that includes the answers."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.unit.sandbox.machines import needs_root
from tests.unit.sandbox.server_process import REPOSITORY, Server
from verl_ext.sandbox.server import visible


@pytest.fixture
def readable(tmp_path, monkeypatch) -> Path:
    """The one folder that programs may read."""
    folder = tmp_path / "usr/local/lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(visible, "readable_paths", lambda **_: [str(folder)])
    return folder


def test_folder_below_a_readable_one_is_exposed(readable):
    (readable / "repository/data").mkdir(parents=True)
    for hidden in (readable / "repository", readable / "repository/data", readable, f"{readable}/repository/"):
        assert visible.find_exposed([str(hidden)]) == (str(hidden), str(readable))


def test_folder_beside_or_above_a_readable_one_is_not(readable):
    for folder in (readable.parent / "src", readable.parent / "lib2", readable.parent, Path("/")):
        assert visible.find_exposed([str(folder)]) is None


def test_links_do_not_hide_where_a_folder_is(readable, tmp_path):
    (readable / "repository").mkdir()
    (tmp_path / "home").symlink_to(readable / "repository")
    assert visible.find_exposed([str(tmp_path / "home")]) == (str(tmp_path / "home"), str(readable))
    (tmp_path / "elsewhere").mkdir()
    (readable / "link").symlink_to(tmp_path / "elsewhere")  # it leads nowhere in the root that programs have
    assert visible.find_exposed([str(tmp_path / "elsewhere")]) is None


def test_first_exposed_folder_is_named(readable, tmp_path):
    (readable / "data").mkdir()
    assert visible.find_exposed([str(tmp_path), str(readable / "data")]) == (str(readable / "data"), str(readable))


def run_with_mounts(folder: Path, code: str) -> None:
    """Run code that mounts what it likes, in a process of its own; `readable` is all that programs may read."""
    start = f"""
import os, sys
from verl_ext.sandbox.server import namespaces as n
from verl_ext.sandbox.server import visible
n.unshare(n.CLONE_NEWNS)
n.mount(None, "/", None, n.MS_REC | n.MS_PRIVATE)
readable, hidden = {str(folder)!r} + "/lib", {str(folder)!r} + "/work/repository"
os.makedirs(readable), os.makedirs(hidden + "/data")
visible.readable_paths = lambda **_: [readable]
"""
    command = [sys.executable, "-c", start + code]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@needs_root
@pytest.mark.parametrize(("mounted", "point"), [("repository", "a b"), ("repository/data", "é"), (".", "\\040")])
def test_folder_that_is_mounted_below_a_readable_one_is_exposed(tmp_path, mounted, point):
    code = f"""
assert visible.find_exposed([hidden]) is None
os.mkdir(point := readable + "/" + {point!r})
n.mount(hidden + "/../" + {mounted!r}, point, None, n.MS_BIND)
assert visible.find_exposed([hidden]) == (hidden, point)
"""
    run_with_mounts(tmp_path, code)


@needs_root
def test_folder_that_does_not_exist_is_not_taken_for_a_mount_that_is_covered(tmp_path):
    code = """
os.makedirs(readable + "/covered/point")
n.mount(hidden, readable + "/covered/point", None, n.MS_BIND)
n.mount("tmpfs", readable + "/covered", "tmpfs", 0)
assert not os.path.exists(readable + "/covered/point")
assert visible.find_exposed([hidden + "/nothing"]) is None
"""
    run_with_mounts(tmp_path, code)


def start(python: str, checkout: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [python, "-m", "verl_ext.sandbox.server", "--port", "0", "--preload", "", "--parent-pid", "1"]
    paths = os.pathsep.join([str(checkout), sysconfig.get_path("purelib")])
    environment = {k: v for k, v in os.environ.items() if k != "DATA_DIR"} | environment | {"PYTHONPATH": paths}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=50, check=False)


@pytest.fixture
def python(tmp_path) -> str:
    """The Python of an environment whose `lib` programs may read."""
    tmp_path.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=50)
    return str(tmp_path / "env/bin/python")


def test_server_does_not_start_where_its_checkout_is_readable(tmp_path, python):
    checkout = tmp_path / "env/lib/verl-retool"
    shutil.copytree(REPOSITORY / "verl_ext", checkout / "verl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    run = start(python, checkout)
    assert (run.returncode, run.stdout) == (1, "")
    assert re.search(
        rf"sandbox: programs could read {checkout} \(this package's checkout, .* Move the folder", run.stderr
    )


def test_server_starts_where_a_python_below_its_environment_has_the_package(tmp_path, python):
    """As in a venv made with --system-site-packages: what is installed is code, not a checkout."""
    installed = tmp_path / "env/lib/below/site-packages"
    shutil.copytree(REPOSITORY / "verl_ext", installed / "verl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(installed), sysconfig.get_path("purelib")]
    code = f"import sys; sys.path[:0] = {paths!r}; import runpy; sys.argv[0] = 'server'; "
    code += "runpy.run_module('verl_ext.sandbox.server', run_name='__main__')"
    server = Server("--preload", "", launcher=(python, "-c", code, "--port", "0"))
    try:
        assert server.result("print(6 * 7)")["stdout"] == "42\n"
    finally:
        server.stop()


def test_server_does_not_start_where_the_data_folder_is_readable(tmp_path, python):
    data = tmp_path / "env/lib/data"
    data.mkdir()
    run = start(python, REPOSITORY, DATA_DIR=str(data))
    assert (run.returncode, run.stdout) == (1, "")
    assert f"programs could read {data} (the data folder, $DATA_DIR" in run.stderr


def test_environment_inside_the_checkout_is_readable_and_the_checkout_is_not(tmp_path):
    checkout = tmp_path / "verl-retool"
    tmp_path.chmod(0o755)
    shutil.copytree(REPOSITORY / "verl_ext", checkout / "verl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "data").mkdir()
    (checkout / "data/answers").write_text("42")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True, timeout=50)
    paths = os.pathsep.join([str(checkout), sysconfig.get_path("purelib")])
    code = f"import os, sys; sys.path[:0] = {paths.split(os.pathsep)!r}; import runpy; sys.argv[0] = 'server'; "
    code += "runpy.run_module('verl_ext.sandbox.server', run_name='__main__')"
    server = Server("--preload", "", launcher=(f"{checkout}/.venv/bin/python", "-c", code, "--port", "0"))
    try:
        look = "import os, sys\nprint(sys.prefix, os.path.exists(sys.prefix + '/pyvenv.cfg'))\n"
        assert server.result(look)["stdout"] == f"{checkout}/.venv True\n"
        if "landlock" in server.ping()["layers"]:
            stderr = server.result(f"open({str(checkout / 'data/answers')!r})")["stderr"]
            assert re.search("PermissionError|FileNotFoundError", stderr)
    finally:
        server.stop()
