"""How a run's batch becomes updates: advantages with the unit of their mean, mini-batches of unequal groups. Base of
`RunTrainer`.

With no option, and without padding in a mean over responses, every method does what verl's own does. Line numbers refer
to trainer/ppo/v1/trainer_base.py of verl 0.9.1.
"""

import math
from typing import TYPE_CHECKING

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.events import Observers, Selected, Selection, Updated
from verl_ext.trainer.advantages import keep_sum_pi_squared, noted, scale
from verl_ext.trainer.run_options import Options

if TYPE_CHECKING:
    from verl_ext.trainer.sampler import DapoReplayBuffer


class RunUpdates(PPOTrainer):
    """Updates of a run. `RunTrainer` sets the attributes that they use."""

    observers: Observers
    _options: Options
    _sampler: "DapoReplayBuffer | None"  # `replay_buffer`, if it is ours

    @property
    def _selection(self) -> Selection:
        """What the newest batch has of the groups that it took."""
        return self._sampler.selection if self._sampler else Selection()

    @property
    def _has_unequal_groups(self) -> bool:
        """Whether groups differ in their number of rows: by adaptive n, by domain, or by episodes of several rows."""
        options = self._options
        return options.sampling is not None or bool(options.group_sizes) or self._selection.has_several_rows

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Request `sum_pi_squared` for an optimal token baseline, which verl's v1 trainers never do (line 1653)."""
        if not self.config.actor_rollout_ref.actor.calculate_sum_pi_squared:
            return super()._compute_old_log_prob(batch, metrics)
        batch.extra_info["calculate_sum_pi_squared"] = True
        batch = super()._compute_old_log_prob(batch, metrics)
        batch.extra_info["calculate_sum_pi_squared"] = False  # the update does not need it
        keep_sum_pi_squared(batch)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute advantages with the unit of the mean. Fillers get advantage 0, whatever the estimator and their
        rewards, and so do rollouts that are only in the baseline (`DapoReplayBuffer`).
        """
        with noted() as notes:
            batch = super()._compute_advantage(batch, metrics)
        actor, selection = self.config.actor_rollout_ref.actor, self._selection
        unit = actor.policy_loss.get("unit", "mini_batch")
        of_mean = {"mode": actor.loss_agg_mode, "unit": unit, "updates": self._updates_per_step()}
        factors = scale(batch, **of_mean, trains=selection.trains)
        of_batch = (self.global_steps, self.local_trigger_step, batch, selection)
        self.observers.tell(Selected(*of_batch, *notes[-1], factors))
        return batch

    def _updates_per_step(self) -> int:
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        return math.ceil(prompts / self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Make a mini-batch a share of the batch if groups differ in size (line 1593 counts `rollout.n` per prompt).

        So the number of updates does not depend on the number of responses, and no update consists only of padding,
        without a token to average over. Micro-batches of a fixed size must be whole (workers/engine/utils.py:125), and
        require a single update (`RunTrainer`).
        """
        if not self._has_unequal_groups:
            return super()._get_required_batch_multiple(dp_size)
        actor = self.config.actor_rollout_ref.actor
        if self._selection.has_several_rows and not actor.use_dynamic_bsz and self._updates_per_step() > 1:
            raise ValueError(
                "An episode has several rows, but actor.use_dynamic_bsz is false with more than one update a step: "
                "padding to whole micro-batches could be all of an update. Set actor_rollout_ref.actor.use_dynamic_bsz="
                "true, or ppo_mini_batch_size to the size of the train batch."
            )
        fixed = [] if actor.use_dynamic_bsz else [actor.ppo_micro_batch_size_per_gpu]
        for role in (self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.ref):
            fixed += [] if role.log_prob_use_dynamic_bsz else [role.log_prob_micro_batch_size_per_gpu]
        return dp_size * self._updates_per_step() * math.lcm(*filter(None, fixed))

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Set a mini-batch's size for unequal groups: line 1809 takes ppo_mini_batch_size x rollout.n responses."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        updates = self._updates_per_step()
        configured = actor.ppo_mini_batch_size, rollout.n
        if self._has_unequal_groups:
            actor.ppo_mini_batch_size, rollout.n = len(batch) // updates, 1
        try:
            batch = super()._update_actor(batch, metrics)
        finally:
            actor.ppo_mini_batch_size, rollout.n = configured
        self.observers.tell(Updated(self.global_steps, self.local_trigger_step, batch, updates))
        return batch
