"""How a run's batch becomes updates: advantages with the unit of their mean, mini-batches of unequal groups and of
episodes of several rows. Base of `RunTrainer`.

With no option, and without padding in a mean over responses, every method does what verl's own does. Line numbers refer
to trainer/ppo/v1/trainer_base.py of verl 0.9.1.
"""

import math
from typing import TYPE_CHECKING, cast

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_ext.events import Observers, Selected, Selection, Updated
from verl_ext.trainer.advantages import keep_sum_pi_squared, noted, scale
from verl_ext.trainer.mini_batches import check_rows, has_several_rows, lay_out
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
        """Whether groups differ in their number of episodes: by adaptive n, or by domain."""
        return self._options.sampling is not None or bool(self._options.group_sizes)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Request `sum_pi_squared` for an optimal token baseline, which verl's v1 trainers never do (line 1653)."""
        if not self.config.actor_rollout_ref.actor.calculate_sum_pi_squared:
            return super()._compute_old_log_prob(batch, metrics)
        cast(dict, batch.extra_info)["calculate_sum_pi_squared"] = True
        batch = super()._compute_old_log_prob(batch, metrics)
        cast(dict, batch.extra_info)["calculate_sum_pi_squared"] = False  # the update does not need it
        keep_sum_pi_squared(batch)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Compute advantages with the unit of the mean. Fillers get advantage 0, whatever the estimator and their
        rewards, and so do rollouts that are only in the baseline (`DapoReplayBuffer`).
        """
        with noted(batch.keys) as notes:
            batch = super()._compute_advantage(batch, metrics)
        actor, selection = self.config.actor_rollout_ref.actor, self._selection
        unit = actor.policy_loss.get("unit", "mini_batch")
        of_mean = {"mode": actor.loss_agg_mode, "unit": unit, "updates": self._updates_per_step()}
        factors = scale(batch, notes[-1][2], **of_mean, trains=selection.trains)
        of_batch = (self.global_steps, self.local_trigger_step, batch, selection)
        self.observers.tell(Selected(*of_batch, *notes[-1], factors))
        return batch

    def _updates_per_step(self) -> int:
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        return math.ceil(prompts / self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> KVBatchMeta:
        """Do as verl's (line 1608), but keep the rows of an episode in one mini-batch, whose mean weighs its tokens."""
        if not has_several_rows(batch):
            return super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        updates = self._updates_per_step()
        check_rows(self.config, updates)
        ranks = max(self._dispatch_of_actor()) + 1
        batch, partitions = lay_out(batch, updates, ranks * self._fixed_rows(), ranks, self.tokenizer.eos_token_id)
        lengths = [tag["seq_len"] for tag in batch.tags]
        metrics.update(log_seqlen_unbalance(lengths, partitions, logging_prefix))
        batch.reorder([place for partition in partitions for place in partition])
        return batch

    def _dispatch_of_actor(self) -> list[int]:
        """Return the data-parallel rank of each worker, as line 1611 finds it."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return group._dispatch_info["actor"]

    def _fixed_rows(self) -> int:
        """Return the number of rows that each rank's mini-batch must be a multiple of: micro-batches of fixed sizes."""
        actor = self.config.actor_rollout_ref.actor
        fixed = [] if actor.use_dynamic_bsz else [actor.ppo_micro_batch_size_per_gpu]
        for role in (self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.ref):
            fixed += [] if role.log_prob_use_dynamic_bsz else [role.log_prob_micro_batch_size_per_gpu]
        return math.lcm(*filter(None, fixed))

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Make a mini-batch a share of the batch if groups differ in size (line 1593 counts `rollout.n` per prompt).

        So the number of updates does not depend on the number of responses, and no update consists only of padding,
        without a token to average over. Micro-batches of a fixed size must be whole (workers/engine/utils.py:125), and
        require a single update (`RunTrainer`).
        """
        if not self._has_unequal_groups:
            return super()._get_required_batch_multiple(dp_size)
        return dp_size * self._updates_per_step() * self._fixed_rows()

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Set a mini-batch's size for unequal groups or several rows; line 1829 counts `rollout.n` per prompt."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        updates = self._updates_per_step()
        configured = actor.ppo_mini_batch_size, rollout.n
        if self._has_unequal_groups or has_several_rows(batch):
            actor.ppo_mini_batch_size, rollout.n = len(batch) // updates, 1
        try:
            batch = super()._update_actor(batch, metrics)
        finally:
            actor.ppo_mini_batch_size, rollout.n = configured
        self.observers.tell(Updated(self.global_steps, self.local_trigger_step, batch, updates))
        return batch
