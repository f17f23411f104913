"""What the rollout server must send if log-probs are asked for."""

import math

import pytest
from omegaconf import OmegaConf

from verl_ext.rollout.log_probs import check_log_probs_are_sent, checked_log_probs, wants_log_probs


@pytest.mark.parametrize(("asked", "wants"), [(True, True), (0, True), (1, True), (False, False), (None, False)])
def test_verl_asks_by_true_and_vllm_by_a_number(asked, wants):
    assert wants_log_probs({"logprobs": asked}) is wants
    assert wants_log_probs({}) is False


def test_one_finite_log_prob_for_each_token_is_as_it_should_be():
    assert checked_log_probs([-0.5, 0.0], [7, 8]) == [-0.5, 0.0]
    assert checked_log_probs(None, []) == [] == checked_log_probs([], [])  # aborted before its first token


@pytest.mark.parametrize("log_probs", [None, [], [-0.5], [-0.5, -0.5, -0.5]])
def test_missing_log_probs_raise(log_probs):
    with pytest.raises(ValueError, match=r"sent \d log-probs for 2 tokens; expected one for each"):
        checked_log_probs(log_probs, [7, 8])


@pytest.mark.parametrize("wrong", [None, math.nan, -math.inf, math.inf])
def test_a_log_prob_that_is_not_finite_raises(wrong):
    with pytest.raises(ValueError, match="1 of the 2 log-probs that the server sent are not finite"):
        checked_log_probs([-0.5, wrong], [7, 8])


@pytest.mark.parametrize(
    "correction", [{"bypass_mode": True}, {"rollout_is": "token"}, {"rollout_rs": "group_k1", "bypass_mode": False}]
)
def test_a_trainer_that_needs_log_probs_asks_for_them(correction):
    def config(calculate):
        return OmegaConf.create(
            {
                "algorithm": {"rollout_correction": correction},
                "actor_rollout_ref": {"rollout": {"calculate_log_probs": calculate}},
            }
        )

    with pytest.raises(ValueError, match="calculate_log_probs is false. Set it to true"):
        check_log_probs_are_sent(config(False))
    check_log_probs_are_sent(config(True))
    check_log_probs_are_sent(OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": False}}}))
    check_log_probs_are_sent(OmegaConf.create({}))
