"""The judge's protocol against a real vLLM server, with a tiny model whose weights, and so whose words, are random."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import REPO, kill_tree
from verl_ext.reward.verifiers.judge import JudgeVerifier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_S = 240


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    out = tmp_path_factory.mktemp("judge")
    model, log = out / "model", out / "server.log"
    builder = [sys.executable, str(REPO / "data/tiny_tools/build_model.py"), "--out", str(model)]
    subprocess.run(builder, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    with open(log, "wb") as sink:
        server = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
    try:
        wait_until_healthy(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        children = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.send_signal(signal.SIGINT)
        psutil.wait_procs(children, timeout=20)
        kill_tree(server.pid)
        server.wait()


def wait_until_healthy(server: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"vLLM was not healthy within {START_S} s: {log.read_text(errors='replace')[-4000:]}")


def judge(base_url: str, responses: list[str], **settings) -> list:
    async def run() -> list:
        verifier = JudgeVerifier({}, base_url=base_url, **{"max_tokens": 32, "max_attempts": 1} | settings)
        try:
            row = {"prompt": "Name a prime."}
            return await asyncio.gather(*(verifier.verify(response, "2", row) for response in responses))
        finally:
            await verifier.aclose()

    return asyncio.run(run())


def test_words_without_a_score_are_unknown(base_url: str) -> None:
    scores = judge(base_url, ["2 is prime.", "4 is prime.", "I do not know."])
    assert [score.verdict for score in scores] == ["unknown"] * 3
    assert all(score.acc is None and score.method.startswith("judge: no score in") for score in scores)


def test_server_that_is_too_slow_is_unknown(base_url: str) -> None:
    (score,) = judge(base_url, ["2"], timeout_s=0.001)
    assert score.verdict == "unknown" and "did not answer within" in score.method


def test_response_beyond_the_judges_length_is_unknown(base_url: str) -> None:
    (score,) = judge(base_url, ["word " * 2000])
    assert score.verdict == "unknown" and "refused the request" in score.method


def test_unknown_model_is_refused_by_name(base_url: str) -> None:
    with pytest.raises(ValueError, match="rejected the request with HTTP 404"):
        judge(base_url, ["2"], model="another")
