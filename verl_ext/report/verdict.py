"""The top of the report: what a run improved and what it did not, as far as the intervals allow a statement.

A figure has improved, or got worse, if the 95% interval of the paired difference lies on one side of 0. If nothing was
evaluated, the verdict compares the first and the last values of the run's own metrics, and says that these have no
interval. The functions take plain dictionaries, as in `summary.json`.
"""

import re
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from verl_ext.evaluation.figures import POOLED
from verl_ext.pages.text import percent, points
from verl_ext.report.contents import RunContents
from verl_ext.runs.metrics import Metrics

ACCURACIES = {"acc/mean@k": "accuracy", "acc/best@k": "best@{k}", "acc/maj@k": "maj@{k}"}
LOWER_IS_BETTER = {
    "tool/error_rate": "calls that failed",
    "tool/timeout_rate": "calls over the time limit",
    "truncation_rate": "responses cut by the budget",
}
END_STEPS = 5  # averaged at each end of a training curve; at most a third of the curve

Groups = Mapping[str, Mapping[str, Any]]  # group of problems -> its figures, as `evaluation.to_json` gives them


class Change(NamedTuple):
    """A figure before and after, and what became of it."""

    group: str
    key: str
    text: str
    outcome: str  # improved | worse | unclear


class Verdict(NamedTuple):
    """The top of the report: what became of accuracy, and a phrase for each other figure."""

    sentence: str
    improved: list[str]
    not_improved: list[str]

    @property
    def text(self) -> str:
        """Return the sentence, and what did not improve."""
        return self.sentence + (f" Not improved: {'; '.join(self.not_improved)}." if self.not_improved else "")


def headline(sides: Mapping[str, Groups]) -> dict[str, Any] | None:
    """Return accuracy (mean@k) pooled over the in-distribution sources (all, if there are none); None if not evaluated.

    Args:
        sides: "before", "after", "difference" -> groups; empty if there is none.
    """
    present = sides["after"] or sides["before"]
    if not present:
        return None
    group = _headline_group(present)
    return {
        "group": group,
        "data_sources": present[group]["data_sources"],
        "num_problems": present[group]["num_problems_scored"],
        **{side: groups[group]["metrics"]["acc/mean@k"] if group in groups else None for side, groups in sides.items()},
    }


def changes(sides: Mapping[str, Groups]) -> list[Change]:
    """Return the changes of all figures with a better direction: the headline group's, and each source's accuracy.

    A figure that is as good as can be on both sides (no call failed) is left out. Args as for `headline`.
    """
    top = _headline_group(sides["after"])
    found = []
    for name, difference in sides["difference"].items():
        if name == top:
            labels = {key: label.format(k=difference["k"]) for key, label in (ACCURACIES | LOWER_IS_BETTER).items()}
            if difference["k"] == 1:  # best@1 and maj@1 are the accuracy
                labels = {key: label for key, label in labels.items() if key not in ("acc/best@k", "acc/maj@k")}
        elif name in POOLED or difference["data_sources"] == sides["difference"].get(top, {}).get("data_sources"):
            continue  # the sources that it pools, and the headline's only source, are listed separately
        else:
            labels = {"acc/mean@k": f"accuracy on {name}"}
        for key, label in labels.items():
            figures = [sides[side][name]["metrics"][key] for side in ("before", "after", "difference")]
            best = 0.0 if key in LOWER_IS_BETTER else 1.0
            if None not in figures and not all(figure["value"] == best for figure in figures[:2]):
                found.append(Change(name, key, *_describe(label, *figures, best=best)))
    return found


def judge(run: RunContents, sides: Mapping[str, Groups]) -> Verdict:
    """Return the verdict on a run, from its evaluation, or from its metrics if it has none. Args as for `headline`."""
    top = headline(sides)
    if top is None and run.rl.steps:
        return _rl_verdict(run.rl)
    if top is None and run.sft.steps and run.kind == "sft":
        return _sft_verdict(run.sft)
    if top is None:
        return Verdict("This run has not been evaluated yet.", [], [])
    if top["difference"] is None:
        return Verdict(_one_sided(top, run.sides), [], [])
    beside = [change for change in changes(sides) if (change.group, change.key) != (top["group"], "acc/mean@k")]
    return Verdict(
        _accuracy_sentence(run, top),
        [change.text for change in beside if change.outcome == "improved"],
        [change.text for outcome in ("worse", "unclear") for change in beside if change.outcome == outcome],
    )


def held_out_source(key: str) -> str | None:
    """Return the data source of verl's validation key `val-core/<data source>/acc/mean@<n>`; None for other keys."""
    match = re.fullmatch(r"val-core/(.+)/acc/mean@\d+", key)
    return match[1] if match else None


def _headline_group(groups: Groups) -> str:
    """Return the group of problems that the verdict is about: in distribution, or all if none is."""
    return "in_distribution" if "in_distribution" in groups else "overall"


