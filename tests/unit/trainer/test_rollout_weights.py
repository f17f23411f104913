"""A batch whose weights are all 0, through verl's own function."""

import math

import pytest
import torch


@pytest.mark.parametrize(
    ("kind", "bounds", "log_ratio", "weight"),
    [
        ("token", "0.5_2.0", 0.5, math.exp(0.5)),
        ("token", "0.5_2.0", 5.0, 0.0),
        ("sequence", "1e-9_2.0", 0.2, math.exp(0.6)),  # of three tokens
        ("sequence", "1e-9_2.0", 0.5, 0.0),
    ],
)
def test_weights_that_are_all_0_end_no_run(kind, bounds, log_ratio, weight, cpu_platform) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct

    old, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
    settings = {"rollout_is": kind, "rollout_is_threshold": bounds}
    weights, _, metrics = correct(old, old - log_ratio, mask, **settings)
    assert weights.batch["rollout_is_weights"].flatten().tolist() == pytest.approx([weight] * 6)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(weight)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(float(weight > 0))
