"""Test the judge's protocol against a real vLLM server, whose tiny model has learnt another task.

A server that is too slow for the judge: tests/unit/reward/verifiers/test_judge.py.
"""

import asyncio

import pytest

from verl_ext.reward.verifiers.judge import JudgeVerifier

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def judge(base_url: str, responses: list[str], **settings) -> list:
    async def run() -> list:
        verifier = JudgeVerifier({}, base_url=base_url, **{"max_tokens": 32, "max_attempts": 1} | settings)
        try:
            row = {"prompt": "Name a prime."}
            return await asyncio.gather(*(verifier.verify(response, "2", row) for response in responses))
        finally:
            await verifier.aclose()

    return asyncio.run(run())


def test_words_without_a_score_are_unknown(vllm: str) -> None:
    scores = judge(vllm, ["2 is prime.", "4 is prime.", "I do not know."])
    assert [score.verdict for score in scores] == ["unknown"] * 3
    assert all(score.acc is None and score.method.startswith("judge: no score in") for score in scores)


def test_response_beyond_the_judges_length_is_unknown(vllm: str) -> None:
    (score,) = judge(vllm, ["word " * 2000])
    assert score.verdict == "unknown" and "refused the request" in score.method


def test_unknown_model_is_refused_by_name(vllm: str) -> None:
    with pytest.raises(ValueError, match="rejected the request with HTTP 404"):
        judge(vllm, ["2"], model="another")
