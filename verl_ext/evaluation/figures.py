"""Accuracy and tool use of samples with 95% intervals over problems, and differences on the same problems.

This module takes the samples that samples.py reads. It scores nothing: `acc` is what the reward manager found.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl_ext.evaluation.estimators import (
    Estimate,
    PairedTest,
    bootstrap_ratios,
    difference_95,
    interval_95,
    majority_acc,
    paired_test,
    pass_at_k,
    ratio_of_sums,
    share_95,
)
from verl_ext.evaluation.samples import Sample
from verl_ext.outcome import EVALUATION_FAILURES


def _majority(samples: Sequence[Sample], k: int) -> float:
    """Return acc of the most frequent answer of k samples: the mean over disjoint blocks of k, in order of their uids.

    The rest after the last whole block is left out. It is unbiased, because a uid says nothing about its sample; the
    order in a file would not be, because short responses end first.
    """
    blocks = [samples[start : start + k] for start in range(0, len(samples) - k + 1, k)]
    columns = [[[getattr(row, name) for row in block] for name in ("pred", "acc", "normalised")] for block in blocks]
    accs = [majority_acc(*each) for each in columns]
    return sum(accs) / len(accs)


def _sum(samples: Sequence[Sample], count: str) -> float:
    return sum(getattr(sample, count) for sample in samples)


# Name -> (numerator, denominator) of the judged samples of one problem; k is at most their number. Each figure is a
# ratio of sums over problems, so that one resampling of problems serves them all.
METRICS: dict[str, Callable[[Sequence[Sample], int], tuple[float, float]]] = {
    "acc/mean@k": lambda rows, k: (_sum(rows, "acc") / len(rows), 1),  # the share of right samples
    "acc/best@k": lambda rows, k: (pass_at_k(len(rows), sum(row.acc == 1 for row in rows), k), 1),  # one of k is right
    "acc/maj@k": lambda rows, k: (_majority(rows, k), 1),
    "tool/code_ratio": lambda rows, k: (sum(row.tool_calls > 0 for row in rows), len(rows)),  # samples that ran code
    "tool/error_rate": lambda rows, k: (_sum(rows, "tool_errors"), _sum(rows, "tool_calls")),
    "tool/timeout_rate": lambda rows, k: (_sum(rows, "tool_timeouts"), _sum(rows, "tool_calls")),
    "turns": lambda rows, k: (_sum(rows, "model_turns"), len(rows)),  # stretches written by the model
    "model_tokens": lambda rows, k: (_sum(rows, "response_tokens"), len(rows)),  # tool output not counted
    "truncation_rate": lambda rows, k: (_sum(rows, "is_truncated"), len(rows)),  # samples cut by the response budget
}
Problem = tuple[str, str, str, str]  # `Sample.problem_key`: the first is the data source, the third the id
UNBOUNDED = ("turns", "model_tokens")  # the others are shares, from 0 to 1
POOLED = ("in_distribution", "out_of_distribution", "overall")


@dataclass(frozen=True)
class Evaluation:
    """Figures of one group of problems (one data source, or several pooled)."""

    data_sources: list[str]
    num_problems: int
    num_units: int  # of the intervals: problems with a judged sample; those that share an `id` are one
    num_problems_scored: int  # with at least one judged sample; the figures are over these
    num_problems_short: int  # of those, with fewer than k judged samples: best@k and maj@k use the samples there are
    num_samples: int
    excluded: dict[str, int]  # samples with an infrastructure failure, in none of the figures
    n: int  # samples that most problems have
    k: int  # of best@k and maj@k
    finish_reasons: dict[str, int]  # of all samples
    metrics: dict[str, Estimate | None]  # None: 0/0, e.g. the error rate of no calls


@dataclass(frozen=True)
class Difference:
    """After minus before, on the problems of which both have a judged sample.

    `test` is a test of the problems' differences in mean acc.
    """

    data_sources: list[str]
    num_problems: int
    num_units: int  # of intervals and tests, as in `Evaluation`
    num_unmatched: int  # problems of either side that the other has no judged sample of
    k: int
    metrics: dict[str, Estimate | None]
    test: PairedTest


def evaluate(
    samples: Sequence[Sample], *, k: int | None = None, draws: int = 10_000, seed: int = 0
) -> dict[str, Evaluation]:
    """Return figures of every data source, and of several pooled: `in_distribution`, `out_of_distribution`, `overall`.

    `Sample.problem_key` identifies a problem. Samples with an infrastructure failure (`Sample.failure`) are counted and
    left out. Problems with the same `Sample.id` come from one template and are not independent: the template is then
    the unit of intervals and tests.

    Args:
        k: samples for best@k and maj@k; by default all n of a problem. mean@k always averages all n.
        draws: bootstrap resamples of the problems.
    Raises:
        ValueError: there are no samples, or k is outside [1, n].
    """
    if not samples:
        raise ValueError("No samples to evaluate. Check that the file of records is not empty.")
    problems = _by_problem(samples)
    n, k = _counts([problems], k)
    figures = {}
    for name, sources in _pools(source for source, *_ in problems).items():
        members = {key: rows for key, rows in problems.items() if key[0] in sources}
        rows = [row for group in members.values() for row in group]
        judged = _judged(members)
        terms = _terms([judged], k)[0]
        figures[name] = Evaluation(
            data_sources=sources,
            num_problems=len(members),
            num_units=len(terms[0]),
            num_problems_scored=len(judged),
            num_problems_short=sum(len(group) < k for group in judged.values()),
            num_samples=len(rows),
            excluded={kind: sum(row.failure == kind for row in rows) for kind in EVALUATION_FAILURES},
            n=n,
            k=k,
            finish_reasons=dict(sorted(Counter(row.end_reason for row in rows).items())),
            metrics=_with_intervals(bootstrap_ratios(*terms, draws=draws, seed=seed), terms),
        )
    return figures


def compare(
    before: Sequence[Sample], after: Sequence[Sample], *, k: int | None = None, draws: int = 10_000, seed: int = 0
) -> dict[str, Difference]:
    """Return figures of `after` minus those of `before`, paired by problem: both sides share one resampling.

    The problems are those of `paired`. Args as for `evaluate`; k defaults to the smaller n of the two on them. Groups
    without a common problem are left out.
    """
    sides, common = _pairs(before, after)
    if not common:
        return {}
    _, k = _counts([{key: side[key] for key in common} for side in sides], k)
    judged = [_judged(side) for side in sides]
    figures = {}
    for name, sources in _pools(source for side in sides for source, *_ in side).items():
        keys = [key for key in common if key[0] in sources]
        if not keys:
            continue
        terms = _terms([{key: side[key] for key in keys} for side in judged], k)
        resampled = [bootstrap_ratios(*pair, draws=draws, seed=seed) for pair in terms]
        figures[name] = Difference(
            data_sources=sources,
            num_problems=len(keys),
            num_units=len(terms[0][0]),
            num_unmatched=len({key for side in sides for key in side if key[0] in sources}) - len(keys),
            k=k,
            metrics=_with_intervals(resampled[1] - resampled[0], *terms),
            test=paired_test(terms[1][0][:, 0] - terms[0][0][:, 0], draws=draws, seed=seed),  # the first: acc/mean@k
        )
    return figures


def paired(before: Sequence[Sample], after: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of both sides of the problems of which both have a judged sample.

    Problems are paired by their names (`Sample.problem_key`). If no name is on both sides, as in imported dumps or
    with the instructions of another protocol in a run's records, the prompt's text replaces it, chat template included.
    """
    sides, common = _pairs(before, after)
    one, other = ([row for key in common for row in side[key]] for side in sides)
    return one, other


