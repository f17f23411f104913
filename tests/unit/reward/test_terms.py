"""A run's own terms of the reward: what a function gets, what it adds, and what stops the run."""

import asyncio
import re

import pytest

from tests.unit.reward import responses
from verl_ext.episode import Episode, EpisodeKey, TokenRow, ToolUse
from verl_ext.reward.numbers import BrokenReward

FILE = """
from decimal import Decimal

import numpy as np


def one_call(episode, row):
    return episode.use.calls == 1


def right_by_call(episode, row):
    return episode.score.acc * episode.use.calls * row["extra_info"]["worth"]


def numbers(episode, row):
    return eval(row["extra_info"]["says"])


NOT_A_FUNCTION = 1
"""


@pytest.fixture
def make(make_manager, tmp_path):
    """A reward manager with terms of `reward.py`: name=weight, or name=section without its path."""
    (tmp_path / "reward.py").write_text(FILE)

    def with_terms(**terms):
        path = f"{tmp_path}/reward.py"
        table = {
            name: {"path": f"{path}:{name}"} | (row if isinstance(row, dict) else {"weight": row})
            for name, row in terms.items()
        }
        return make_manager(terms=table)

    return with_terms


def score(manager, text, *, calls=0, finish_reason="answer", **columns):
    """Score a response as an agent loop does."""
    episode = Episode(EpisodeKey("u", 0), [TokenRow(ids=[*map(ord, text)])], finish_reason, ToolUse(ok=calls))
    row = {"data_source": "tiny", "reward_model": {"ground_truth": "42"}} | columns
    reward = asyncio.run(manager.score_episode(episode, row))
    return reward.score, reward.info


def test_a_term_is_added_with_its_weight_and_reported_by_itself(make):
    manager = make(one_call=0.25)
    reward, info = score(manager, r"\boxed{41}", calls=1)
    assert (reward, info["score"]) == (-0.75, -0.75)
    assert (info["reward_base"], info["reward_one_call"], info["acc"]) == (-1.0, 0.25, 0.0)
    reward, info = score(manager, r"\boxed{42}", calls=2)
    assert (reward, info["reward_one_call"]) == (1.0, 0.0)


def test_a_term_reads_the_verdict_and_the_row(make):
    manager = make(right_by_call={"range": [0, 10]})
    assert score(manager, r"\boxed{42}", calls=2, extra_info={"worth": 3})[0] == 1 + 2 * 3
    assert score(manager, r"\boxed{41}", calls=2, extra_info={"worth": 3})[0] == -1


def test_terms_are_refused_where_verl_hands_over_no_turns(make):
    with pytest.raises(ValueError, match="terms is set, but verl's reward workers hand over episodes without turns"):
        responses.score(make(one_call=0.25), r"\boxed{42}")


def test_a_path_alone_is_a_term_of_weight_1(make_manager, tmp_path):
    (tmp_path / "reward.py").write_text(FILE)
    manager = make_manager(terms={"one_call": f"{tmp_path}/reward.py:one_call"})
    assert score(manager, r"\boxed{42}", calls=1)[0] == 2.0


@pytest.mark.parametrize("says", ["float('nan')", "float('inf')", "None", "'1'", "1.01", "-1.5", "[1]", "1/0", "row.x"])
def test_what_is_no_number_in_the_range_stops_the_run(make, says):
    with pytest.raises(BrokenReward, match=r"The reward term numbers \(.*reward.py:numbers\).*episode .*_0"):
        score(make(numbers=1.0), r"\boxed{42}", extra_info={"says": says})


@pytest.mark.parametrize("says", ["True", "1", "-1.0", "Decimal('0.5')", "np.float32(0.5)", "np.array([0.5])"])
def test_numbers_of_any_type_in_the_range_count(make, says):
    info = score(make(numbers=1.0), r"\boxed{42}", extra_info={"says": says})[1]
    assert type(info["reward_numbers"]) is float and info["reward_numbers"] in (1.0, -1.0, 0.5)


def test_what_infrastructure_failed_is_not_shown_to_a_term(make):
    would_raise = {"extra_info": {"says": "1/0"}}
    reward, info = score(make(numbers=1.0), "a", finish_reason="sandbox_failure", **would_raise)
    assert (reward, info["reward_numbers"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("base", {}, "terms.base: expected a name of letters, digits and _ that is not base, overlong, length,"),
        ("one call", {}, "terms.one call: expected a name"),
        ("nothing", {}, "terms.nothing: '{path}:nothing' cannot be imported (AttributeError"),
        ("NOT_A_FUNCTION", {}, "expected a function"),
        ("one_call", {"path": "nowhere.py:one_call"}, "cannot be imported (FileNotFoundError"),
        ("one_call", {"path": "one_call"}, "expected FILE.py:NAME"),
        ("one_call", {"wieght": 1}, "terms.one_call.wieght is not a setting"),
        ("one_call", {"weight": "much"}, "terms.one_call.weight is 'much', expected a number"),
        ("one_call", {"weight": float("nan")}, "terms.one_call.weight is nan, expected a number in (-inf, inf)"),
        ("one_call", {"range": [1, 0]}, "expected [lowest, highest]"),
        ("one_call", {"range": [0]}, "expected [lowest, highest]"),
    ],
)
def test_a_wrong_table_is_refused_at_the_start(make_manager, tmp_path, name, row, message):
    (tmp_path / "reward.py").write_text(FILE)
    path = f"{tmp_path}/reward.py"
    with pytest.raises(ValueError, match=re.escape(message.format(path=path))):
        make_manager(terms={name: {"path": f"{path}:{name}"} | row})
