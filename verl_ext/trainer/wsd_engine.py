"""The FSDP engine with one more learning-rate schedule; `lr_schedule.py` imports it, which registers it.

verl's registry looks for an engine of this machine's vendor before it takes the general engine
(workers/engine/base.py:413, 0.9.1). It has no vendor engine for FSDP, so ours takes that place. Engines of other kinds
refuse "wsd" themselves.
"""

import os
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_wsd_schedule
from verl.utils.device import get_vendor
from verl.workers.engine import EngineRegistry

if TYPE_CHECKING:  # the decorator of verl's own engine hides its class
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine as FSDPEngineWithLMHead
else:
    from verl.workers.engine import FSDPEngineWithLMHead


@EngineRegistry.register(
    model_type="language_model",
    backend=["fsdp", "fsdp2"],
    device=["cuda", "npu"],
    vendor=os.getenv("VERL_ENGINE_VENDOR") or get_vendor(),
)
class WSDEngineWithLMHead(FSDPEngineWithLMHead):
    """Engine of `ScheduledOptimizerConfig`, which describes the schedule."""

    def _build_lr_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        config = self.optimizer_config
        if config.lr_scheduler_type != "wsd":
            return super()._build_lr_scheduler(optimizer)
        warmup, decay = wsd_steps(config)
        if self.rank == 0:
            print(f"Total steps: {config.total_training_steps}, the first {warmup} warm-up, the last {decay} decay")
        return get_wsd_schedule(
            optimizer,
            num_warmup_steps=warmup,
            num_decay_steps=decay,
            num_training_steps=config.total_training_steps,
            decay_type=config.lr_decay_type,
            min_lr_ratio=config.min_lr_ratio or 0.0,
        )


def wsd_steps(config: Any) -> tuple[int, int]:
    """Return (warm-up steps, decay steps) of a `ScheduledOptimizerConfig`.

    Raises:
        ValueError: together they exceed the number of training steps, or that number is not known.
    """
    total = config.total_training_steps
    warmup = config.lr_warmup_steps or 0
    if warmup <= 0:  # as verl/workers/engine/fsdp/transformer_impl.py:514 (0.9.1)
        warmup = int(config.lr_warmup_steps_ratio * total)
    decay = round(config.lr_decay_steps_ratio * total)
    if total < 1 or warmup + decay > total:
        raise ValueError(
            f"lr_scheduler_type=wsd: {warmup} warm-up and {decay} decay steps, but only {total} training steps. "
            "Lower lr_warmup_steps, lr_warmup_steps_ratio or lr_decay_steps_ratio."
        )
    return warmup, decay
