"""Warm-up, stable, decay (WSD) for the learning rate of SFT and RL: `optim.lr_scheduler_type: wsd`.

verl 0.9.1's FSDP engine knows "constant" and "cosine". A YAML names the class below as `_target_` of its `optim`
section. With "wsd" the class registers an engine that also has this schedule; otherwise it does what verl's does.
"""

from dataclasses import dataclass

from verl.workers.config import FSDPOptimizerConfig

DECAY_TYPES = ("linear", "cosine", "1-sqrt")


@dataclass
class ScheduledOptimizerConfig(FSDPOptimizerConfig):
    """verl's FSDPOptimizerConfig with one more schedule.

    "wsd": the learning rate rises from `min_lr_ratio` x `lr` to `lr` over the warm-up (`lr_warmup_steps`, or
    `lr_warmup_steps_ratio` of all steps), stays there, and over the last `lr_decay_steps_ratio` of all steps falls to
    `min_lr_ratio` x `lr` (MiniCPM, arXiv:2404.06395, section 4; the maths is transformers' `get_wsd_schedule`).

    Args:
        lr_decay_steps_ratio: of all training steps, in (0, 1].
        lr_decay_type: how it falls: linear, cosine or 1-sqrt.
    Raises:
        ValueError: with "wsd", a setting is out of range.
    """

    lr_decay_steps_ratio: float = 0.2
    lr_decay_type: str = "cosine"

    def __post_init__(self) -> None:
        if self.lr_scheduler_type != "wsd":
            return super().__post_init__()
        if not 0 < self.lr_decay_steps_ratio <= 1 or self.lr_decay_type not in DECAY_TYPES:
            raise ValueError(
                "optim.lr_scheduler_type=wsd: expected 0 < lr_decay_steps_ratio <= 1 and lr_decay_type one of "
                f"{', '.join(DECAY_TYPES)}, got {self.lr_decay_steps_ratio} and {self.lr_decay_type!r}."
            )
        self.lr_scheduler_type = "constant"  # verl's own check knows no third
        super().__post_init__()
        self.lr_scheduler_type = "wsd"

        from verl_ext.trainer import wsd_engine  # noqa: F401  registers the engine; not without need, as it is slow
