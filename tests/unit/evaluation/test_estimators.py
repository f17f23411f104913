import math

import numpy as np
import pytest

from verl_ext.evaluation.estimators import (
    FEW_PROBLEMS,
    TOLERANCE,
    bootstrap_ratios,
    difference_95,
    exact_share,
    half_width,
    interval_95,
    majority_acc,
    paired_test,
    pass_at_k,
    ratio_of_sums,
    share_95,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (4, 2, 1, 1 / 2),  # pass@1 is the mean
        (4, 1, 4, 1.0),  # all four drawn
        (4, 3, 2, 1.0),  # one wrong: no two draws are both wrong
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),  # all right: C(0,1) = 0
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, -1, 1), (2, 1, 3), (2, 1, 0)])
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
        (["0.5", "1/2", "7"], [1, 1, 0], 1.0, "equal numbers are one answer"),
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
    monkeypatch.setattr(
        "verl_ext.evaluation.estimators.MAX_CELLS", 8
    )  # 4 problems: two resamples at a time, the last by itself
    num = np.array([[1.0], [1.0], [1.0], [1.0]])
    assert bootstrap_ratios(num, np.ones_like(num), draws=5, seed=0).tolist() == [[1.0]] * 5


def test_no_calls_at_all_have_no_error_rate():
    zeros = np.zeros((3, 1))
    value = ratio_of_sums(zeros, zeros)[0]
    assert interval_95(value, bootstrap_ratios(zeros, zeros, draws=10, seed=0)[:, 0]) is None


def right(number, problems, each=1.0):
    """Shares of problems, of which the first `number` are `each` and the others 0."""
    return np.array([each] * number + [0.0] * (problems - number))


def share(shares):
    """As in an evaluation: the bootstrap's interval if there is one."""
    den = np.ones_like(shares)
    return share_95(shares, den, bootstrap_ratios(shares[:, None], den[:, None], draws=2000, seed=0)[:, 0])


def difference(before, after):
    den = np.ones((len(before), 1))
    resampled = [bootstrap_ratios(side[:, None], den, draws=2000, seed=0)[:, 0] for side in (before, after)]
    return difference_95((before, den[:, 0]), (after, den[:, 0]), resampled[1] - resampled[0])


@pytest.mark.parametrize(
    ("number", "problems", "low", "high"),
    [
        (0, 64, 0.0, 0.0560),  # 1 - 0.025^(1/64) = 1 - exp(-3.6889/64)
        (64, 64, 0.9440, 1.0),  # 0.025^(1/64)
        (0, 1, 0.0, 0.975),
        (0, 30, 0.0, 0.1157),  # 1 - exp(-0.12296): AIME
        (1, 64, 0.0004, 0.0840),  # low: 1 - (1-low)^64 = 0.025, low = 1 - 0.975^(1/64)
        (2, 2, 0.1581, 1.0),  # sqrt(0.025)
    ],
)
def test_share_at_an_end_has_the_exact_interval(number, problems, low, high):
    estimate = share(right(number, problems))
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)
    assert estimate.value == pytest.approx(number / problems)


def test_exact_interval_solves_the_binomial_tails():
    # Clopper-Pearson: at `low` 3 or more of 20 have a chance of 2.5%, at `high` 3 or fewer have.
    _, low, high = exact_share(right(3, 20), np.ones(20))

    def at_most(x, p):
        return sum(math.comb(20, i) * p**i * (1 - p) ** (20 - i) for i in range(x + 1))

    assert 1 - at_most(2, low) == pytest.approx(0.025)
    assert at_most(3, high) == pytest.approx(0.025)


def test_interval_is_over_problems_not_samples():
    # 64 problems with 32 samples each, all wrong: the same as with one sample each.
    zeros, den = np.zeros(64), np.full(64, 32.0)
    resampled = bootstrap_ratios(zeros[:, None], den[:, None], draws=10, seed=0)[:, 0]
    assert share_95(zeros, den, resampled).high == pytest.approx(0.0560, abs=5e-5)


