"""Penalties, bonus and the random reward of the reward manager."""

import json

import numpy as np
import pytest

from tests.unit.reward.responses import score


def test_overlong_penalty_is_added_and_logged(make_manager):
    buffer = {"enable": True, "len": 40, "penalty_factor": 1.0, "log": True}
    manager = make_manager(overlong_buffer_cfg=buffer)
    right, wrong = r"\boxed{42}", r"\boxed{41}"
    # 160 - 40 = 120 tokens are free; 140 is half of the buffer: -0.5
    assert score(manager, "a" * 110 + right)[0] == 1.0
    assert score(manager, "a" * 130 + right)[0] == 0.5
    assert score(manager, "a" * 150 + wrong)[0] == -2.0
    _, info = score(manager, "a" * 130 + right)
    assert (info["acc"], info["train_acc"], info["reward_base"], info["reward_overlong"]) == (1.0, 1.0, 1.0, -0.5)


@pytest.mark.parametrize(
    ("data_source", "tokens", "reward"),
    [
        ("short", 45, 1.0),  # cut at 60: 45 tokens are free
        ("short", 54, 0.4),  # 9 of 15 into the buffer
        ("tiny", 50, 1.0),  # of no domain: cut at 160, and 120 are free
        ("whole", 50, 1.0),  # a domain without a length of its own
        ("whole", 140, 0.5),
        ("tight", 18, 0.4),  # cut at 20, less than the run's buffer: 3 of 5
    ],
)
def test_the_overlong_penalty_ends_where_a_domain_cuts_its_responses(make_manager, data_source, tokens, reward):
    domains = {"short": {"response_tokens": 60}, "whole": {}, "tight": {"response_tokens": 20}}
    manager = make_manager(overlong_buffer_cfg={"enable": True, "len": 40}, domains=domains)
    text = r"\boxed{42}".rjust(tokens, "a")
    assert score(manager, text, data_source=data_source)[0] == pytest.approx(reward)


def test_overlong_penalty_counts_tool_output_unless_told_otherwise(make_manager):
    segments = ["<code>1</code>", ("tool", "b" * 116), r"\boxed{42}"]  # 14 + 116 + 10 = 140 tokens
    buffer = {"enable": True, "len": 40}
    assert score(make_manager(overlong_buffer_cfg=buffer), *segments)[0] == 0.5
    assert score(make_manager(overlong_buffer_cfg=buffer, overlong_counts="model"), *segments)[0] == 1.0


def test_overlong_options_of_verl_are_read(make_manager):
    long_answer = "a" * 130 + r"\boxed{42}"
    assert score(make_manager(overlong_buffer_cfg={"enable": False, "len": 40}), long_answer)[0] == 1.0
    assert (
        score(make_manager(overlong_buffer_cfg={"enable": True, "len": 40, "penalty_factor": 0.5}), long_answer)[0]
        == 0.75
    )
    assert (
        score(make_manager(max_resp_len=150, overlong_buffer_cfg={"enable": True, "len": 40}), long_answer)[0] == 0.25
    )


def test_floor_bounds_the_sum(make_manager):
    manager = make_manager(overlong_buffer_cfg={"enable": True, "len": 40}, reward_floor=-1.0)
    assert score(manager, "a" * 150 + r"\boxed{41}")[0] == -1.0
    assert score(manager, "a" * 150 + r"\boxed{42}")[0] == 0.0


def test_reward_parts_are_logged_each_by_itself(make_manager):
    manager = make_manager(
        max_response_length=20000,
        overlong_buffer_cfg={"enable": True, "len": 10000},
        length_penalty="piecewise",
        tool_bonus=True,
    )
    # 14,000 tokens: 4,000 of 10,000 into the buffer, -0.4; piecewise -0.04 - 0.05 x 2; 3 calls, 0.3
    reward, info = score(manager, "a" * 13990 + r"\boxed{41}", calls=3)
    parts = {key: round(value, 6) for key, value in info.items() if key.startswith("reward_")}
    assert parts == {"reward_base": -1, "reward_overlong": -0.4, "reward_length": -0.14, "reward_tool_bonus": 0.3}
    assert reward == pytest.approx(-1.24)
    assert (info["acc"], info["train_acc"]) == (0.0, 0.0)


def test_tool_bonus_is_for_wrong_answers_only_and_ends_at_its_ceiling(make_manager):
    def reward(text, calls, **options):
        return score(make_manager(**options), text, calls=calls)[0]

    assert reward(r"\boxed{41}", 2, tool_bonus=True) == pytest.approx(-0.8)
    assert reward("no box", 9, tool_bonus=True) == pytest.approx(-0.6)
    assert reward(r"\boxed{42}", 9, tool_bonus=True) == 1.0
    assert reward(r"\boxed{41}", 9) == -1.0


