"""Estimators for repeated samples of problems: pass@k, majority vote, intervals over problems, tests of a difference;
and intervals over seeds.

They are pure functions and know nothing about files or verl; `evaluation/figures.py` calls them.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import stdev

import numpy as np
from scipy.special import stdtrit
from scipy.stats import beta, binomtest

from verl_ext.reward.votes import vote

MAX_CELLS = 2_000_000  # resamples x problems held in memory at a time: 16 MB
TOLERANCE = 1e-9  # two sums of shares that differ by less are equal
# With fewer problems off an end (or moved, for a difference) than this, an exact interval is given. A resample of n
# misses all m such problems with a chance of (1 - m/n)^n, about e^-m: 0.050 for three, so that the bootstrap's 2.5th
# percentile is the end itself, and 0.018 for four.
FEW_PROBLEMS = 4


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval over problems: see `share_95`, `difference_95` and `interval_95`.

    `low` and `high` are None if no interval can be stated: all problems agree on a figure without an upper bound.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedTest:
    """Is a difference between two models on the same problems more than chance? Two-sided p-values."""

    better: int  # problems with a difference > 0
    worse: int
    equal: int
    p_sign_flips: float
    p_sign_test: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. (arXiv:2107.03374), Eq. 1, n = num_samples, c = num_right. (4, 1, 2): 1 - 3/6 = 0.5.

    Raises:
        ValueError: not 0 <= num_right <= num_samples, or not 1 <= k <= num_samples.
    """
    if not (0 <= num_right <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={num_samples}, c={num_right}, k={k}.")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_acc(preds: Sequence[str], accs: Sequence[float], normalised: Sequence[str] | None = None) -> float:
    """Return acc of the most frequent answer; among ties the mean, i.e. what a fair draw between them is worth.

    Equal answers vote together (reward/votes.py): 0.5 and 1/2 are one. An empty one does not vote; no vote at all is 0.
    """
    votes: dict[Hashable, list[float]] = defaultdict(list)
    for pred, normal, acc in zip(preds, normalised or [""] * len(preds), accs, strict=True):
        if (answer := vote(pred, normal, acc)) is not None:
            votes[answer].append(acc)
    if not votes:
        return 0.0
    most = max(len(voters) for voters in votes.values())
    tied = [sum(voters) / most for voters in votes.values() if len(voters) == most]
    return sum(tied) / len(tied)


def ratio_of_sums(num: np.ndarray, den: np.ndarray) -> np.ndarray:
    """Return float64[metrics] from float64[problems, metrics] twice; nan where the denominator is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return num.sum(axis=0) / den.sum(axis=0)


def bootstrap_ratios(num: np.ndarray, den: np.ndarray, *, draws: int, seed: int) -> np.ndarray:
    """Return `ratio_of_sums` of `draws` resamples of the problems, drawn with replacement.

    The same seed and number of problems give the same resamples, which is what pairs two runs. A bootstrap cannot see
    what it did not sample: when every problem has the same value, so has every resample.

    Args:
        num, den: float64[problems, metrics].
    Returns:
        float64[draws, metrics], nan where the denominator is 0.
    """
    rng, (num_problems, num_metrics) = np.random.default_rng(seed), num.shape
    terms = np.concatenate([num, den], axis=1)
    sums = np.empty((draws, 2 * num_metrics))
    rows = max(1, MAX_CELLS // max(1, num_problems))
    for start in range(0, draws, rows):
        size = min(rows, draws - start)
        picks = rng.integers(0, num_problems, (size, num_problems))
        cells = picks + num_problems * np.arange(size)[:, None]
        times_drawn = np.bincount(cells.ravel(), minlength=size * num_problems).reshape(size, num_problems)
        sums[start : start + size] = times_drawn @ terms
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[:, :num_metrics] / sums[:, num_metrics:]


def share_95(num: np.ndarray, den: np.ndarray, resampled: np.ndarray) -> Estimate | None:
    """Return a share of sums with its interval: the bootstrap's, or an exact one if the bootstrap is degenerate.

    It is degenerate if all problems have the same share, or fewer than FEW_PROBLEMS have one that is not 0, or not 1.
    Then the bootstrap's interval is too narrow, or has no width at all: 0 of 64 gives [0, 0].

    Args:
        num, den: float64[problems] with 0 <= num <= den; a problem with den 0 says nothing.
        resampled: float64[draws], this figure of `bootstrap_ratios`.
    Returns:
        None for 0/0.
    """
    known = den > 0
    if not known.any():
        return None
    shares = num[known] / den[known]
    off_an_end = min((shares > TOLERANCE).sum(), (shares < 1 - TOLERANCE).sum())
    if off_an_end >= FEW_PROBLEMS and np.ptp(shares) > TOLERANCE:
        return interval_95(float(num.sum() / den.sum()), resampled)
    return Estimate(*exact_share(shares, den[known]))


def exact_share(shares: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Return the weighted mean of problems' shares and its Clopper-Pearson interval's ends; the problem is the unit.

    Samples of one problem are not independent, so n is the number of problems and x the sum of their shares: 0 of 64
    problems is [0, 1 - 0.025^(1/64)] = [0, 0.0560], however many samples each has. A share between 0 and 1 counts as
    that part of a problem, which is conservative: no variable in [0, 1] varies more than a yes or no of the same mean.
    With unequal weights (a rate of calls, if problems differ in calls) n is Kish's (sum w)^2 / (sum w^2).

    Source: Clopper & Pearson (Biometrika 26, 1934), by the beta distribution; n and x that are not integers are as in
    Korn & Graubard (Survey Methodology 24, 1998), whose n is also an effective number.

    Args:
        shares: float64[problems] in [0, 1].
        weights: float64[problems] > 0.
    """
    value = float(np.average(shares, weights=weights))
    n = float(weights.sum() ** 2 / (weights**2).sum())
    x = min(value, 1.0) * n
    at_0, at_1 = (shares <= TOLERANCE).all(), (shares >= 1 - TOLERANCE).all()
    low = 0.0 if at_0 else float(beta.ppf(0.025, x, n - x + 1))
    high = 1.0 if at_1 else float(beta.ppf(0.975, x + 1, n - x))
    return value, low, high


def difference_95(
    before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray], resampled: np.ndarray
) -> Estimate | None:
    """Return share after minus share before on the same problems: the bootstrap's, or exact if that is degenerate.

    It is degenerate if all problems moved by the same amount, or fewer than FEW_PROBLEMS moved at all. Then gains and
    losses are two shares of the problems, each with an interval by `exact_share`, and the difference lies between
    least gain minus most loss and most gain minus least loss. 0 of 64 before and after is [-0.0560, 0.0560]: the share
    of problems that move is at most 0.0560. It is conservative: each end errs only if two bounds err the same way.

    Args:
        before, after: (num, den), each float64[problems], the same problems in the same order.
        resampled: float64[draws], resampled share after minus share before.
    Returns:
        None if either share is 0/0. `low` and `high` are None if nothing can be said: no problem has both shares.
    """
    if not (before[1].any() and after[1].any()):
        return None
    value = float(after[0].sum() / after[1].sum() - before[0].sum() / before[1].sum())
    known = (before[1] > 0) & (after[1] > 0)
    if not known.any():
        return Estimate(value, None, None)
    moved = after[0][known] / after[1][known] - before[0][known] / before[1][known]
    if (np.abs(moved) > TOLERANCE).sum() >= FEW_PROBLEMS and np.ptp(moved) > TOLERANCE:
        return interval_95(value, resampled)
    weights = before[1][known] / before[1].sum() + after[1][known] / after[1].sum()
    _, least_gain, most_gain = exact_share(np.maximum(moved, 0.0), weights)
    _, least_loss, most_loss = exact_share(np.maximum(-moved, 0.0), weights)
    # The value is in its interval even if weights differ between the sides.
    return Estimate(value, min(value, least_gain - most_loss), max(value, most_gain - least_loss))


