"""Which rows of a data set are one problem."""

import math

import numpy as np
import pytest

from verl_ext.records.problem import canonical, id_of, problem_of

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1+1?"}
ROW = {
    "data_source": "mine",
    "raw_prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"id": "a", "index": 3},
}
GOLD = {"answer": [2, 3], "unit": "cm"}


@pytest.mark.parametrize(
    "other",
    [
        {"reward_model": {"ground_truth": "3"}},
        {"reward_model": {"ground_truth": ["2"]}},
        {"extra_info": {"id": "b", "index": 3}},
        {"extra_info": {"index": 3}},
        {"extra_info": {}},
        {"extra_info": None},
        {"data_source": "yours"},  # with the same id and index
        {"raw_prompt": [SYSTEM, USER]},
        {"raw_prompt": [SYSTEM | {"content": "Be long."}, USER]},
        {"raw_prompt": [USER | {"role": "assistant"}, USER]},
        {"raw_prompt": [USER, {"role": "assistant", "content": "2"}, USER]},
    ],
)
def test_rows_that_share_their_last_message_are_different_problems(other):
    assert problem_of(ROW) != problem_of(ROW | other)


@pytest.mark.parametrize(
    "other",
    [
        {"extra_info": {"id": "a", "index": 4}},  # one problem that the data set repeats
        {"extra_info": {"id": "a"}},
        {"uid": "draw 2", "index": 0, "global_steps": 7, "ability": "math"},
        {"raw_prompt": np.array([USER], dtype=object)},
        {"raw_prompt": [dict(reversed(USER.items()))]},
        {"reward_model": {"ground_truth": np.str_("2")}},
    ],
)
def test_a_row_that_comes_again_is_the_same_problem(other):
    assert problem_of(ROW) == problem_of(ROW | other)


def test_without_an_id_the_index_distinguishes_rows_or_else_their_content():
    def name(**info):
        return problem_of(ROW | {"extra_info": info})

    assert name(index=1) != name(index=2) != name()
    assert name(index=1) == name(index=1, split="train") == name(id=None, index=1.0) == name(id="", index="1")
    assert name() == name(index=None) == name(index=math.nan) == name(id=math.nan)
    assert name(id=1) == name(id="1") == name(id=1.0) == name(id=np.int64(1)) != name(id="01")
    assert name(index=0) != problem_of(ROW | {"extra_info": {"index": 0}, "data_source": "yours"})


def test_a_gold_that_is_not_text_is_identified_by_its_content():
    def name(gold):
        return problem_of(ROW | {"reward_model": {"ground_truth": gold}})

    assert name(GOLD) == name(dict(reversed(GOLD.items()))) == name(GOLD | {"answer": np.array([2, 3])})
    assert name(GOLD) != name(GOLD | {"answer": [3, 2]}) and name(["2"]) != name("2") == name(2)


def test_a_row_without_a_prompt_has_no_name_and_odd_columns_raise_nothing():
    assert problem_of({"reward_model": {"ground_truth": "2"}}) == ""
    assert problem_of({"raw_prompt": "1+1?"}) != problem_of({"raw_prompt": "1+2?"})
    assert id_of({"extra_info": "no object"}) == id_of({}) == "" and canonical({"b": 1, "a": "\ud800"})