def test_piecewise_penalty_counts_what_it_is_told_to(make_manager):
    segments = ["<code>1</code>", ("tool", "b" * 9976), r"\boxed{42}"]  # 14 + 9976 + 10 = 10000 tokens
    options = {"max_response_length": 20000, "length_penalty": "piecewise"}
    assert score(make_manager(**options), *segments)[0] == pytest.approx(0.98)
    assert score(make_manager(**options, overlong_counts="model"), *segments)[0] == 1.0


def test_piecewise_penalty_takes_points_from_the_yaml(make_manager):
    manager = make_manager(length_penalty=[[10, 0], [20, -0.1], [30, -0.5]])
    assert score(manager, "a" * 15 + r"\boxed{42}")[0] == pytest.approx(0.7)  # 25 tokens: -0.3
    assert score(manager, r"\boxed{42}")[0] == 1.0


def test_failed_sample_gets_no_part_of_any_penalty_or_bonus(make_manager):
    manager = make_manager(max_response_length=20000, length_penalty="piecewise", tool_bonus=True)
    reward, info = score(manager, "a" * 12000, calls=3, finish_reason="sandbox_failure")
    assert (reward, info["reward_length"], info["reward_tool_bonus"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("p", "reward"), [(0.0, -1.0), (1.0, 1.0)])
def test_random_reward_may_be_certain(make_manager, p, reward):
    manager = make_manager(random_reward_p=p)
    assert {score(manager, text)[0] for text in (r"\boxed{42}", r"\boxed{41}", "none")} == {reward}


def test_a_share_of_a_right_answer_earns_no_tool_bonus(make_manager):
    manager = make_manager(
        verifiers={"ifeval": {"path": "verl_ext.reward.verifiers.ifeval.IfevalVerifier", "all_or_nothing": False}},
        tool_bonus=True,
    )
    constraints = [{"id": "punctuation:no_comma"}, {"id": "startend:quotation"}]
    row = {"reward_model": {"ground_truth": json.dumps({"constraints": constraints})}, "data_source": "ifeval"}
    reward, info = score(manager, "no comma", calls=3, **row)
    assert (reward, info["acc"], info["reward_tool_bonus"]) == (0.0, 0.5, 0.0)
    reward, info = score(manager, "a, comma", calls=3, **row)
    assert (reward, info["acc"], info["reward_tool_bonus"]) == (pytest.approx(-0.7), 0.0, pytest.approx(0.3))


def test_random_reward_keeps_the_rate_and_forgets_the_answer(make_manager):
    manager = make_manager(random_reward_p=0.3)
    drawn = {"42": [], "41": []}
    for answer, seen in drawn.items():
        for session in range(200):
            reward, info = score(manager, rf"\boxed{{{answer}}}", session_id=session, global_steps=3)
            assert info["acc"] == float(answer == "42")
            assert reward == 2 * info["train_acc"] - 1
            seen.append(info["train_acc"])
    for seen in drawn.values():
        assert np.mean(seen) == pytest.approx(0.3, abs=0.1)  # 200 draws: standard deviation 0.03


@pytest.mark.parametrize("place", ["index", "global_steps", "session_id"])
def test_random_reward_of_an_equal_response_differs_at_another_place(make_manager, place):
    """The same answer to a problem is not rewarded as such: not at the next step, nor in another sample."""
    manager = make_manager(random_reward_p=0.5)
    fixed = {"index": 7, "global_steps": 3, "session_id": 0}
    draws = [score(manager, r"\boxed{42}", **(fixed | {place: number}))[0] for number in range(40)]
    assert set(draws) == {1.0, -1.0}


def test_random_reward_is_repeatable_and_depends_on_the_seed(make_manager):
    def draws(**options):
        manager = make_manager(random_reward_p=0.5, **options)
        return [score(manager, r"\boxed{42}", session_id=i)[0] for i in range(40)]

    assert draws() == draws()
    assert draws() != draws(random_reward_seed=1)


def test_lengths_and_turns_are_those_of_all_rows_of_an_episode(make_manager):
    """Rows of 60 and 80 tokens, of which the model wrote 30 and 80: 140 tokens are half of the buffer, 110 are free."""
    import asyncio

    from verl_ext.episode import Episode, EpisodeKey, TokenRow

    text = "a" * 70 + r"\boxed{42}"
    rows = [
        TokenRow(ids=[ord("b")] * 60, model_spans=[(0, 10), (40, 60)]),
        TokenRow(ids=[*map(ord, text)], model_spans=[(0, 80)]),
    ]
    sample = {"reward_model": {"ground_truth": "42"}, "data_source": "math"}
    for counts, reward in (("response", 0.5), ("model", 1.0)):
        manager = make_manager(overlong_buffer_cfg={"enable": True, "len": 40}, overlong_counts=counts)
        episode = Episode(EpisodeKey("u", 0), rows=rows, finish_reason="answer")
        found = asyncio.run(manager.score_episode(episode, sample))
        assert found.score == reward and found.info["reward_overlong"] == reward - 1
        assert (found.info["response_tokens"], found.info["model_turns"]) == (110, 3)
