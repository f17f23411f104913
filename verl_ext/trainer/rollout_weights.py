"""A batch whose rollout-correction weights are all 0: its loss is 0, and the run continues."""

import functools
from typing import Any

from verl_ext.versions import VERL, Library, require_versions


def bear_zeros(helper: Library) -> None:
    """verl/trainer/ppo/rollout_corr_helper.py:757 (0.9.1) divides by the mean square of the weights, for a metric.

    If they are all 0, the mean and the effective sample size, both 0, are the only metrics.
    """
    require_versions(VERL, "verl_ext/trainer/rollout_weights.py")
    verls = helper.compute_is_metrics

    @functools.wraps(verls)
    def compute_is_metrics(**given: Any) -> dict[str, float]:
        try:
            return verls(**given)
        except ZeroDivisionError:
            return {"rollout_is_mean": 0.0, "rollout_is_eff_sample_size": 0.0}

    helper.compute_is_metrics = compute_is_metrics
