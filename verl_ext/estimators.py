"""Estimators for repeated samples of problems: pass@k, majority vote, bootstrap over problems, tests of a difference.

Pure functions. They know nothing of files or of verl; `evaluation/figures.py` feeds them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_CELLS = 2_000_000  # resamples x problems held in memory at a time: 16 MB
TOLERANCE = 1e-9  # within it two sums of shares are equal


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval: 2.5th and 97.5th percentile of the bootstrap over problems."""

    value: float
    low: float
    high: float


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


def majority_acc(preds: Sequence[str], accs: Sequence[float]) -> float:
    """Acc of the most frequent prediction; among tied ones the mean, i.e. what a fair draw between them is worth.

    Predictions are compared as text ("0.5" and "1/2" are two). An empty one does not vote; no vote at all is 0.
    """
    votes: dict[str, list[float]] = defaultdict(list)
    for pred, acc in zip(preds, accs, strict=True):
        if pred.strip():
            votes[pred.strip()].append(acc)
    if not votes:
        return 0.0
    most = max(len(voters) for voters in votes.values())
    tied = [sum(voters) / most for voters in votes.values() if len(voters) == most]
    return sum(tied) / len(tied)


def ratio_of_sums(num: np.ndarray, den: np.ndarray) -> np.ndarray:
    """float64[problems, metrics] twice -> float64[metrics]; nan where the denominator is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return num.sum(axis=0) / den.sum(axis=0)


def bootstrap_ratios(num: np.ndarray, den: np.ndarray, *, draws: int, seed: int) -> np.ndarray:
    """`ratio_of_sums` of `draws` resamples of the problems, drawn with replacement.

    The same seed and number of problems give the same resamples, which is what pairs two runs. When every problem has
    the same value, the interval has width 0: a bootstrap cannot see what it did not sample.

    Args:
        num, den: float64[problems, metrics].
    Returns:
        float64[draws, metrics], nan where the denominator is 0.
    """
    rng = np.random.default_rng(seed)
    num_problems, num_metrics = num.shape
    terms = np.concatenate([num, den], axis=1)
    sums = np.empty((draws, 2 * num_metrics))
    rows = max(1, MAX_CELLS // max(1, num_problems))
    for start in range(0, draws, rows):
        size = min(rows, draws - start)
        picks = rng.integers(0, num_problems, (size, num_problems)) if num_problems else np.empty((size, 0), int)
        cells = picks + num_problems * np.arange(size)[:, None]
        times_drawn = np.bincount(cells.ravel(), minlength=size * num_problems).reshape(size, num_problems)
        sums[start : start + size] = times_drawn @ terms
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[:, :num_metrics] / sums[:, num_metrics:]


def interval_95(value: float, resampled: np.ndarray) -> Estimate | None:
    """Percentile interval of float64[draws]; resamples with 0/0 are left out. None when the value itself is 0/0."""
    resampled = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or not resampled.size:
        return None
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def paired_test(differences: np.ndarray, *, draws: int, seed: int) -> PairedTest:
    """Fisher's randomisation test and the sign test of differences that are symmetric about 0 if the models are equal.

    The first flips the signs of the differences at random and asks how often their sum is as far from 0 as it is: all
    2^m ways where m differences are not 0 and 2^m <= draws, else p = (1 + hits) / (1 + draws). It sees the sizes of the
    differences; the sign test asks only how many of the m are above 0, by the binomial distribution.

    Source: Dror et al., The Hitchhiker's Guide to Testing Statistical Significance in NLP (ACL 2018), section 3.
    (0.5, 0.25): 2 of the 4 ways reach |0.75|, p = 0.5; sign test 2/4 = 0.5.

    Args:
        differences: float64[problems].
    """
    moved = differences[np.abs(differences) > TOLERANCE]
    m, better = len(moved), int((moved > 0).sum())
    tail = sum(math.comb(m, i) for i in range(min(better, m - better) + 1)) / 2**m
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
    return PairedTest(better, m - better, len(differences) - m, p_sign_flips, min(1.0, 2 * tail))
