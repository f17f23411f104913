"""When a run validates, and on how much: frequency by phase of training, and a light form of most validations.

Both depend only on the step, so a resumed run validates at the same steps as an uninterrupted one. The numbers in the
configs are those that the write-up of the published run recommends ("Dynamic Adjustment of Validation Strategy",
bojieli/ai-agent-book@99cee91, chapter7/retool/README.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.settings import LightValidation, ValidationSchedule
from verl_ext.settings.checks import in_phase


@dataclass(frozen=True)
class ValidationPlan:
    """Plan of the steps with a validation, and of the light ones. `test_freq` is verl's, used without a schedule."""

    test_freq: int
    schedule: ValidationSchedule | None = None
    light: LightValidation | None = None

    def __post_init__(self) -> None:
        intervals = [every for _, every in self.schedule.phases] if self.schedule else [self.test_freq]
        if self.light and all(every % self.light.full_every == 0 for every in intervals):
            raise ValueError(
                f"retool.light_validation.full_every is {self.light.full_every} and the run validates every "
                f"{', '.join(map(str, intervals))} steps, so no validation would be light. Raise full_every."
            )

    def is_due(self, step: int) -> bool:
        """Tell whether the run validates after this step; after its last step it always does."""
        every = in_phase(self.schedule.phases, step) if self.schedule else self.test_freq
        return step % every == 0 or (self.light is not None and step % self.light.full_every == 0)

    def is_light(self, step: int, last_step: int) -> bool:
        return self.light is not None and 0 < step < last_step and step % self.light.full_every != 0


def light_batches(
    dataset: Sequence[Any], light: LightValidation, collate_fn: Callable[[list], dict]
) -> list[dict[str, Any]]:
    """Return a stand-in for verl's loader: one batch of a fixed part of the problems, `light.n` responses each."""
    count = min(light.problems, len(dataset))
    batch = collate_fn([dataset[i * len(dataset) // count] for i in range(count)])
    return [batch | {"__rollout_n__": np.array([light.n] * count, dtype=object)}]


def as_light(metrics: dict[str, float]) -> dict[str, float]:
    """Return a light validation's metrics under separate names: its problems differ from those of a full one."""
    return {
        name.replace("val-core/", "val-light/").replace("val-aux/", "val-light-aux/"): v for name, v in metrics.items()
    }
