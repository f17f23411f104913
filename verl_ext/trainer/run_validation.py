"""A run's validations: full or light, without the samples that infrastructure failed. Base of `RunTrainer`.

With no option and no failure, every method does what verl's own does (0.9.1, trainer/ppo/v1/trainer_base.py).
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, cast

from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn

from verl_ext.events import Observers, Validated
from verl_ext.fleet.recovery import Fleet
from verl_ext.outcome import REMEDIES
from verl_ext.settings import FailedSamples, LightValidation
from verl_ext.trainer.exclusions import NothingStored, describe
from verl_ext.trainer.failed_samples import ALL_RAISED, find_failed, judged_figures
from verl_ext.trainer.run_options import Options
from verl_ext.trainer.validation import as_light, light_batches

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class RunValidation(PPOTrainer):
    """Validations of a run. `RunTrainer` sets the attributes that they use; an option that is off is None."""

    _failed_samples: FailedSamples
    observers: Observers
    _options: Options
    fleet: Fleet | None
    _is_light = False  # whether the current validation is a light one
    _is_void = False  # whether the newest validation is void

    def _validate(self) -> dict[str, float]:
        step, plan, watch = self.global_steps, self._options.plan, self._options.watch
        light = plan.light if plan and plan.is_light(step, self.total_training_steps) else None
        self._is_void = False
        self._validated: set[str] = set()
        if self.fleet:
            self.fleet.actor_waits(is_exact=True)
        try:
            metrics = self._validate_lightly(light) if light else super()._validate()
        except NothingStored as error:
            logger.warning("step %d: validation: %s This validation is void.", step, error)
            metrics, self._is_void = as_light(ALL_RAISED) if light else dict(ALL_RAISED), True
        finally:
            if self.fleet:
                self.fleet.actor_works()
        validated, is_light = frozenset(self._validated), light is not None
        metrics.update(self.observers.tell(Validated(step, metrics, validated, is_light, self._is_void)))
        if watch and not self._is_void and (reason := watch.reason()):
            logger.warning("early stop: the run ends after step %d because %s.", step, reason)
            self.total_training_steps = step  # line 470 begins no further step
        return metrics

    def _validate_lightly(self, light: LightValidation) -> dict[str, float]:
        full_loader, self._is_light = self.val_dataloader, True
        self.val_dataloader = light_batches(cast(Sequence[Any], self.val_dataset), light, collate_fn)
        try:
            return as_light(super()._validate())
        finally:
            self.val_dataloader, self._is_light = full_loader, False

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list[int],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """Compute figures without the samples that failed outside the model, as in `failed_samples.py`. A void
        validation has no figure that could make a checkpoint the best (`Rolling.record`) or stop the run.
        """
        self._validated = {uid for _, uid in expected_acc_counts or ()}
        failed = find_failed(data_sources, sample_uids, reward_extra_infos_dict, expected_acc_counts)
        share, limit = failed.share(failed.worst), self._failed_samples.max_failed_share
        self._is_void = share > limit
        if failed.total:
            consequence = "They count in no metric"
            if self._is_void:
                consequence = (
                    f"That is more than retool.validation.max_failed_share={limit}: this validation is void: it has no "
                    "metrics and affects neither the best checkpoint nor early stop"
                )
            logger.warning(
                "step %d: validation: %d of %d samples failed for reasons outside the model (%s), %.1f%% of those of "
                "%s. %s. %s.",
                *(self.global_steps, failed.total.total(), sum(failed.asked.values()), describe(failed.total)),
                *(100 * share, failed.worst, consequence, REMEDIES[failed.total.most_common(1)[0][0]]),
            )
        if self._is_void:
            return failed.metrics(is_void=True)
        figures = judged_figures(data_sources, sample_uids, reward_extra_infos_dict, failed)
        turns = [turns for turns, cause in zip(sample_turns, failed.causes, strict=True) if cause is None]
        # Given no samples, verl's function returns only the figures of the turns.
        return super()._val_metrics_update([], [], {}, turns) | figures | failed.metrics(is_void=False)

    def _dump_generations(self, *args: Any, dump_path: str, **kwargs: Any) -> None:
        """Put light validations in a separate folder: readers of the dumps assume that a folder's are comparable."""
        super()._dump_generations(*args, dump_path=f"{dump_path}_light" if self._is_light else dump_path, **kwargs)
