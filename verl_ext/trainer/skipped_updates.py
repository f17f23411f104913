"""Updates skipped because the norm of their gradient is not finite: they are counted, reported, and finally end a run.

verl 0.9.1 leaves the weights as they are, prints a line in the log of a worker, and continues
(workers/engine/fsdp/transformer_impl.py:822). A run all of whose updates are skipped would end normally, having learned
nothing.
"""

import functools
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from verl_ext.events import Ended, Observer
from verl_ext.versions import VERL, Library, require_versions

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

NORM = "grad_norm"
# After `actor/`, `critic/` or `train/`; per step. verl sums metrics with "total" in the name (trainer/ppo/v1/utils.py).
UPDATES, SKIPPED = "updates_total", "skipped_updates_total"
MOST_STEPS = 3  # in a row that may have only skipped updates
MOST_STEPS_FP16 = 20  # its loss is scaled: a skipped update halves the scale, which starts at 2^16


def count_skipped(metrics: Mapping[str, Any]) -> dict[str, list[float]]:
    """Count `UPDATES` and `SKIPPED` of each role whose norms, one per update, are in a batch's metrics."""
    counts = {}
    for name, norms in metrics.items():
        if name.endswith(f"/{NORM}"):
            skipped = sum(not math.isfinite(norm) for norm in norms)
            role = name.removesuffix(NORM)
            counts |= {role + UPDATES: [float(len(norms))], role + SKIPPED: [float(skipped)]}
    return counts


def replace_in(trainer_base: Library) -> None:
    """trainer/ppo/v1/trainer_base.py (0.9.1): :1822 and :1863 take the mean of the norms of a batch's updates, which is
    NaN if one is. Here they are counted first."""
    require_versions(VERL, "verl_ext/trainer/skipped_updates.py")
    verls = trainer_base.reduce_metrics
    trainer_base.reduce_metrics = functools.wraps(verls)(lambda metrics: verls(metrics | count_skipped(metrics)))


class SkippedUpdates(Observer):
    """Watches the steps of a run. `param_dtype`: what the optimizer's engine computes in."""

    def __init__(self, param_dtype: Any = None):
        self._most = MOST_STEPS_FP16 if str(param_dtype) in ("16", "fp16", "float16", "torch.float16") else MOST_STEPS
        self._steps: dict[str, int] = {}  # role -> steps in a row all of whose updates were skipped

    def on_ended(self, event: Ended) -> None:
        self.check(event.step, event.metrics)

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Warn of skipped updates among a step's metrics.

        Raises:
            RuntimeError: too many steps in a row had only skipped updates.
        """
        for name in [name for name in metrics if name.endswith(f"/{SKIPPED}")]:
            role = name.removesuffix(f"/{SKIPPED}")
            skipped, updates = round(metrics[name]), round(metrics[f"{role}/{UPDATES}"])
            self._steps[role] = self._steps.get(role, 0) + 1 if skipped == updates > 0 else 0
            if skipped:
                logger.warning(
                    "step %d: %d of %d updates (%s) were skipped because the norm of their gradient is not finite.",
                    *(step, skipped, updates, role),
                )
            if self._steps[role] >= self._most:
                raise RuntimeError(
                    f"All updates ({role}) of {self._steps[role]} steps in a row, up to step {step}, were skipped "
                    "because the norm of their gradient is not finite. The weights have not changed since step "
                    f"{step - self._steps[role]}. If these include the first steps of the run, check the data, the "
                    "model's weights and its dtype. Otherwise resume an earlier checkpoint (resume_mode=resume_path), "
                    "or start a run from its merged model with a lower optim.lr."
                )