def _describe(what: str, before: Mapping, after: Mapping, difference: Mapping, *, best: float) -> tuple[str, str]:
    """Return (phrase, outcome) of a figure; `best` is the good end of its range, 0 or 1."""
    span = f"from {percent(before, interval=False)} to {percent(after, interval=False)}"
    if difference["low"] is None:  # no problem has this figure on both sides
        return f"{what} {span}, {points(difference)} points without an interval", "unclear"
    if difference["low"] <= 0 <= difference["high"]:
        if before["value"] == after["value"]:
            return f"{what} stays at {percent(after, interval=False)}", "unclear"
        return f"{what} {span}, {points(difference)} points, an interval that contains 0", "unclear"
    rose = difference["low"] > 0
    return f"{what} {'rose' if rose else 'fell'} {span}", "improved" if rose == (best == 1.0) else "worse"


def _accuracy_sentence(run: RunContents, top: Mapping[str, Any]) -> str:
    """Say what training did to accuracy, as far as the interval of the paired difference allows a statement."""
    trainer = "SFT" if run.kind == "sft" else "RL"
    steps = "" if run.kind == "quickstart" else f", {run.sides[0]} to {run.sides[1]}"
    span = f"from {percent(top['before'])} to {percent(top['after'])}{steps}"
    change = f"on {_where(top)}: {points(top['difference'])} points"
    if top["difference"]["low"] <= 0 <= top["difference"]["high"]:
        return f"{trainer} did not measurably change accuracy ({span}) {change}, an interval that contains 0."
    return f"{trainer} {'raised' if top['difference']['low'] > 0 else 'lowered'} accuracy {span} {change}."


def _one_sided(top: Mapping[str, Any], names: tuple[str, str]) -> str:
    side = next((side for side in ("after", "before") if top[side]), None)
    if side is None:
        return f"No sample could be judged on {_where(top)}; see the excluded samples below."
    name = names[side == "after"]
    return f"Accuracy {f'at {name}' if name.startswith('step') else name} is {percent(top[side])} on {_where(top)}."


def _where(top: Mapping[str, Any]) -> str:
    return f"{top['num_problems']} held-out problems of {', '.join(top['data_sources'])}"


def _rl_verdict(rl: Metrics) -> Verdict:
    """Judge by the accuracy of logged validations, or else of training; without samples there are no intervals."""
    found = []
    for key in sorted({key for values in rl.steps.values() for key in values if held_out_source(key)}):
        steps, values = rl.curve(key)
        if len(steps) > 1:
            span = f"from {values[0]:.1%} (step {steps[0]}) to {values[-1]:.1%} (step {steps[-1]})"
            found.append((f"validation accuracy on {held_out_source(key)} {span}", values[-1] > values[0]))
    found += [(text, change > 0) for change, text in _ends(rl, "train/acc", "training accuracy", ".1%")]
    found += [(text, False) for change, text in _ends(rl, "tool/error_rate", "calls that failed", ".1%") if change > 0]
    sentence = f"{max(rl.steps)} RL steps, with no validation samples to give an interval."
    if not found:
        return Verdict(sentence, [], [])
    return _verdict_on_metrics(sentence, found, "Higher", "No accuracy is higher.")


def _sft_verdict(sft: Metrics) -> Verdict:
    found = [(text, change < 0) for change, text in _ends(sft, "train/loss", "training loss", ".3g")]
    steps, values = sft.curve("val/loss")
    if len(steps) > 1:
        best = min(range(len(steps)), key=lambda i: (values[i], -steps[i]))
        is_last = best == len(steps) - 1
        since = "" if is_last else f", lowest at step {steps[best]} ({values[best]:.3g})"
        span = f"from {values[0]:.3g} (step {steps[0]}) to {values[-1]:.3g} (step {steps[-1]})"
        found.append((f"validation loss {span}{since}", is_last))
    return _verdict_on_metrics(f"{max(sft.steps)} SFT steps.", found, "Lower", "No loss is lower.")


def _verdict_on_metrics(start: str, found: list[tuple[str, bool]], better: str, none_is: str) -> Verdict:
    """Make a verdict of `found`, which holds what changed, and whether for the better."""
    improved = [text for text, is_better in found if is_better]
    sentence = f"{start} {better}: {'; '.join(improved)}." if improved else f"{start} {none_is}"
    return Verdict(sentence, improved, [text for text, is_better in found if not is_better])


def _ends(metrics: Metrics, key: str, what: str, form: str) -> list[tuple[float, str]]:
    """Return one (change, phrase) of the means of the first and of the last values; none with fewer than two steps."""
    values = metrics.curve(key)[1]
    if len(values) < 2:
        return []
    number = max(1, min(END_STEPS, len(values) // 3))
    first, last = statistics.fmean(values[:number]), statistics.fmean(values[-number:])
    return [(last - first, f"{what} from {first:{form}} to {last:{form}} (means of {number} steps at each end)")]
