"""What both trainers log, validations included: it decides which checkpoint is best, and ends an SFT without updates.

verl's `Tracking` is the only place that sees SFT's validation loss and gradient norms; and RL validates after it saves.
"""

from collections.abc import Mapping
from typing import Any

from verl_ext.checkpoints.hooks import keep_checkpoints
from verl_ext.trainer.skipped_updates import NORM, SKIPPED, SkippedUpdates, count_skipped
from verl_ext.versions import VERL, Library, require_versions


def extend(tracking: Library) -> None:
    """verl/utils/tracking.py (0.9.1): put a subclass in the place of `Tracking`, before a trainer imports it."""
    require_versions(VERL, "verl_ext/trainer/tracking.py")

    class RunTracking(tracking.Tracking):
        def __init__(
            self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
        ):
            precision = ((config or {}).get("engine") or {}).get("mixed_precision")
            self._skipped = SkippedUpdates(precision.get("param_dtype") if isinstance(precision, Mapping) else None)
            self._rolling = keep_checkpoints(config) if config and "trainer" in config else None
            super().__init__(project_name, experiment_name, default_backend, config)

        def log(self, data: Any, step: int, backend: Any = None) -> None:
            counts = {}
            if (norm := data.get(f"train/{NORM}")) is not None:
                counts = {name: number for name, (number,) in count_skipped({f"train/{NORM}": [norm]}).items()}
                data = data | {f"train/{SKIPPED}": counts[f"train/{SKIPPED}"]}
            super().log(data, step, backend)
            if self._rolling is not None:
                self._rolling.record(data, step)
            self._skipped.check(step, counts)

    tracking.Tracking = RunTracking