def test_unequal_weights_count_as_fewer_problems():
    # Calls 1, 1, 2: (1+1+2)^2 / (1+1+4) = 16/6 problems. None failed: 1 - 0.025^(6/16) = 0.7493
    ends = exact_share(np.zeros(3), np.array([1.0, 1.0, 2.0]))[1:]
    assert ends == pytest.approx((0.0, 0.7493), abs=5e-5)
    # A problem without calls says nothing of their errors.
    num, den = np.zeros(3), np.array([1.0, 0.0, 1.0])
    resampled = bootstrap_ratios(num[:, None], den[:, None], draws=10, seed=0)[:, 0]
    assert share_95(num, den, resampled).high == pytest.approx(1 - 0.025**0.5)


def test_parts_of_a_problem_count_as_parts():
    estimate = share(right(2, 64, each=0.5))  # x = 2 * 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.0004, 0.0840), abs=5e-5)
    same = share(np.full(20, 0.5))  # no width by the bootstrap
    assert (same.low, same.high) == pytest.approx((0.2720, 0.7280), abs=5e-5)  # Clopper-Pearson for 10 of 20


@pytest.mark.parametrize("number", [FEW_PROBLEMS, 64 - FEW_PROBLEMS])
def test_bootstrap_is_kept_where_enough_problems_are_off_both_ends(number):
    shares = right(number, 64)
    resampled = bootstrap_ratios(shares[:, None], np.ones((64, 1)), draws=2000, seed=0)[:, 0]
    assert share(shares) == interval_95(number / 64, resampled)


@pytest.mark.parametrize(
    ("before", "after", "value", "low", "high"),
    [
        (0, 0, 0, -0.0560, 0.0560),  # nothing moved: at most 0.0560 of the problems do, either way
        (64, 64, 0, -0.0560, 0.0560),
        (0, 64, 1, 0.8880, 1.0),  # gain [0.9440, 1], loss [0, 0.0560]: 0.9440 - 0.0560
        (64, 0, -1, -1.0, -0.8880),
        (0, 1, 1 / 64, -0.0556, 0.0840),  # gain [0.0004, 0.0840], loss [0, 0.0560]
    ],
)
def test_difference_without_a_bootstrap_interval_by_hand(before, after, value, low, high):
    estimate = difference(right(before, 64), right(after, 64))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((value, low, high), abs=6e-5)


def test_a_difference_of_rates_is_of_shares_not_of_counts():
    one_of_two, two_of_four = (np.full(64, 1.0), np.full(64, 2.0)), (np.full(64, 2.0), np.full(64, 4.0))
    estimate = difference_95(one_of_two, two_of_four, np.zeros(2))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0, -0.0560, 0.0560), abs=6e-5)


def test_three_problems_that_moved_show_nothing():
    # A resample misses all three with a chance of (61/64)^64 = 0.046: the bootstrap's interval began at 0.
    estimate = difference(right(0, 64), right(3, 64))
    assert estimate.low < 0 < estimate.high
    assert difference(right(0, 64), right(FEW_PROBLEMS, 64)).low > 0  # (60/64)^64 = 0.016


def test_exact_difference_holds_the_truth_often_enough():
    """All outcomes of 24 problems, of which each gains, loses or stays with these chances."""
    n = 24
    intervals = {
        (gains, losses): difference_95((right(losses, n), np.ones(n)), (right(gains, n)[::-1], np.ones(n)), np.zeros(2))
        for gains in range(FEW_PROBLEMS)
        for losses in range(FEW_PROBLEMS - gains)
    }
    for p_gain, p_loss in [(0.0, 0.0), (0.01, 0.0), (0.04, 0.0), (0.02, 0.02), (0.08, 0.02), (0.1, 0.1)]:
        seen = missed = 0.0
        for (gains, losses), interval in intervals.items():
            stay = n - gains - losses
            ways = math.comb(n, gains) * math.comb(n - gains, losses)
            chance = ways * p_gain**gains * p_loss**losses * (1 - p_gain - p_loss) ** stay
            seen += chance
            missed += chance * (not interval.low <= p_gain - p_loss <= interval.high)
        assert missed <= 0.05 * seen, (p_gain, p_loss)


