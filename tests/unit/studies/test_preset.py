"""The harness's gradient of a step equals the real stack's: transformers' model, verl's config and advantages."""

import copy

import numpy as np
import pytest
import torch

from tests.unit.studies.test_tiny_model import actors_log_probs

OBJECTIVES = (
    *("dapo", "grpo", "dr_grpo", "olmorl", "maxrl", "icepop", "icepop_onpolicy", "glm5_async", "mis_token", "mis_seq"),
    *("gspo", "gmpo", "sapo", "cispo", "dppo_tv", "dppo_kl"),
)


def verls_gradient(tiny, sampled, config):
    """name -> gradient of a whole batch's loss, by transformers and by what verl's trainer and actor call."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.utils.config import omega_conf_to_dataclass

    from verl_ext.objectives.mean import unit_factors

    batch, correction = sampled.batch, config.algorithm.rollout_correction
    OmegaConf.update(config, "actor_rollout_ref.actor.ppo_mini_batch_size", 3, force_add=True)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    noted = torch.where(batch.mask, batch.rollout_log_prob, 0)
    rewards = torch.zeros_like(noted)
    rewards[:, 0] = batch.rewards
    advantages, _ = get_adv_estimator_fn(config.algorithm.adv_estimator)(
        token_level_rewards=rewards,
        response_mask=batch.mask,
        index=np.array(batch.groups),
        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
        config=config.algorithm,
    )
    factors = unit_factors(batch.mask.sum(-1), batch.groups, unit=actor.policy_loss.unit, updates=1)
    log_prob = actors_log_probs(tiny, sampled)
    old, weights = (noted if correction.bypass_mode else log_prob.detach()), None
    if correction.rollout_is:
        weights, _ = compute_rollout_correction_weights(
            (old - noted) * batch.mask, batch.mask, correction.rollout_is, correction.rollout_is_threshold
        )
    actor.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(batch.mask.sum()),
        global_batch_size=len(batch.mask),
        loss_scale_factor=actor.loss_scale_factor,
    )
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages * factors[:, None].float(),
        response_mask=batch.mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=weights,
    )
    tiny.actor.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in tiny.actor.named_parameters()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_steps_gradient_is_the_real_stacks(cpu_platform, tiny, sampled, name):
    from scripts.studies.cell import gradient
    from scripts.studies.preset import read_preset
    from scripts.studies.tiny_model import TinyModel

    weights = {key: each.clone().requires_grad_() for key, each in tiny.weights.items()}
    preset = read_preset(name)
    found = gradient(preset, TinyModel(tiny.config), weights, sampled)
    expected = verls_gradient(tiny, sampled, copy.deepcopy(preset.config))
    expected = torch.cat([expected[key].flatten() for key in weights])
    assert expected.norm() > 1e-3
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(("name", "reason"), [("grpo_roc", "twice the responses"), ("dpao", "not a preset")])
def test_what_a_batch_does_not_have_is_said(name, reason):
    from scripts.studies.preset import read_preset

    with pytest.raises(ValueError, match=reason):
        read_preset(name)


@pytest.mark.parametrize(("name", "updates", "passes"), [("dapo", 2, True), ("icepop_onpolicy", 1, False)])
def test_updates_and_passes_are_the_runs(name, updates, passes):
    from scripts.studies.preset import read_preset

    preset = read_preset(name)
    assert (preset.updates, preset.needs_old_log_probs) == (updates, passes)


def test_cosines_by_hand():
    """(1, 0) and (1, 1): 1 / sqrt 2. (3, 4) and (-4, 3): 0. None if a gradient is 0 or not a number."""
    from scripts.studies.preset import cosine

    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
    one, other = torch.tensor([[3.0, 4.0]]), torch.tensor([[-4.0, 3.0]])
    assert (cosine(one, -one), cosine(one, other), cosine(one, 0 * one)) == (-1.0, 0.0, None)
    assert cosine(torch.tensor([float("nan"), 1.0]), torch.ones(2)) is None
