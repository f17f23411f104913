"""What pages show of metrics: curves grouped by question, with several runs in a chart, and alarms as sentences."""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from verl_ext.outcome import INFRASTRUCTURE_FAILURES, RolloutEnd
from verl_ext.pages.charts import Chart, Series
from verl_ext.runs.metrics import Metrics, read_metrics
from verl_ext.settings import REPO

PUBLISHED = REPO / "data" / "published" / "rl.jsonl"  # source and licence: the README next to it
DIAGNOSE = REPO / "docs" / "guides" / "diagnose.md"


class Curve(NamedTuple):
    """A chart of every metric whose key matches."""

    key: str  # a regular expression
    title: str
    unit: str
    include: Sequence[float] = ()  # values that the y axis must reach
    log: bool = False  # a logarithmic y axis if the values fall more than tenfold


QUESTIONS = {
    question: [Curve(*row) for row in rows]
    for question, rows in yaml.safe_load(Path(__file__).with_name("curves.yaml").read_text("utf-8")).items()
}
PUBLISHED_NAMES = {"response_length/clip_ratio": "train/truncation_rate"}  # the published column means this key of ours
END_STEPS = 5  # at each end of a curve, over which an alarm takes the mean
RISE, FALL = 0.02, 0.1  # of accuracy: a smaller rise counts as flat; a larger drop from the peak counts as a fall
ENTROPY_FALLS = "## Entropy falls"
# Key, the number of values it needs, whether the first and the last value are wrong, a sentence about these two, what
# to look for in docs/guides/diagnose.md.
ALARMS = (
    ("actor/entropy", 4, lambda a, b: b < 0.3 * a, "The entropy collapses: from {:.3g} to {:.3g} nats per token.",
     ENTROPY_FALLS),
    ("actor/entropy", 4, lambda a, b: b > 3 * a, "The entropy grows: from {:.3g} to {:.3g} nats per token.",
     "## Entropy rises"),
    ("tool/code_ratio", 4, lambda a, b: a > 0.05 and b < 0.7 * a,
     "Tool use falls: from {:.1%} to {:.1%} of the responses.", "## It stops calling the tool"),
    ("train/truncation_rate", 4, lambda a, b: b > a + 0.05,
     "More responses are cut by the budget: from {:.1%} to {:.1%}.", "- **Truncated.**"),
    *((f"failure/share_{end}", 1, lambda _, share: share > 0.01,
       f"The infrastructure fails: {{1:.1%}} of the responses end as {end}.", "## Excluded responses")
      for end in INFRASTRUCTURE_FAILURES),
    (f"failure/share_{RolloutEnd.RAISED}", 1, lambda _, share: share > 0.01,
     "A bug of ours: {1:.1%} of the groups have a rollout that raised.", "## Excluded responses"),
    ("training/rollout_actor_probs_pearson_corr", 1, lambda _, value: value < 0.99,
     "The ratio is off-policy: the probabilities of trainer and engine correlate by only {1:.3f}.",
     "- If `training/rollout_actor_probs_pearson_corr`"),
    ("actor/ppo_kl", 1, lambda _, value: abs(value) > 0.05,
     "The ratio is off-policy: the updated policy is {1:.2g} nats per token from its old log-probs.",
     "- If `actor/ppo_kl`"),
    ("rollout_corr/kl", 1, lambda _, value: abs(value) > 0.05,
     "The ratio is off-policy: the trainer is {1:.2g} nats per token from the weights that wrote the tokens.",
     "- If `rollout_corr/kl`"),
    ("actor/skipped_updates_total", 1, lambda _, skipped: skipped > 0,
     "Updates are skipped, {1:.2g} per step: the norm of their gradient is not finite.",
     "## Skipped updates"),
)  # fmt: skip


def published() -> Metrics:
    """Return the curves of the published run, under today's keys; none if the repository's data is not there."""
    metrics = read_metrics([PUBLISHED] if PUBLISHED.is_file() else [])
    for step, values in metrics.steps.items():
        metrics.steps[step] = {PUBLISHED_NAMES.get(key, key): value for key, value in values.items()}
    return metrics


