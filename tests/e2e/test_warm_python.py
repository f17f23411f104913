"""Test that the executable that starts Python by fork behaves as Python does, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_ext.cpu.warm_python import EXECUTABLE_VARIABLE, stub, warm_python

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def imports_done(python: str) -> None:
    """Wait for the server's imports, so that no time limit below includes them."""
    subprocess.run([python, "-c", "pass"], check=True)


def run(python: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, **kwargs)


def test_torch_and_vllm_are_imported_already_and_ray_is_not(python: str) -> None:
    code = "import sys; print([name in sys.modules for name in ('torch', 'vllm', 'transformers', 'ray', 'verl')])"
    assert run(python, "-c", code).stdout == "[True, True, True, False, False]\n"


@pytest.mark.parametrize("option", ["-I", "-P"])
def test_an_isolated_interpreter_is_a_real_one(python: str, option: str) -> None:
    code = "import sys; print('torch' in sys.modules, sys.executable)"
    assert run(python, option, "-c", code).stdout == f"False {sys.executable}\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("import sys; sys.exit(7)", 7), ("1/0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_status_is_that_of_python(python: str, code: str, status: int) -> None:
    assert run(python, "-c", code).returncode == status == run(sys.executable, "-c", code).returncode


def test_arguments_input_environment_and_folder_arrive(python: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], sys.stdin.read(), os.environ['X'], os.getcwd(), __name__)")
    result = run(python, "-u", str(script), "a", "-b", input="text", env=os.environ | {"X": "y"}, cwd=tmp_path)
    assert result.stdout == f"['a', '-b'] text y {tmp_path} __main__\n"
    assert run(python, "-m", "json.tool", input="[1]").stdout == "[\n    1\n]\n"


def test_temporary_files_are_where_the_environment_says(python: str, tmp_path: Path) -> None:
    """The server's environment at its imports must not count: a quickstart deletes the folder of a command."""
    code = "import tempfile; print(tempfile.gettempdir())"
    assert run(python, "-c", code, env=os.environ | {"TMPDIR": str(tmp_path)}).stdout == f"{tmp_path}\n"


def test_inherited_files_keep_their_numbers(python: str) -> None:
    read, write = os.pipe()
    assert run(python, "-c", f"import os; os.write({write}, b'through the pipe')", pass_fds=[write]).returncode == 0
    os.close(write)
    with open(read) as file:
        assert file.read() == "through the pipe"


def test_niceness_is_inherited(python: str) -> None:
    code = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert run(python, "-c", code, preexec_fn=lambda: os.nice(3)).stdout == f"{niceness}\n"


def test_forks_draw_different_ray_ids(python: str) -> None:
    code = "import ray; print(ray.WorkerID.from_random().hex())"
    assert run(python, "-c", code).stdout != run(python, "-c", code).stdout


def test_each_fork_has_its_own_process_group(python: str) -> None:
    """Ray ends the process group of a worker that died: a shared one would end all workers of the run."""
    assert run(python, "-c", "import os; print(os.getpgid(0) == os.getpid())").stdout == "True\n"


def test_signals_reach_the_fork(python: str) -> None:
    code = "import time\ntry:\n  print('ready', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('stopped')"
    process = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[0] == "stopped\n"
    assert process.returncode == 0


def test_a_signal_before_the_pid_is_known_reaches_the_fork(tmp_path: Path) -> None:
    """This test plays the server's part, and a running process that of the fork."""
    executable, address = tmp_path / "python", str(tmp_path / "socket")
    executable.write_text(stub(sys.executable, address))
    executable.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(20)
        command = subprocess.Popen([executable, "-c", "pass"])
        fork = subprocess.Popen(["sleep", "60"])
        client, _ = listener.accept()
        with client, client.makefile() as request:
            request.readline()
            command.send_signal(signal.SIGINT)
            client.sendall(b"%d\n" % fork.pid)
            assert fork.wait(timeout=20) == -signal.SIGINT
            client.sendall(b"7\n")
            assert command.wait(timeout=20) == 7


def test_fork_dies_with_its_executable(python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    fork = int(process.stdout.readline())
    assert fork != process.pid
    process.kill()
    process.wait()
    deadline = time.time() + 10
    while psutil.pid_exists(fork) and time.time() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(fork)


def test_without_its_server_it_is_the_real_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXECUTABLE_VARIABLE, raising=False)
    with warm_python() as executable:
        script = Path(executable).read_text()
    folder = Path(executable).parent
    assert not folder.exists()
    folder.mkdir()
    try:
        Path(executable).write_text(script)
        Path(executable).chmod(0o700)
        assert run(executable, "-c", "import sys; print(sys.executable)").stdout.strip() == sys.executable
    finally:
        Path(executable).unlink()
        folder.rmdir()