def test_difference_of_what_no_problem_has_on_both_sides_has_no_interval():
    ones = np.array([1.0, 0.0]), np.array([1.0, 0.0])
    other = np.array([0.0, 0.0]), np.array([0.0, 1.0])
    assert difference_95(ones, other, np.full(2, -1.0)) == (estimate := difference_95(ones, other, np.zeros(2)))
    assert (estimate.value, estimate.low, estimate.high) == (-1.0, None, None)
    assert difference_95((np.zeros(2), np.zeros(2)), other, np.zeros(2)) is None


def test_a_figure_without_upper_bound_has_no_interval_where_all_problems_agree():
    estimate = interval_95(2.0, np.full(100, 2.0))
    assert (estimate.value, estimate.low, estimate.high) == (2.0, None, None)
    assert interval_95(0.1, np.array([0.1, 0.1 + TOLERANCE / 2])).low is None  # they differ by rounding


def test_interval_over_seeds_by_hand():
    """Sample standard deviation .2, t of two degrees of freedom 4.303: 4.303 x .2 / sqrt 3 = .4969."""
    assert half_width([0.5, 0.7, 0.9]) == pytest.approx(0.4969, abs=1e-4)
    assert half_width([0.5]) is half_width([]) is None


def test_paired_test_by_hand():
    # Sums of (+-.5, +-.25, +-.25): 1, .5, .5, 0 and their negatives. |sum| of (.5, .25, -.25) is .5: 6 of 8 reach it.
    # Sign test: 2 of 3 are above 0; at most 1 below: (1 + 3) / 8, twice that is 1.
    test = paired_test(np.array([0.5, 0.25, -0.25, 0.0]), draws=100, seed=0)
    assert (test.better, test.worse, test.equal) == (2, 1, 1)
    assert (test.p_sign_flips, test.p_sign_test) == (6 / 8, 1.0)

    # Five of five above 0: only all + and all - reach the sum, 2/32; sign test 2 * 1/32.
    test = paired_test(np.full(5, 0.2), draws=100, seed=0)
    assert (test.p_sign_flips, test.p_sign_test) == (2 / 32, 2 / 32)
    flipped = paired_test(-np.full(5, 0.2), draws=100, seed=0)
    assert (flipped.worse, flipped.p_sign_flips, flipped.p_sign_test) == (5, 2 / 32, 2 / 32)


def test_paired_test_of_many_problems_draws_signs():
    rng = np.random.default_rng(3)
    exact = paired_test(some := rng.normal(0.2, 0.5, 12), draws=5000, seed=0).p_sign_flips  # 2^12 ways
    drawn = paired_test(some, draws=4000, seed=0).p_sign_flips
    assert drawn == pytest.approx(exact, abs=0.03) and drawn != exact
    assert paired_test(np.full(40, 0.5), draws=999, seed=0).p_sign_flips == 1 / 1000  # never 0


def test_signs_that_are_drawn_in_parts_are_as_many_as_asked_for(monkeypatch):
    monkeypatch.setattr("verl_ext.evaluation.estimators.MAX_CELLS", 40 * 7)
    assert paired_test(np.tile([0.5, -0.5], 20), draws=100, seed=0).p_sign_flips == 1.0  # a sum of 0: all reach it


def test_paired_test_without_any_difference_is_certain_of_nothing():
    for none in (np.zeros(3), np.zeros(0)):
        test = paired_test(none, draws=10, seed=0)
        assert (test.p_sign_flips, test.p_sign_test, test.equal) == (1.0, 1.0, len(none))


def test_paired_test_finds_a_false_difference_as_often_as_its_p_says():
    rng = np.random.default_rng(0)
    p_values = [paired_test(rng.choice([-0.5, 0, 0.5], 30), draws=400, seed=i).p_sign_flips for i in range(300)]
    assert np.mean(np.array(p_values) <= 0.1) == pytest.approx(0.1, abs=0.05)