def is_ood(data_source: str) -> bool:
    """Return whether a source is out-of-distribution: it has `_ood` in its name (`tiny_tools_ood_large`)."""
    return "_ood" in data_source


def by_k(
    samples: Sequence[Sample], *, draws: int = 10_000, seed: int = 0
) -> dict[str, dict[str, dict[int, Estimate | None]]]:
    """Return group -> {"pass@k" | "maj@k": k -> estimate}, for n and smaller powers of two; args as for `evaluate`."""
    n, _ = _counts([_by_problem(samples)], None)
    curves: dict[str, dict[str, dict[int, Estimate | None]]] = {}
    for k in [*(2**i for i in range(n.bit_length()) if 2**i < n), n]:
        for group, figures in evaluate(samples, k=k, draws=draws, seed=seed).items():
            for name, metric in (("pass@k", "acc/best@k"), ("maj@k", "acc/maj@k")):
                curves.setdefault(group, {}).setdefault(name, {})[k] = figures.metrics[metric]
    return curves


def to_json(figures: Any) -> Any:
    """Return what `evaluate`, `compare` and `by_k` give as plain dictionaries; an undefined figure is None."""
    if isinstance(figures, dict):
        return {name: to_json(figure) for name, figure in figures.items()}
    return None if figures is None else asdict(figures)


