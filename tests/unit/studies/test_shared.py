"""Settings under which a run is found again, and the end of a quickstart that a study started."""

import os
import signal
import subprocess
import threading
import time

import pytest

from scripts.studies import shared


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_the_quickstart_has_ended_in_order(tmp_path, monkeypatch, number):
    """A quickstart that takes a second to end: subprocess.run would kill it after a quarter."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\ntrap "sleep 1; touch {tmp_path}/ended; exit 1" TERM\ntouch {tmp_path}/begun\n'
        "while true; do sleep 0.05; done\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(shared.sys, "executable", str(python))

    waits = threading.Event()

    class Quickstart(subprocess.Popen):
        def wait(self, timeout=None):
            waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Quickstart)

    def interrupt():
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        waits.wait()
        os.kill(os.getpid(), number)

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    shared.obey_signals()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            shared.quickstart(tmp_path)
    finally:
        thread.join()
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert (tmp_path / "ended").exists()


def test_a_quickstart_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(shared.sys, "executable", "false")
    with pytest.raises(subprocess.CalledProcessError, match="verl_ext.quickstart.* status 1"):
        shared.quickstart(tmp_path)
