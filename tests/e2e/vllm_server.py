"""Start vLLM's OpenAI-compatible server for the tests that need one."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.processes import kill_tree

START_S = 240


@contextmanager
def serve(python: str, model: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a Hugging Face folder as "tiny" on 127.0.0.1 for the length of a `with` block; yield the base URL.

    Args:
        python: the executable that runs the server.
    """
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *options]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    with open(log, "wb") as sink:
        server = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        children = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)
        psutil.wait_procs(children, timeout=20)
        kill_tree(server.pid)
        server.wait()


def _wait_until_healthy(server: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM was not healthy within {START_S} s: {log.read_text(errors='replace')[-4000:]}")
