"""Rewards of a worker's rollouts that are not numbers stop the run, with a sentence that the trainer raises."""

import math
from typing import Any

import numpy as np
import pytest

from verl_ext.episode import Episode, EpisodeKey, Reward


async def rolled_out() -> tuple[list[int], None]:
    """A response of one token, which is to be scored."""
    return [0], None


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [("reward", math.nan), ("reward", math.inf), ("reward", "1"), ("reward", np.float32("nan")), ("acc", math.nan)]
    + [("acc", None), ("acc", "right"), ("reward", np.array([1.0, 2.0])), ("score", math.nan), ("score", None)]
    + [("score", "1"), ("a term of one's own", math.nan), ("a term of one's own", np.float32("inf"))],
)
def test_a_reward_that_is_not_a_number_stops_the_run_with_a_sentence(
    roll_out_prompt, name, value, validate, caplog
) -> None:
    """The tag is there before the status by which the trainer looks for it. No other response would have another end,
    so that a validation does not try again."""

    async def score(episode: Episode, sample: dict) -> Reward:
        given = {"reward": 1.0, "acc": 1.0, "pred": "nan", "note": None} | {name: value}
        return Reward(given.pop("reward"), given)

    row = {"index": 7, "data_source": "shop"}
    stored = roll_out_prompt([rolled_out], validate=validate, score=score, **row)
    part = "val" if validate else "train"
    assert [key for key, _ in stored] == [f"{part}:p", f"{part}:p_0_0", f"{part}:p"]
    said = stored[1][1]["stops_run"]
    assert said.startswith(f"The reward of row 7 of data_source 'shop' has {name}={value!r}, expected a finite number.")
    assert stored[2][1] == "failure" and "trying again" not in caplog.text


@pytest.mark.parametrize("value", [True, np.float32(1), np.bool_(True), np.array([1.0])])
async def test_what_is_a_number_becomes_a_float(value: Any) -> None:
    from verl_ext.rollout.scored import ScoredEpisodes

    info = {"acc": value, "score": value, "pred": "x"}
    episode = Episode(EpisodeKey("u", 0), reward=Reward(value, info), score_s=0.5)  # of a loop that scores
    await ScoredEpisodes(None, None, 0).score(episode, {})
    score, info = episode.reward.score, episode.reward.info
    assert [type(each) for each in (score, info["acc"], info["score"])] == [float] * 3
    assert score == info["acc"] == info["score"] == 1.0 and info["pred"] == "x"
    assert episode.score_s >= 0.5, "the loop's own seconds"


def test_a_verifier_that_is_broken_in_a_process_of_verls_stops_the_run_with_its_own_sentence(roll_out_prompt) -> None:
    """Ray raises its own error, with the traceback as its text, and keeps the cause."""
    from ray.exceptions import RayTaskError

    from verl_ext.reward.numbers import BrokenReward

    async def score(episode: Episode, sample: dict) -> Reward:
        raise RayTaskError("score", "a traceback", BrokenReward("the sentence")).as_instanceof_cause()

    stored = roll_out_prompt([rolled_out], score=score)
    assert stored[1] == ("train:p_0_0", {"status": "failure", "stops_run": "the sentence"})


async def test_a_validation_samples_again_what_its_environment_could_not_score(monkeypatch):
    from types import SimpleNamespace

    from verl_ext.episode import Episode, EpisodeKey, Reward, Score
    from verl_ext.rollout import scored

    monkeypatch.setattr(scored, "RETRY_PAUSE_S", 0.0)
    told = [Score(None, "", "unknown", "environment: down"), Score.graded(1.0, "", "world")]
    scores = iter(told)

    async def roll_out(params, **_):
        return Episode(EpisodeKey("p", 0), finish_reason="answer", score=next(scores))

    async def score(episode, sample):
        unverified = float(episode.score.is_unverified)
        return Reward(0.0, {"acc": episode.score.acc or 0.0, "unverified": unverified, "finish_reason": "answer"})

    take = scored.ScoredEpisodes(score, None, 1).take
    episode = await take(SimpleNamespace(roll_out=roll_out), {}, EpisodeKey("p", 0), {}, validate=True)
    assert episode.score is told[1] and episode.reward.info["unverified"] == 0.0
