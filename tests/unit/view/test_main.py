"""The command: what it refuses, and that it listens only on the loopback address."""

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from verl_ext.view.__main__ import main
from verl_ext.view.app import HOST


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["view", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return str(stopped.value)


def test_what_is_no_run_is_refused_by_name(monkeypatch, tmp_path: Path, run_folder: Path) -> None:
    assert f"No run at {tmp_path / 'none'}" in refusal(monkeypatch, tmp_path / "none")
    assert "given more than once" in refusal(monkeypatch, run_folder, run_folder)


def test_a_port_that_is_taken_is_refused_with_what_to_do(monkeypatch, run_folder: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert taken.getsockname()[0] == "127.0.0.1"
        assert f"Port {port} of 127.0.0.1 is not available" in refusal(monkeypatch, run_folder, "--port", port)
    assert "0-65535" in refusal(monkeypatch, run_folder, "--port", 99999)


@pytest.mark.timeout(240)  # a process that imports SciPy, on a machine that may be busy
def test_the_printed_address_answers(run_folder: Path) -> None:
    command = [sys.executable, "-m", "verl_ext.view", str(run_folder), "--port", "0"]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = viewer.stdout.readline().split()[0]
        with urllib.request.urlopen(address) as answer:
            assert b"run_a" in answer.read()
    finally:
        viewer.terminate()
        viewer.wait()