def interval_95(value: float, resampled: np.ndarray) -> Estimate | None:
    """Return the percentile interval of float64[draws] without resamples with 0/0; None if the value itself is 0/0.

    If all resamples are the same, there is no interval: nothing bounds what other problems would show.
    """
    resampled = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or not resampled.size:
        return None
    if np.ptp(resampled) <= TOLERANCE * max(1.0, abs(value)):
        return Estimate(float(value), None, None)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def half_width(values: Sequence[float]) -> float | None:
    """Return the half width of the 95% interval of a mean over seeds, by Student's t; None for fewer than two values.

    For .5, .7, .9: standard deviation .2, t with two degrees of freedom 4.303, so 4.303 x .2 / sqrt 3 = .497.
    """
    if len(values) < 2:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / len(values) ** 0.5


def paired_test(differences: np.ndarray, *, draws: int, seed: int) -> PairedTest:
    """Apply Fisher's randomisation test and the sign test: differences are symmetric about 0 if the models are equal.

    The first flips the signs of the differences at random and asks how often their sum is as far from 0 as it is: all
    2^m ways if m differences are not 0 and 2^m <= draws, else p = (1 + hits) / (1 + draws). It sees the sizes of the
    differences; the sign test asks only how many of the m are above 0, by the binomial distribution.

    Source: Dror et al., The Hitchhiker's Guide to Testing Statistical Significance in NLP (ACL 2018), section 3.
    (0.5, 0.25): 2 of the 4 ways reach |0.75|, p = 0.5; sign test 2/4 = 0.5.

    Args:
        differences: float64[problems].
    """
    moved = differences[np.abs(differences) > TOLERANCE]
    m, better = len(moved), int((moved > 0).sum())
    p_sign_test = float(binomtest(better, m).pvalue) if m else 1.0
    observed = abs(moved.sum()) - TOLERANCE
    if 2**m <= draws:
        signs = 1 - 2 * (np.arange(2**m)[:, None] >> np.arange(m) & 1)
        p_sign_flips = float((np.abs(signs @ moved) >= observed).mean())
    else:
        rng, hits, rows = np.random.default_rng(seed), 0, max(1, MAX_CELLS // m)
        for start in range(0, draws, rows):
            signs = 1 - 2 * rng.integers(0, 2, (min(rows, draws - start), m))
            hits += int((np.abs(signs @ moved) >= observed).sum())
        p_sign_flips = (1 + hits) / (1 + draws)
    return PairedTest(better, m - better, len(differences) - m, p_sign_flips, p_sign_test)
