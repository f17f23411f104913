"""A short run of scripts/bench/fuzz_reward.py, and that it can fail."""

import pytest

from verl_ext.reward import Score
from verl_ext.reward.maths import symbolic


@pytest.fixture(scope="module")
def script():
    from scripts.bench import fuzz_reward

    return fuzz_reward


def test_random_responses_neither_crash_nor_hang_nor_run(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert script.fuzz(seconds=4.0, seed=0) is None


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (Score(1.0, "41", "correct", "broken"), "another integer is right"),
        (Score(None, "41", "wrong", "broken"), "not a proper verdict"),
        (KeyError("broken"), "raised KeyError"),
    ],
)
def test_failure_is_found_and_can_be_repeated(script, monkeypatch, answer, failure):
    def score(response, gold):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(script, "score_answer", score)
    monkeypatch.setattr(script, "GOLDS", ["42"])
    found = script.fuzz(seconds=4.0, seed=7)
    assert failure in found and found.startswith("seed 7, response 1:")


def test_executed_answer_is_found(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(symbolic, "is_equal", lambda *_: (tmp_path / script.MARK).touch())
    assert script.check(r"\boxed{\sqrt{x}}", "x") == "the answer was executed"
