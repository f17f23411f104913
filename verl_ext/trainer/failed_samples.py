"""A validation without the samples that infrastructure failed: which samples failed, and the figures of the others.

verl 0.9.1 counts a sample that the sandbox failed with the `acc` that the reward manager had to give it, and a sample
that raised as wrong. These are pure functions of the columns that verl passes to `_val_metrics_update`
(trainer_base.py:1274).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from verl_ext.outcome import INFRASTRUCTURE_FAILURES, RolloutEnd, infrastructure_failure
from verl_ext.reward.votes import vote

CAUSES = (*INFRASTRUCTURE_FAILURES, RolloutEnd.RAISED)  # a session that stored nothing: its rollout raised
_OF_VOTE = ("pred", "normalised", "acc")
GROUP = "val-aux/failed"  # of the metrics
ALL_RAISED = {f"{GROUP}/{RolloutEnd.RAISED}": 1.0, f"{GROUP}/share": 1.0, f"{GROUP}/void": 1.0}


@dataclass(frozen=True)
class Failed:
    """What became of the samples of a validation.

    Attributes:
        causes: of each stored sample, an infrastructure failure, or None if it was judged.
        asked: (data source, uid) -> samples that the validation asked for.
        by_source: data source -> number of failed samples by cause, RAISED included.
    """

    causes: list[RolloutEnd | None]
    asked: dict[tuple[str, str], int]
    by_source: dict[str, Counter]

    @property
    def total(self) -> Counter:
        return sum(self.by_source.values(), Counter())

    def share(self, source: str) -> float:
        return self.by_source[source].total() / sum(n for (of, _), n in self.asked.items() if of == source)

    @property
    def worst(self) -> str:
        """Return the data source that lost the largest share."""
        return max(self.by_source, key=self.share)

    def metrics(self, *, is_void: bool) -> dict[str, float]:
        """Return shares of all samples, by cause and in all, and whether the validation is void."""
        num_asked, total = sum(self.asked.values()), self.total
        shares = {f"{GROUP}/{cause}": total[cause] / num_asked for cause in CAUSES}
        return shares | {f"{GROUP}/share": total.total() / num_asked, f"{GROUP}/void": float(is_void)}


def find_failed(
    data_sources: Sequence[str],
    uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
    expected: Mapping[tuple[str, str], int] | None,
) -> Failed:
    """Find which samples of a validation failed, and how many were requested.

    Args:
        data_sources, uids: of each stored sample.
        infos: name -> values, one per stored sample, of `reward_extra_info`.
        expected: (data source, uid) -> samples requested; None if all were stored.
    """
    causes = [infrastructure_failure({name: values[i] for name, values in infos.items()}) for i in range(len(uids))]
    stored = Counter((str(source), str(uid)) for source, uid in zip(data_sources, uids, strict=True))
    expected = expected or {}
    asked = {key: max(stored[key], expected.get(key, 0)) for key in (*stored, *expected)}
    by_source: dict[str, Counter] = {source: Counter() for source, _ in asked}
    for source, cause in zip(data_sources, causes, strict=True):
        by_source[str(source)].update([cause] * (cause is not None))
    for key, number in asked.items():
        by_source[key[0]].update({RolloutEnd.RAISED: number - stored[key]})
    return Failed(causes, asked, by_source)


def judged_figures(
    data_sources: Sequence[str], uids: Sequence[str], infos: Mapping[str, Sequence[Any]], failed: Failed
) -> dict[str, float]:
    """Compute verl's `val-core/*` and `val-aux/*` over the samples that were judged.

    As `process_validation_metrics` (verl/trainer/ppo/metric_utils.py:896) and the names of trainer_base.py:1288, with
    which a test compares it. In `maj` equal answers vote together (reward/votes.py); verl counts each spelling as a
    separate answer. The N of a name stays the number of samples that was requested, even if fewer were judged: verl
    would use the number it has, so that one validation had mean@30 over some problems and mean@29 over others. The
    mean of fewer samples estimates the same; `best`, `worst` and `maj` draw N with replacement either way. A problem
    without any judged sample is in no figure.
    """
    columns = dict(infos)
    if "acc" in columns:
        columns["acc_success_only"] = columns["acc"]  # verl's: without the sessions that raised
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, cause in enumerate(failed.causes):
        if cause is None:
            rows[str(data_sources[i]), str(uids[i])].append(i)
    of_problems: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (source, uid), indices in rows.items():
        preds = _votes(columns, indices)
        for variable, values in columns.items():
            present = [values[i] for i in indices if values[i] is not None]
            if not present or isinstance(present[0], str):
                continue
            votes = preds if len(preds) == len(present) and None not in preds else None
            for name, value in _problem_figures(present, votes, failed.asked[source, uid]).items():
                of_problems[source, variable][name].append(value)
    figures = {}
    for (source, variable), values_of in of_problems.items():
        core = "acc" if (source, "acc") in of_problems else "reward"
        largest = max(int(name.split("@")[1].split("/")[0]) for name in values_of)
        for name, values in values_of.items():
            is_core = variable == core and name.startswith(("mean", "maj", "best")) and f"@{largest}" in name
            figures[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = float(np.mean(values))
    return figures


def _votes(columns: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> list[Any]:
    """Return what each sample votes for, as verl counts: "" if it has no answer, None if it has no `pred`."""
    of_sample = [[columns[name][i] if name in columns else None for name in _OF_VOTE] for i in indices]
    return [None if pred is None else vote(pred, normalised or "", acc) or "" for pred, normalised, acc in of_sample]


def _problem_figures(values: Sequence[float], votes: Sequence[Hashable] | None, n: int) -> dict[str, float]:
    """Compute the figures of one variable and one problem of which `n` samples were requested. The resamples are those
    of verl's `bootstrap_metric`, all at once: its loop takes 5 ms per 1,000, and a validation has thousands of these.
    """
    figures = {f"mean@{n}": float(np.mean(values))}
    if n > 1:
        figures[f"std@{n}"] = float(np.std(values))
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n] + [n] * (n > 1)
    for size in sizes:
        draws = _draws(len(values), size)
        drawn = np.array(values, float)[draws]
        of_draws = {"best": drawn.max(1), "worst": drawn.min(1)}
        if votes is not None:
            of_draws["maj"] = np.take_along_axis(drawn, _majority(tuple(votes), size), 1)
        for name, found in of_draws.items():
            figures |= {f"{name}@{size}/mean": float(np.mean(found)), f"{name}@{size}/std": float(np.std(found))}
    return figures


@lru_cache(maxsize=256)
def _draws(samples: int, size: int) -> np.ndarray:
    """Return int[1000, size], the resamples of verl's `bootstrap_metric` (verl/trainer/ppo/metric_utils.py:840)."""
    return np.random.RandomState(42).choice(samples, size=(1000, size), replace=True)


@lru_cache(maxsize=16)  # all variables of a problem call it
def _majority(votes: tuple[Hashable, ...], size: int) -> np.ndarray:
    """Return int[1000, 1], the place in each resample of the first sample of the majority; a tie also goes to the first
    one, as in `calc_maj_val` (metric_utils.py:860)."""
    number = {vote: i for i, vote in enumerate(dict.fromkeys(votes))}
    ballots = np.array([number[vote] for vote in votes])[_draws(len(votes), size)]
    return (ballots[:, :, None] == ballots[:, None, :]).sum(2).argmax(1)[:, None]
