"""Watch a validation metric, and say when a run should end: no more progress, or a collapse."""

import math
import re
from collections.abc import Mapping, Sequence

from verl_ext.events import Observer, Saved, Started, Validated
from verl_ext.runs.journal import StepJournal
from verl_ext.settings import EarlyStop

_MEAN_ACC = re.compile(r"val-core/.+/acc/mean@\d+")


def reason_to_stop(values: Sequence[float], settings: EarlyStop) -> str | None:
    """Return why a run with these validation values, oldest first, should end; None while it should continue."""
    if not values:
        return None
    best, without_progress = values[0], 0
    for value in values[1:]:
        if value >= best + settings.min_delta and value > best:
            best, without_progress = value, 0
        else:
            without_progress += 1
    if settings.max_drop is not None and max(values) - values[-1] > settings.max_drop:
        return f"fell to {values[-1]:.4g}, more than max_drop={settings.max_drop} below its best, {max(values):.4g}"
    if without_progress >= settings.patience:
        return (
            f"has not risen by min_delta={settings.min_delta} above {best:.4g} in {without_progress} validations "
            f"(patience={settings.patience}), and is {values[-1]:.4g}"
        )
    return None


def watched_value(metrics: Mapping[str, float], settings: EarlyStop, *, light: bool) -> float | None:
    """Return the watched value in a validation's metrics; None if the metric is of the other kind, light or full.

    Raises:
        ValueError: the metric is missing, or not a finite number.
    """
    wanted = settings.metric or "val-core/*/acc/mean@*"
    if light != wanted.startswith("val-light"):
        return None
    is_wanted = _MEAN_ACC.fullmatch if settings.metric is None else wanted.__eq__
    found = [value for name, value in metrics.items() if is_wanted(name)]
    value = sum(found) / len(found) if found else math.nan
    if not math.isfinite(value):
        names = sorted(name for name in metrics if "/mean@" in name)
        raise ValueError(
            f"retool.early_stop.metric: {wanted} is {'not finite' if found else 'not one of the validation metrics'}. "
            f"Expected one of {', '.join(names)}."
        )
    return value


class EarlyStopWatch(Observer):
    """The values of a run so far, over all its starts, and `last_saved`, the step of its newest checkpoint."""

    def __init__(self, settings: EarlyStop, journal: StepJournal):
        self.settings = settings
        self._journal = journal
        self.last_saved = 0
        self._values: dict[int, float] = {}  # step -> value; a step that is validated again counts once

    def on_started(self, event: Started) -> None:
        self.last_saved = event.step
        self._values = {record["step"]: record["value"] for record in self._journal.resume(event.step)}

    def on_saved(self, event: Saved) -> None:
        self.last_saved = event.step

    def on_validated(self, event: Validated) -> dict[str, float]:
        """Note a validation; return metrics of the watch, none if it is void or not of the watched kind."""
        if event.is_void or (value := watched_value(event.metrics, self.settings, light=event.is_light)) is None:
            return {}
        self._values[event.step] = value
        self._journal.append(event.step, value=value)
        return {"early_stop/value": value, "early_stop/best": max(self._values.values())}

    def reason(self) -> str | None:
        values = [self._values[step] for step in sorted(self._values)]
        reason = reason_to_stop(values, self.settings)
        return reason and f"{self.settings.metric or 'the mean validation accuracy'} {reason}"