def is_shown(group: str, data_sources: Sequence[str]) -> bool:
    """Return whether a group gets a table row: every data source does, a pooled group if it holds more than one."""
    return group not in POOLED or len(data_sources) > 1


def unit_of(figures: Evaluation | Difference) -> str:
    """Describe what intervals and tests are over: "384 problems", or "96 templates of 384 problems"."""
    problems = figures.num_problems_scored if isinstance(figures, Evaluation) else figures.num_problems
    return (
        f"{problems} problems"
        if figures.num_units == problems
        else f"{figures.num_units} templates of {problems} problems"
    )


def _units_of(figures: Iterable[Difference]) -> str:
    """Return what the rows of a table of tests are paired by."""
    names = {"problem" if each.num_units == each.num_problems else "template" for each in figures}
    return " or ".join(sorted(names)) or "problem"


def format_estimate(estimate: Estimate | None, *, sign: bool = False) -> str:
    """Return `0.312 [0.284, 0.341]`, with `sign` `+0.312 [...]`; only the figure if no interval, `-` if undefined."""
    if estimate is None:
        return "-"
    form = "+.3f" if sign else ".3f"
    if estimate.low is None:
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def evaluation_tables(figures: dict[str, Evaluation]) -> list[list[list[str]]]:
    """Return two tables: accuracy with intervals, then tool use."""
    k, n = next((each.k, each.n) for each in figures.values())
    names = [("acc/mean@k", f"mean@{n}")]
    if k > 1:
        names += [("acc/best@k", f"best@{k}"), ("acc/maj@k", f"maj@{k}")]
    accuracy = [["acc, 95% interval", "problems", "samples", "excluded", *(title for _, title in names)]]
    behaviour = [["tool use", "code use", "tool errors", "timeouts", "turns", "model tokens", "truncated"]]
    for name, each in figures.items():
        if not is_shown(name, each.data_sources):
            continue
        counts = [each.num_problems, each.num_samples, sum(each.excluded.values())]
        accuracy.append([name, *map(str, counts), *(format_estimate(each.metrics[key]) for key, _ in names)])
        values = [found and found.value for found in map(each.metrics.get, list(METRICS)[3:])]
        forms = ["{:.1%}", "{:.1%}", "{:.1%}", "{:.2f}", "{:.1f}", "{:.1%}"]
        behaviour.append([name, *("-" if v is None else form.format(v) for form, v in zip(forms, values, strict=True))])
    return [accuracy, behaviour]


def comparison_tables(
    before: dict[str, Evaluation], after: dict[str, Evaluation], difference: dict[str, Difference]
) -> list[list[list[str]]]:
    """Return accuracy and code use before and after with their paired difference, then the tests of that in acc."""
    shown = {name: each for name, each in difference.items() if is_shown(name, each.data_sources)}
    tables = []
    for key, title in (("acc/mean@k", "acc (mean)"), ("tool/code_ratio", "code use")):
        table = [[f"{title}, 95% interval", "problems", "before", "after", "difference"]]
        for name, each in shown.items():
            sides = [format_estimate(side[name].metrics[key]) for side in (before, after)]
            table.append([name, str(each.num_problems), *sides, format_estimate(each.metrics[key], sign=True)])
        tables.append(table)
    columns = ("better", "worse", "equal", "p (sign flips)", "p (sign test)", "of")
    tests = [[f"difference in acc, paired by {_units_of(shown.values())}", *columns]]
    for name, each in shown.items():
        counts = [str(count) for count in (each.test.better, each.test.worse, each.test.equal)]
        tests.append([name, *counts, f"{each.test.p_sign_flips:.3g}", f"{each.test.p_sign_test:.3g}", unit_of(each)])
    return [*tables, tests]


def format_evaluation(figures: dict[str, Evaluation]) -> str:
    """Format `evaluation_tables` for a terminal."""
    return "\n\n".join(map(align, evaluation_tables(figures)))


def format_comparison(
    before: dict[str, Evaluation], after: dict[str, Evaluation], difference: dict[str, Difference]
) -> str:
    """Format `comparison_tables` for a terminal, with the number of problems that are not in them."""
    blocks = list(map(align, comparison_tables(before, after, difference)))
    if unmatched := unmatched_problems(difference):
        blocks.append(f"{unmatched} problems have judged samples on only one side and are not in the difference.")
    return "\n\n".join(blocks)


