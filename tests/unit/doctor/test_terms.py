"""What the doctor says of a run's own terms of the reward."""

import json

import pytest

from verl_ext.doctor.config import check_reward
from verl_ext.doctor.finding import Level
from verl_ext.doctor.terms import check_terms

FILE = """
def one_call(episode, row):
    said = "".join(turn.text for turn in episode.turns)
    (call,) = [call for turn in episode.turns for call in turn.calls]
    assert call.result.output in said and episode.rows[-1].ids and row["extra_info"]["worth"]
    return episode.score.acc / episode.use.calls / 4

def broken(episode, row):
    return float("nan")
"""


@pytest.fixture
def run_with(make_run, tmp_path):
    (tmp_path / "reward.py").write_text(FILE)
    row = {"prompt": [{"role": "user", "content": "?"}], "extra_info": {"worth": 2}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")

    def make(*names):
        terms = [f"+reward.reward_kwargs.terms.{name}.path={tmp_path}/reward.py:{name}" for name in names]
        weights = [f"+reward.reward_kwargs.terms.{name}.weight=0.5" for name in names]
        return make_run("tiny_dapo", "data.train_files=train.jsonl", *terms, *weights)

    return make


def test_each_term_is_called_on_an_example_and_its_value_is_told(run_with, told):
    run = run_with("one_call")
    (text,) = told(check_terms(run), Level.OK)
    assert "reward_one_call: " in text and "says 0.25, in [-1, 1]" in text and "it adds +0.125" in text
    assert "0.5 x one_call" in told(check_reward(run), Level.OK)[0]


def test_a_term_that_gives_no_number_fails_before_the_run(run_with, told):
    (text,) = told(check_terms(run_with("one_call", "broken")), Level.FAIL)
    assert "reward term broken" in text and "returned nan" in text


def test_a_term_that_is_not_there_fails_before_the_run(run_with, told):
    (text,) = told(check_terms(run_with("absent")), Level.FAIL)
    assert "terms.absent" in text and "cannot be imported" in text


def test_a_run_without_terms_is_not_looked_at(make_run):
    assert not [*check_terms(make_run("tiny_dapo"))]
