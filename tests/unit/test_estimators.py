import numpy as np
import pytest

from verl_ext.estimators import bootstrap_ratios, interval_95, majority_acc, paired_test, pass_at_k, ratio_of_sums


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


def test_paired_test_without_any_difference_is_certain_of_nothing():
    for none in (np.zeros(3), np.zeros(0)):
        test = paired_test(none, draws=10, seed=0)
        assert (test.p_sign_flips, test.p_sign_test, test.equal) == (1.0, 1.0, len(none))


def test_paired_test_finds_a_false_difference_as_often_as_its_p_says():
    rng = np.random.default_rng(0)
    p_values = [paired_test(rng.choice([-0.5, 0, 0.5], 30), draws=400, seed=i).p_sign_flips for i in range(300)]
    assert np.mean(np.array(p_values) <= 0.1) == pytest.approx(0.1, abs=0.05)