def unmatched_problems(difference: dict[str, Difference]) -> int:
    """Return the number of problems, over all data sources, of which one side has no judged sample."""
    return sum(each.num_unmatched for name, each in difference.items() if name not in POOLED)


def aligned(table: list[list[str]], widths: list[int], between: str) -> list[str]:
    """Return the lines of a table: the first cell of a row is left-aligned, the others right-aligned."""
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table)
    return [between.join(row) for row in cells]


def align(table: list[list[str]]) -> str:
    """Format rows of cells, the first of them titles, for a terminal."""
    lines = aligned(table, [max(map(len, column)) for column in zip(*table, strict=True)], "  ")
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _by_problem(samples: Iterable[Sample], *, by_prompt: bool = False) -> dict[Problem, list[Sample]]:
    problems = defaultdict(list)
    for sample in samples:
        problems[sample.problem_key(by_prompt=by_prompt)].append(sample)
    return {key: sorted(rows, key=lambda row: row.uid) for key, rows in problems.items()}


def _judged(problems: dict[Problem, list[Sample]]) -> dict[Problem, list[Sample]]:
    """Return the judged samples of each problem that has one."""
    kept = {key: [row for row in rows if not row.failure] for key, rows in problems.items()}
    return {key: rows for key, rows in kept.items() if rows}


def _pairs(
    before: Sequence[Sample], after: Sequence[Sample]
) -> tuple[list[dict[Problem, list[Sample]]], list[Problem]]:
    """Return (the samples of each side by problem, the problems of which both have a judged sample); see `paired`."""
    sides = [_by_problem(side) for side in (before, after)]
    if not sides[0].keys() & sides[1].keys():
        sides = [_by_problem([row for row in side if row.prompt], by_prompt=True) for side in (before, after)]
    judged = [_judged(side) for side in sides]
    return sides, [key for key in judged[0] if key in judged[1]]


def _counts(sides: list[dict[Problem, list[Sample]]], k: int | None) -> tuple[int, int]:
    """Return (n, k): n is how many samples most problems have, on the side with fewer; k is n unless given."""
    sizes = [Counter(map(len, problems.values())) for problems in sides if problems]
    n = min((max(each, key=lambda size: (each[size], size)) for each in sizes), default=1)
    if k is not None and not 1 <= k <= n:
        raise ValueError(f"k is {k}, but best@k and maj@k need 1 <= k <= {n}, the samples a problem has.")
    return n, k or n


def _pools(sources: Iterable[str]) -> dict[str, list[str]]:
    """Return group name -> its data sources: each as one group, in-distribution ones first, then the pooled groups."""
    names = sorted(set(sources), key=lambda name: (is_ood(name), name))
    inside, outside = [name for name in names if not is_ood(name)], [name for name in names if is_ood(name)]
    pooled = dict(zip(POOLED, (inside, outside, names), strict=True))
    return {name: [name] for name in names} | {name: members for name, members in pooled.items() if members}


def _terms(sides: list[dict[Problem, list[Sample]]], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return numerators and denominators of each side, float64[units, metrics]; the sides have the same problems.

    A unit is a problem, or all problems of one data source that share an `id`.
    """
    units: dict[tuple[str, ...], int] = {}
    rows = [units.setdefault((key[0], key[2]) if key[2] else key, len(units)) for key in sides[0]]
    terms = []
    for side in sides:
        sums = np.zeros((2, len(units), len(METRICS)))
        for unit, key in zip(rows, sides[0], strict=True):
            pairs = [term(side[key], min(k, len(side[key]))) for term in METRICS.values()]
            sums[:, unit] += np.array(pairs, dtype=float).T
        terms.append((sums[0], sums[1]))
    return terms


def _with_intervals(resampled: np.ndarray, *sides: tuple[np.ndarray, np.ndarray]) -> dict[str, Estimate | None]:
    """Return each of METRICS with its interval: of one side, or of the second side minus the first."""
    first, *second = (ratio_of_sums(*side) for side in sides)
    values = second[0] - first if second else first
    figures = {}
    for i, name in enumerate(METRICS):
        one, *two = ((num[:, i], den[:, i]) for num, den in sides)
        if name in UNBOUNDED:
            figures[name] = interval_95(values[i], resampled[:, i])
        else:
            figures[name] = difference_95(one, two[0], resampled[:, i]) if two else share_95(*one, resampled[:, i])
    return figures