def charts(
    runs: Sequence[tuple[str, int | None, Metrics]],
    questions: Mapping[str, Sequence[Curve]] = QUESTIONS,
    x_label: str = "step",
) -> dict[str, list[Chart]]:
    """Return question -> charts of the lines of all runs.

    Args:
        runs: (name, number in the viewer's addresses or None, metrics) of each.
    """
    found: dict[str, list[Chart]] = {}
    logged = [sorted(set().union(*metrics.steps.values())) for _, _, metrics in runs]
    for question, curves in questions.items():
        for curve in curves:
            series = []
            for (name, number, metrics), keys in zip(runs, logged, strict=True):
                lines = [(key, *metrics.curve(key)) for key in keys if re.fullmatch(curve.key, key)]
                series += [Series(name, x, y, key=key, run=number) for key, x, y in lines]
            if series:
                values = [value for each in series for value in each.y]
                log = curve.log and min(values) > 0 and max(values) > 10 * min(values)
                chart = Chart(curve.title, series, curve.unit, x_label, include=curve.include, log=log)
                found.setdefault(question, []).append(chart)
    return found


def not_logged(metrics: Metrics) -> list[str]:
    """Return the keys of ALARMS for which a run has too few values."""
    needed = {key: number for key, number, *_ in ALARMS}
    return [key for key, number in needed.items() if len(metrics.curve(key)[1]) < number]


def alarms(metrics: Metrics) -> list[dict[str, Any]]:
    """Return the alarms: `sentence`, `look_for`, and `line`, the first line of docs/guides/diagnose.md that has it.

    First and last values are means of END_STEPS steps, fewer in a short run. An entropy that falls is wrong unless
    accuracy rises; see `normal`.
    """
    lines, found = DIAGNOSE.read_text(encoding="utf-8").splitlines() if DIAGNOSE.is_file() else [], []
    for key, needed, is_wrong, sentence, look_for in ALARMS:
        values = metrics.curve(key)[1]
        ends = _ends(values)
        if len(values) < needed or not is_wrong(*ends) or (look_for == ENTROPY_FALLS and _rise(metrics)):
            continue
        line = next((place for place, text in enumerate(lines, 1) if look_for in text), None)
        found.append({"sentence": sentence.format(*ends), "look_for": look_for, "line": line})
    return found


def normal(metrics: Metrics) -> list[str]:
    """Return a sentence for each value that would be an alarm in another run, and why it is none in this one."""
    for key, needed, is_wrong, _, look_for in ALARMS:
        values = metrics.curve(key)[1]
        if look_for != ENTROPY_FALLS or len(values) < needed or not is_wrong(*_ends(values)):
            continue
        if rise := _rise(metrics):
            span = "from {:.3g} to {:.3g} nats per token".format(*_ends(values))
            return [
                f"The entropy falls {span}, as is normal while accuracy rises (from {rise[0]:.3g} to {rise[1]:.3g})."
            ]
    return []


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last END_STEPS values, or of the two halves if there are few."""
    number = max(1, min(END_STEPS, len(values) // 2))
    return statistics.fmean(values[:number] or [0.0]), statistics.fmean(values[-number:] or [0.0])


def _rise(metrics: Metrics) -> tuple[float, float] | None:
    """Return first and last accuracy, in training or else validation, if it rises by RISE and stays near its peak."""
    logged = sorted(set().union(*metrics.steps.values()))
    held_out = [key for key in logged if re.fullmatch(r"val-core/.+/acc/mean@\d+", key)]
    for key in ("train/acc", *held_out):
        values = metrics.curve(key)[1]
        if len(values) < 2:
            continue
        number = max(1, min(END_STEPS, len(values) // 2))
        peak = max(statistics.fmean(values[start : start + number]) for start in range(len(values) - number + 1))
        first, last = _ends(values)
        return (first, last) if last > first + RISE and last > peak - FALL else None
    return None
