"""The judge's protocol against a real vLLM server, with a tiny model whose weights, and so whose words, are random."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import REPO
from tests.e2e.vllm_server import serve
from verl_ext.reward.verifiers.judge import JudgeVerifier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    out = tmp_path_factory.mktemp("judge")
    model = out / "model"
    builder = [sys.executable, str(REPO / "data/tiny_tools/build_model.py"), "--out", str(model)]
    subprocess.run(builder, check=True, capture_output=True)
    with serve(model, out / "server.log", "--max-model-len", "1024", "--enforce-eager") as url:
        yield url


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
