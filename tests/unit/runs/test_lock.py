"""A training run's folder belongs to one process, as long as that lives."""

import os
import subprocess
import sys

import pytest

from verl_ext.runs import lock

HOLD = "import pathlib, sys; from verl_ext.runs.lock import *; own_training_folder(pathlib.Path(sys.argv[1])); "


@pytest.fixture
def hold(tmp_path):
    """Start another process that holds the folder and then runs the code given as `then`."""

    def start(then: str) -> subprocess.Popen:
        command = [sys.executable, "-c", f"{HOLD}print('held', flush=True); {then}", str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "held\n"
        return process

    return start


def test_a_second_run_is_refused_until_the_first_is_dead(hold, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    with hold("sys.stdin.read()") as process:
        with pytest.raises(lock.Taken, match=rf"into {tmp_path} \(process {process.pid} of .*OUTPUT_DIR"):
            lock.own_training_folder(tmp_path)
        process.kill()
        process.wait()
        lock.own_training_folder(tmp_path)
        lock.own_training_folder(tmp_path)  # its own
    assert str(os.getpid()) in (tmp_path / lock.TRAINING_LOCK).read_text()


def test_to_ask_for_it_twice_does_not_lose_it(tmp_path):
    """A process that closes a file has no record lock on it any more."""
    lock.own_training_folder(tmp_path)
    lock.own_training_folder(tmp_path)
    code = "import pathlib, sys; from verl_ext.runs import lock; lock.WAIT_S = 0; "
    code += "lock.own_training_folder(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert f"(process {os.getpid()} of " in done.stderr


def test_what_a_killed_run_has_forked_does_not_keep_its_folder(hold, tmp_path, monkeypatch):
    """As with the workers of its data loader, which end a moment later."""
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    fork = "import os, time; child = os.fork(); print(child, flush=True) if child else None; time.sleep(60)"
    with hold(fork) as process:
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            lock.own_training_folder(tmp_path)
        finally:
            os.kill(child, 9)


def test_the_processes_of_a_killed_run_are_waited_for(hold, tmp_path):
    with hold("import time; time.sleep(2)"):
        lock.own_training_folder(tmp_path)


def test_the_doctor_finds_a_run_that_has_the_folder_and_takes_it_from_none(hold, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    lock.check_training_folder(tmp_path)  # no run was here
    with hold("sys.stdin.read()") as process:
        with pytest.raises(lock.Taken, match=rf"If that machine is dead, delete {tmp_path}/.training"):
            lock.check_training_folder(tmp_path)
        process.kill()
    lock.check_training_folder(tmp_path)
    with hold("sys.stdin.read()") as process:
        process.kill()


def test_a_disk_without_locks_is_warned_of(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    lock.own_training_folder(tmp_path / "file" / "run")
    assert "cannot be locked" in caplog.text
