"""Apply a preset of configs/objective to a batch in memory: advantages, weights and loss, without verl's trainer.

It calls the files of verl_ext/objectives through the adapter that verl calls (verl_ext/trainer/objective.py). Features
that need verl's sampler or more passes are missing: resampling, filters of groups and turns, `sum_pi_squared`. A
recorded batch has some of them (correction_lab.py).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor

from verl_ext.objectives.group_mean import group_mean, rows_of_groups
from verl_ext.objectives.icepop import pop
from verl_ext.objectives.maxrl import maxrl
from verl_ext.objectives.mean import unit_factors
from verl_ext.objectives.mis import masked, response_ratio
from verl_ext.objectives.olmorl import truncate
from verl_ext.objectives.terms import MAX_LOG_RATIO, Terms, Tokens
from verl_ext.settings import CONFIGS, compose_run
from verl_ext.trainer.objective import COUNT, LOSSES, policy_loss

RUN = "tiny_dapo"
NEEDS_MORE = {"simpletir": "void turns", "grpo_roc": "twice the responses", "tir_otb": "sum_pi_squared"}


class Batch(NamedTuple):
    """Responses of B rows and T tokens, groups side by side.

    Attributes:
        mask: bool[B, T], tokens that the policy sampled.
        rollout_log_prob: float[B, T], as the rollout engine reported them.
        rewards: float[B].
        groups: the group of each row.
    """

    mask: Tensor
    rollout_log_prob: Tensor
    rewards: Tensor
    groups: list[str]


class Update(NamedTuple):
    """What a mini-batch has besides its log-probs; rows of `Batch`."""

    old_log_prob: Tensor
    advantages: Tensor
    weights: Tensor | None
    mask: Tensor


@dataclass(frozen=True)
class Preset:
    """One objective, with the config of a run that has it."""

    name: str
    config: DictConfig

    @property
    def needs_old_log_probs(self) -> bool:
        """Return whether the trainer makes a pass over the batch before the first update."""
        return not self.config.algorithm.rollout_correction.bypass_mode

    @property
    def updates(self) -> int:
        """Return the number of mini-batches of a batch."""
        return self.config.data.train_batch_size // self._actor.ppo_mini_batch_size

    def prepare(self, batch: Batch, old_log_prob: Tensor | None, *, updates: int, advantages: Tensor) -> Update:
        """Return what the losses of all mini-batches are computed from.

        Args:
            old_log_prob: float[B, T], the trainer's before the first update; None if the preset has none.
            updates: mini-batches of the batch.
            advantages: float[B, T], or [B, 1].
        """
        old = batch.rollout_log_prob if old_log_prob is None else old_log_prob
        factors = unit_factors(batch.mask.sum(-1), batch.groups, unit=self._unit, updates=updates)
        found = advantages * factors[:, None].to(batch.rewards.dtype)
        return Update(old, found * batch.mask, self._weights(batch, old_log_prob), batch.mask)

    def loss(self, update: Update, rows: Tensor, log_prob: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a mini-batch, and its token counts: tokens, clipped_low, clipped_high, dropped, ...

        Args:
            rows: int[b], those of the mini-batch.
            log_prob: float[b, T], the trained policy's; has the gradient.
        """
        mask = update.mask[rows]
        info = {
            "dp_size": 1,
            "batch_num_tokens": int(mask.sum()),
            "global_batch_size": len(rows),
            "loss_scale_factor": self._actor.loss_scale_factor,
        }
        bounds = {key: self._actor[key] for key in LOSSES[self._mode].settings.values()}
        value, counts = policy_loss(
            LOSSES[self._mode],
            old_log_prob=update.old_log_prob[rows],
            log_prob=log_prob,
            advantages=update.advantages[rows],
            response_mask=mask,
            config=SimpleNamespace(policy_loss={"unit": self._unit}, global_batch_info=info, **bounds),
            loss_agg_mode=self._actor.loss_agg_mode,
            rollout_is_weights=None if update.weights is None else update.weights[rows],
        )
        return value, {name.removeprefix(COUNT): count for name, count in counts.items()}

    def terms(self, update: Update, log_prob: Tensor) -> Terms:
        """Return the objective of each token of the whole batch, without a mean."""
        loss = LOSSES[self._mode]
        tokens = Tokens(log_prob, update.old_log_prob, update.advantages, update.mask, update.weights)
        return loss.objective(tokens, **{name: self._actor[key] for name, key in loss.settings.items()})

    @property
    def _actor(self) -> DictConfig:
        return self.config.actor_rollout_ref.actor

    @property
    def _mode(self) -> str:
        return self._actor.policy_loss.loss_mode

    @property
    def _unit(self) -> str:
        return self._actor.policy_loss.unit

    def advantages(self, batch: Batch) -> Tensor:
        """Return float[B], without the unit of the mean."""
        algorithm = self.config.algorithm
        if algorithm.adv_estimator == "maxrl":
            return maxrl(batch.rewards, batch.groups)
        return group_mean(batch.rewards, batch.groups, by_std=algorithm.norm_adv_by_std_in_grpo)

    def is_trained(self, right: Tensor, groups: Sequence[str]) -> Tensor:
        """Return bool[B], whether a row trains. If the preset filters groups, those that are all right or all wrong do
        not, even if the length penalty makes their rewards differ: as fillers they have advantage 0.

        Args:
            right: float[B], accuracies.
        """
        found = torch.ones(len(right), dtype=torch.bool)
        if self.config.algorithm.filter_groups.enable:
            for rows in rows_of_groups(groups):
                found[rows] = len(set(right[rows].tolist())) > 1
        return found

    def _weights(self, batch: Batch, old_log_prob: Tensor | None) -> Tensor | None:
        """Return weights as verl computes them once per batch (rollout_corr_helper.py:502, 0.9.1); 0 outside `mask`."""
        correction = self.config.algorithm.rollout_correction
        if old_log_prob is None or not correction.rollout_is:
            return None
        log_ratio = old_log_prob - batch.rollout_log_prob
        if correction.rollout_is == "sequence":
            ratio = response_ratio(log_ratio, batch.mask)
        else:
            ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        lower, _, upper = str(correction.rollout_is_threshold).rpartition("_")
        if not lower:
            weights = truncate(ratio, float(upper))
        elif self._mode == "retool_mis":
            weights = masked(ratio, float(upper))  # the lower bound is how verl spells "none"
        else:
            weights = pop(ratio, float(lower), float(upper))
        return torch.where(batch.mask, weights, 0)


@functools.cache  # verl has a hundred files
def read_preset(name: str, run: str = RUN) -> Preset:
    """Return the preset `objective=NAME` of a run.

    Args:
        run: name of its YAML in configs/.
    Raises:
        ValueError: there is no such preset, or it needs more than a batch.
    """
    known = sorted({path.stem for path in (CONFIGS / "objective").glob("*.yaml")} - NEEDS_MORE.keys())
    if name not in known:
        why = f"needs {NEEDS_MORE[name]}, which a batch does not have" if name in NEEDS_MORE else "is not a preset"
        raise ValueError(f"objective={name} {why}; expected one of {', '.join(known)}.")
    return Preset(name, compose_run(run, [f"objective={name}"]))


def cosine(first: Tensor, second: Tensor) -> float | None:
    """Return the cosine between two gradients of one shape; None if one is 0 or not finite."""
    norms = float(first.norm() * second.norm())
    return float((first * second).sum()) / norms if 0 < norms < float("inf") else None
