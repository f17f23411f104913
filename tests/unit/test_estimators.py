import numpy as np
import pytest

from verl_ext.estimators import bootstrap_ratios, interval_95, majority_acc, pass_at_k, ratio_of_sums


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 2, 1, 1 / 2),  # pass@1 is the mean
        (4, 1, 4, 1.0),  # all four drawn
        (4, 3, 2, 1.0),  # one wrong: no two draws are both wrong
        (4, 0, 4, 0.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, 1, 3), (2, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("preds", "accs", "expected", "why"),
    [
        (["7", "7", "5"], [1, 1, 0], 1.0, "two against one"),
        (["7", "5", "5"], [1, 0, 0], 0.0, "the majority is wrong"),
        (["7", "5"], [1, 0], 0.5, "a tie is worth what a fair draw is"),
        (["7", "7", "5", "5", "3"], [1, 1, 0, 0, 0], 0.5, "only the tied ones take part in the draw"),
        (["7", "5", "3"], [1, 0, 0], 1 / 3, "three tied"),
        (["", "", "7"], [0, 0, 1], 1.0, "no answer does not vote"),
        (["", ""], [0, 0], 0.0, "nobody votes"),
        ([" 7", "7 ", "5"], [1, 1, 0], 1.0, "white space does not split a vote"),
    ],
)
def test_majority_by_hand(preds, accs, expected, why):
    assert majority_acc(preds, accs) == pytest.approx(expected), why
    assert majority_acc(preds[::-1], accs[::-1]) == pytest.approx(expected), "the order of the samples must not matter"


def test_bootstrap_draws_problems_not_samples():
    # Problem a: 2 of 2 calls failed; b: 0 of 1. Resamples: aa 4/4, ab 2/3 (twice as likely), bb 0/2.
    num, den = np.array([[2.0], [0.0]]), np.array([[2.0], [1.0]])
    assert ratio_of_sums(num, den) == pytest.approx([2 / 3])
    values, counts = np.unique(bootstrap_ratios(num, den, draws=40_000, seed=0).round(6), return_counts=True)
    assert values == pytest.approx([0, 2 / 3, 1], abs=1e-5)
    assert counts / 40_000 == pytest.approx([1 / 4, 1 / 2, 1 / 4], abs=0.01)


def test_interval_agrees_with_the_normal_one():
    # 400 problems, half right: 0.5 +- 1.96 * sqrt(0.25 / 400) = 0.5 +- 0.049
    num = np.repeat([[0.0], [1.0]], 200, axis=0)
    estimate = interval_95(0.5, bootstrap_ratios(num, np.ones_like(num), draws=20_000, seed=1)[:, 0])
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.451, 0.549), abs=0.003)


def test_bootstrap_repeats_with_its_seed_and_differs_with_another():
    num = np.arange(5.0)[:, None]
    same, again, other = (bootstrap_ratios(num, np.ones_like(num), draws=50, seed=seed) for seed in (3, 3, 4))
    assert (same == again).all()
    assert (same != other).any()


def test_many_problems_are_drawn_in_parts_of_bounded_memory(monkeypatch):
    monkeypatch.setattr("verl_ext.estimators.MAX_CELLS", 8)  # 4 problems: two resamples at a time, the last alone
    num = np.array([[1.0], [1.0], [1.0], [1.0]])
    assert bootstrap_ratios(num, np.ones_like(num), draws=5, seed=0).tolist() == [[1.0]] * 5


def test_no_calls_at_all_have_no_error_rate():
    zeros = np.zeros((3, 1))
    value = ratio_of_sums(zeros, zeros)[0]
    assert interval_95(value, bootstrap_ratios(zeros, zeros, draws=10, seed=0)[:, 0]) is None
