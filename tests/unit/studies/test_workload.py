"""Responses drawn from a step's metrics."""

import math
import random
from statistics import fmean

import pytest

from scripts.studies.workload import Shape, cut_log_normal, draw, shape_of

METRICS = {
    "response_length/mean": 2000.0,
    "response_length/max": 16384.0,
    "response_length/clip_ratio": 0.01,
    "prompt_length/mean": 300.0,
    "num_turns/mean": 8.0,
    "num_turns/max": 16.0,
}


def test_a_cut_log_normal_has_the_mean_and_the_share():
    mu, sigma = cut_log_normal(2000, 16384, 0.01)
    rng = random.Random(0)
    drawn = [rng.lognormvariate(mu, sigma) for _ in range(200_000)]
    assert fmean(min(x, 16384) for x in drawn) == pytest.approx(2000, rel=0.01)
    assert fmean(x > 16384 for x in drawn) == pytest.approx(0.01, rel=0.05)


def test_a_mean_above_the_longest_is_refused():
    with pytest.raises(ValueError, match="mean of 20 tokens"):
        cut_log_normal(20, 10, 0.1)


def test_the_published_runs_metrics():
    """8 turns are the prompt, the last answer and 3 calls with their answers; .6 s of three calls is .2 s each."""
    shape = shape_of(METRICS | {"timing_s/agent_loop/tool_calls/mean": 0.6}, prompts=512, n=16)
    assert (shape.prompts, shape.calls, shape.most_calls, shape.decoded) == (512, 3, 7, 1)
    assert shape.tool_s == pytest.approx(0.2)


def test_todays_metrics():
    """A call of .6 s that waited .35 s for a worker holds it for .25 s."""
    ours = {"tool/seconds": 0.6, "tool/queue_s": 0.35, "train/model_tokens": 1500.0, "filter_groups/generated": 24.0}
    shape = shape_of(METRICS | ours, prompts=16, n=8)
    assert (shape.prompts, shape.decoded) == (24, 0.75)
    assert shape.tool_s == pytest.approx(0.25)


def test_a_group_has_its_tokens_in_turns():
    """Prompt 5, responses of 12 tokens with one call whose output is a quarter of them: turns of 4.5, output 3."""
    shape = Shape(1, 2, 5.0, 11.99999, 12.0, 0.999, 0.75, 1.0, 1, 0.0)
    (group,) = draw(shape, 1, 1.0, random.Random(0))
    assert group.tokens == pytest.approx(2 * 17)
    assert [(each.turns, each.context) for each in group.responses] == [(2, 5.0)] * 2
    assert [each.tool_tokens for each in group.responses] == pytest.approx([3.0, 3.0])
    assert [each.turn_tokens for each in group.responses] == pytest.approx([4.5, 4.5])


def test_drawn_responses_have_the_metrics_means():
    groups = draw(shape_of(METRICS, prompts=512, n=16), 512, 0.7, random.Random(1))
    responses = [each for group in groups for each in group.responses]
    assert fmean(each.turn_tokens * each.turns for each in responses) == pytest.approx(2000, rel=0.01)
    assert fmean(each.turns - 1 for each in responses) == pytest.approx(3, rel=0.02)
    assert sum(group.useful for group in groups) == 358  # .7 x 512 = 358.4
    assert math.isclose(sum(group.tokens for group in groups), 8192 * 2300, rel_tol=0.01)
