import random

import pytest

from tests.unit.evaluation import rows as records
from verl_ext.evaluation.estimators import Estimate
from verl_ext.evaluation.figures import (
    by_k,
    compare,
    comparison_tables,
    evaluate,
    format_comparison,
    format_evaluation,
    paired,
)
from verl_ext.evaluation.samples import read_samples
from verl_ext.outcome import EVALUATION_FAILURES


def row(question, session, acc, **changes):
    """Return a row of records, of which only the prompt names the problem."""
    own = {"calls": 1, "errors": 0, "uid": f"uuid-{question}", "domain": "tiny_tools", "problem": None}
    return records.row(question, session, acc, **own | changes)


@pytest.fixture
def samples(tmp_path):
    """Turn rows into samples."""
    return lambda rows: read_samples(records.write(tmp_path, rows))


TWO_PROBLEMS = [
    row("a", 0, 1, pred="7", model_tokens=10),
    row("a", 1, 0, pred="5", calls=2, errors=1, turns=[{"role": "model"}] * 4, model_tokens=20),
    row("b", 0, 0, pred="3", calls=0, model_tokens=30, end_reason="max_tokens"),
    row("b", 1, 0, pred="3", errors=1, timeouts=1, model_tokens=40),
]


def test_problems_of_one_template_are_one_unit_of_intervals_and_tests(samples):
    """Ten problems of one template that are right or wrong together carry no more information than one."""
    verdicts = {f"template-{t}": t % 3 > 0 for t in range(12)}
    single = samples([row(f"{t}-0", 0, right) for t, right in verdicts.items()])
    shared = samples([row(f"{t}-{i}", 0, right, id=t) for t, right in verdicts.items() for i in range(10)])
    alone = samples([row(f"{t}-{i}", 0, right) for t, right in verdicts.items() for i in range(10)])
    of_single, of_shared, of_alone = (evaluate(each, draws=500)["tiny_tools"] for each in (single, shared, alone))
    assert of_shared.metrics["acc/mean@k"] == of_single.metrics["acc/mean@k"]
    assert of_alone.metrics["acc/mean@k"].low > of_single.metrics["acc/mean@k"].low
    assert of_shared.num_problems == 120
    right = samples([row(f"{t}-{i}", 0, True, id=t) for t in verdicts for i in range(10)])
    test = compare(shared, right, draws=500)["tiny_tools"].test
    assert (test.better, test.worse, test.equal) == (4, 0, 8)
    sides = [evaluate(each, draws=50) for each in (shared, right)]
    of_templates = comparison_tables(*sides, compare(shared, right, draws=50))[-1]
    assert of_templates[0][0] == "difference in acc, paired by template"
    assert of_templates[1][-1] == "12 templates of 120 problems"
    mixed = [samples([row(f"{i}", 0, 1, domain="s", id=f"{i}") for i in range(3)]) + each for each in (shared, right)]
    table = comparison_tables(*(evaluate(each, draws=50) for each in mixed), compare(*mixed, draws=50))[-1]
    assert table[0][0] == "difference in acc, paired by problem or template"
    assert {line[0]: line[-1] for line in table[1:]} == {
        "s": "3 problems",
        "tiny_tools": "12 templates of 120 problems",
        "in_distribution": "15 templates of 123 problems",
        "overall": "15 templates of 123 problems",
    }


def test_figures_of_two_problems_by_hand(samples):
    each = evaluate(samples(TWO_PROBLEMS), draws=100)["tiny_tools"]
    assert (each.num_problems, each.num_samples, each.n, each.k) == (2, 4, 2, 2)
    assert each.finish_reasons == {"answer": 3, "max_tokens": 1}
    assert {name: estimate.value for name, estimate in each.metrics.items()} == pytest.approx(
        {
            "acc/mean@k": 0.25,  # (1/2 + 0/2) / 2
            "acc/best@k": 0.5,  # a has a right one, b none
            "acc/maj@k": 0.25,  # a: "7" and "5" tie, worth 1/2; b: "3" is wrong
            "tool/code_ratio": 0.75,  # 3 of 4 samples
            "tool/error_rate": 0.5,  # 2 of 4 calls
            "tool/timeout_rate": 0.25,  # 1 of 4 calls
            "turns": 2.5,  # (2 + 4 + 2 + 2) / 4
            "model_tokens": 25.0,
            "truncation_rate": 0.25,
        }
    )


def test_k_below_n_takes_the_unbiased_estimates(samples):
    rows = [row("a", i, acc, pred=pred) for i, (acc, pred) in enumerate([(1, "7"), (0, "5"), (0, "5"), (0, "5")])]
    each = evaluate(samples(rows), k=2, draws=10)["tiny_tools"]
    assert each.metrics["acc/mean@k"].value == 0.25  # of all four
    assert each.metrics["acc/best@k"].value == 0.5  # 1 - C(3,2)/C(4,2)
    assert each.metrics["acc/maj@k"].value == 0.25  # blocks "7 5" (tie, 1/2) and "5 5" (0)


def test_the_order_in_which_samples_ended_does_not_matter(samples):
    """Short responses end first: of five that are right and three that are wrong, maj@4 would be (1 + 0) / 2.

    By their numbers right are 0, 1, 2, 4 and 6: three of the first four, and two of the last, a tie: (1 + .5) / 2.
    """
    rows = [row("a", session, i < 5) for i, session in enumerate((0, 2, 4, 6, 1, 3, 5, 7))]
    figures = [by_k(samples(each), draws=10) for each in (rows, sorted(rows, key=lambda each: each["session"]))]
    assert figures[0] == figures[1] and figures[0]["tiny_tools"]["maj@k"][4].value == 0.75


def test_the_majority_is_of_equal_answers_not_of_equal_texts(samples):
    """Three spellings of one half against two of 7."""
    preds = ["0.5", r"\frac12", "1/2", "7", "7"]
    rows = [row("a", i, i < 3, pred=pred) for i, pred in enumerate(preds)]
    assert evaluate(samples(rows), draws=10)["tiny_tools"].metrics["acc/maj@k"].value == 1.0
    wrong = [row("a", i, i >= 3, pred=pred) for i, pred in enumerate(preds)]
    assert evaluate(samples(wrong), draws=10)["tiny_tools"].metrics["acc/maj@k"].value == 0.0
    roots = [r"2\sqrt2", r"\sqrt8", r"\sqrt{8}", "7", "7"]
    rows = [row("a", i, i < 3, pred=pred, normalised=pred) for i, pred in enumerate(roots)]
    assert evaluate(samples(rows), draws=10)["tiny_tools"].metrics["acc/maj@k"].value == 1.0


def test_k_beyond_the_samples_is_refused(samples):
    with pytest.raises(ValueError, match="k is 3, but .* 1 <= k <= 2"):
        evaluate(samples(TWO_PROBLEMS), k=3)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ({"end_reason": "sandbox_failure"}, "sandbox_failure"),
        ({"end_reason": "verifier_unknown"}, "unverified"),
        ({"acc": None}, "unverified"),
        ({"acc": 1.5}, "unverified"),
        ({"end_reason": "raised", "acc": None}, "unverified"),
        ({"end_reason": "aborted"}, "server_failure"),
    ],
)
def test_a_sample_that_infrastructure_failed_is_not_wrong_but_counted_apart(samples, failure, kind):
    rows = [row("a", 0, 1), row("a", 1, 0, errors=1) | failure, row("b", 0, 1), row("b", 1, 1)]
    each = evaluate(samples(rows), draws=10)["tiny_tools"]
    assert each.metrics["acc/mean@k"] == Estimate(1.0, pytest.approx(0.025**0.5), 1.0)  # 2 of 2 problems
    assert each.metrics["tool/error_rate"].value == 0.0
    assert each.excluded == dict.fromkeys(EVALUATION_FAILURES, 0) | {kind: 1}
    assert (each.num_samples, each.num_problems_scored, each.num_problems_short) == (4, 2, 1)


def test_a_problem_without_any_verdict_is_in_no_figure(samples):
    rows = [row("a", 0, 1), row("b", 0, 0, end_reason="sandbox_failure")]
    each = evaluate(samples(rows), draws=10)["tiny_tools"]
    assert (each.num_problems, each.num_problems_scored) == (2, 1)
    assert each.metrics["acc/mean@k"].value == 1.0


def test_nothing_judged_gives_no_figures_and_still_prints(samples):
    figures = evaluate(samples([row("a", 0, 0, end_reason="sandbox_failure")]), draws=10)
    assert set(figures["tiny_tools"].metrics.values()) == {None}
    assert " - " in format_evaluation(figures)


def test_out_of_distribution_sources_are_apart_and_pooled(samples):
    rows = [row("a", 0, 1), row("b", 0, 1, domain="aime")]
    rows += [row("c", 0, 0, domain="tiny_tools_ood_large"), row("d", 0, 0, domain="tiny_tools_ood_chain")]
    figures = evaluate(samples(rows), draws=10)
    assert list(figures) == [
        *("aime", "tiny_tools", "tiny_tools_ood_chain", "tiny_tools_ood_large"),
        *("in_distribution", "out_of_distribution", "overall"),
    ]
    values = {name: each.metrics["acc/mean@k"].value for name, each in figures.items()}
    assert (values["in_distribution"], values["out_of_distribution"], values["overall"]) == (1.0, 0.0, 0.5)


def test_the_same_text_in_two_sources_is_two_problems(samples):
    figures = evaluate(samples([row("a", 0, 1), row("a", 1, 0, domain="aime")]), draws=10)
    assert figures["overall"].num_problems == 2


def test_a_problem_listed_twice_is_one_problem_and_leaves_k_alone(samples):
    rows = [row(name, session, 1) for name in "abc" for session in (0, 1)]
    rows += [row("a", session, 0, uid="uuid-again") for session in (0, 1)]
    each = evaluate(samples(rows), draws=10)["tiny_tools"]
    assert (each.num_problems, each.num_samples, each.n) == (3, 8, 2)
    assert each.metrics["acc/mean@k"].value == pytest.approx((1 / 2 + 1 + 1) / 3)


def test_difference_is_paired_by_problem(samples):
    # Every problem gains one of its two samples, or the first three both: narrow, although either side is not.
    before = samples([row(str(i), s, (i % 2 and i > 2) * (s == 0)) for i in range(20) for s in (0, 1)])
    after_rows = [row(str(i), s, i % 2 or i < 3 or s == 0, uid=f"new-{i}") for i in range(20) for s in (0, 1)]
    random.Random(0).shuffle(after_rows)
    after = samples(after_rows)
    difference = compare(before, after, draws=500)["tiny_tools"]
    gain = difference.metrics["acc/mean@k"]
    assert gain.value == pytest.approx((17 * 0.5 + 3 * 1.0) / 20)
    side = evaluate(after, draws=500)["tiny_tools"].metrics["acc/mean@k"]
    assert 0 < gain.high - gain.low < 0.2 < 2 * (side.high - side.low)


def test_runs_of_other_numbers_of_samples_are_compared_at_the_smaller(samples):
    """1 sample before, 8 after of which one is right: pass@1 of 8 is 1/8, not pass@8 = 1."""
    before = samples([row(name, 0, 0) for name in "ab"])
    after = samples([row(name, i, i == 0) for name in "ab" for i in range(8)])
    for sides, sign in (((before, after), 1), ((after, before), -1)):
        each = compare(*sides, draws=10)["tiny_tools"]
        assert each.k == 1
        assert each.metrics["acc/mean@k"].value == each.metrics["acc/best@k"].value == pytest.approx(sign / 8)
        assert each.metrics["acc/maj@k"].value == pytest.approx(sign / 8)
    with pytest.raises(ValueError, match="k is 8, but .* 1 <= k <= 1"):
        compare(before, after, k=8)


def test_no_share_and_no_difference_is_shown_without_a_width(samples):
    """64 problems with two samples each, all wrong, before and after; no sample ran code."""
    rows = [row(str(i), s, 0, calls=0) for i in range(64) for s in (0, 1)]
    before, after = samples(rows), samples(rows)
    sides = evaluate(before, draws=50), evaluate(after, draws=50)
    metrics = sides[0]["tiny_tools"].metrics
    for name in ("acc/mean@k", "acc/best@k", "acc/maj@k", "tool/code_ratio", "truncation_rate"):
        assert (metrics[name].low, metrics[name].high) == (0.0, pytest.approx(0.0560, abs=5e-5)), name
    assert metrics["tool/error_rate"] is None  # no calls
    assert (metrics["turns"].low, metrics["turns"].high) == (None, None)  # no bound to them
    for curve in by_k(before, draws=50)["tiny_tools"].values():
        assert all(each.high == pytest.approx(0.0560, abs=5e-5) for each in curve.values())
    assert "0.000 [0.000, 0.056]" in format_evaluation(sides[0])
    difference = compare(before, after, draws=50)
    assert "+0.000 [-0.056, +0.056]" in format_comparison(*sides, difference)
    assert "[+0.000, +0.000]" not in format_comparison(*sides, difference)


def test_difference_has_the_sign_of_after_minus_before(samples):
    before, after = samples([row("a", 0, 1, calls=0)]), samples([row("a", 0, 0)])
    metrics = compare(before, after, draws=10)["tiny_tools"].metrics
    assert metrics["acc/mean@k"].value == -1.0
    assert metrics["tool/code_ratio"].value == 1.0
    assert metrics["tool/error_rate"] is None  # no calls before: 0/0


def test_problems_of_one_side_only_are_left_out_and_said(samples):
    before = samples([row("a", 0, 0), row("b", 0, 1), row("c", 0, 1)])
    after = samples([row("a", 0, 1), row("b", 0, 1, end_reason="sandbox_failure")])
    difference = compare(before, after, draws=10)
    assert (difference["tiny_tools"].num_problems, difference["tiny_tools"].num_unmatched) == (1, 2)
    assert difference["tiny_tools"].metrics["acc/mean@k"].value == 1.0
    table = format_comparison(evaluate(before, draws=10), evaluate(after, draws=10), difference)
    assert "2 problems have judged samples on only one side" in table


def test_the_sides_of_a_difference_are_of_the_problems_that_both_have(samples):
    """Before, four problems with one sample each have no partner; the common two have two samples, so that k is 2.
    A sample that failed stays with its problem."""
    before = samples([row(name, i, 0) for name in "ab" for i in (0, 1)] + [row(name, 0, 1) for name in "cdef"])
    after = samples([row("b", 0, 1), row("b", 1, 1, end_reason="sandbox_failure"), row("a", 0, 0), row("a", 1, 1)])
    sides = paired(before, after)
    assert [sorted({row.prompt[5] for row in side}) for side in sides] == [["a", "b"]] * 2
    one, other = (evaluate(side, draws=10)["tiny_tools"] for side in sides)
    difference = compare(before, after, draws=10)["tiny_tools"]
    values = [each.metrics["acc/mean@k"].value for each in (one, other, difference)]
    assert values == [0, 0.75, 0.75] and (one.k, other.k, difference.k) == (2, 2, 2)
    assert other.excluded["sandbox_failure"] == 1 and paired(before, samples([])) == ([], [])


def test_problems_are_paired_by_their_names_where_both_sides_have_them(samples):
    before = samples([row("a", 0, 0, problem="a"), row("b", 0, 1, problem="b")])
    after = samples([row("a", 0, 1, prompt="<another template>a", problem="a")])
    assert compare(before, after, draws=10)["tiny_tools"].metrics["acc/mean@k"].value == 1.0
    unnamed = samples([row("a", 0, 1)])
    assert compare(before, unnamed, draws=10)["tiny_tools"].num_problems == 1
    assert compare(after, unnamed, draws=10) == {}
    others = samples([row("a", 0, 1, problem="0f3a")])  # imported ones, or with another protocol's instructions
    assert compare(before, others, draws=10)["tiny_tools"].num_problems == 1
    # As the viewer reads them.
    without_text = [samples([row("a", 0, 1, prompt=None, problem=name)]) for name in "ab"]
    assert compare(*without_text, draws=10) == {}


@pytest.mark.parametrize(
    "changes", [{"ground_truth": "8"}, {"id": "x"}, {"problem": "y"}, {"prompt": "system\nBe brief.\nuser\na"}]
)
@pytest.mark.parametrize("named", [{}, {"problem": "p"}])
def test_rows_of_another_gold_id_name_or_prompt_are_another_problem(samples, changes, named):
    rows = [row("a", i, 1, **named) for i in range(2)] + [row("a", 2 + i, 0, **named | changes) for i in range(2)]
    each = evaluate(samples(rows), draws=10)["tiny_tools"]
    number = 1 if named and "prompt" in changes else 2  # with the same name: another template's text of one problem
    assert (each.num_problems, each.metrics["acc/best@k"].value) == (number, 1 / number)


def test_samples_that_their_server_failed_belong_to_their_problems(samples):
    rows = [row(name, i, 1, problem=name) for name in "abc" for i in range(3)]
    for each in rows[::3]:
        each |= {"acc": None, "end_reason": "aborted", "prompt": None, "turns": [], "calls": []}
    figures = evaluate(samples(rows), draws=10)["tiny_tools"]
    assert (figures.num_problems, figures.num_problems_scored, figures.num_problems_short) == (3, 3, 3)
    assert (figures.n, figures.k, figures.excluded["server_failure"]) == (3, 3, 3)
    assert list(by_k(samples(rows), draws=10)["tiny_tools"]["pass@k"]) == [1, 2, 3]


def test_curves_have_n_and_the_powers_of_two_below_it(samples):
    rows = [row("a", i, acc, pred=pred) for i, (acc, pred) in enumerate([(1, "7"), (0, "5"), (0, "5")])]
    curve = by_k(samples(rows), draws=10)["tiny_tools"]
    assert {k: each.value for k, each in curve["pass@k"].items()} == pytest.approx(
        {1: 1 / 3, 2: 2 / 3, 3: 1.0}  # 1 - C(2,2)/C(3,2) = 2/3
    )
    assert {k: each.value for k, each in curve["maj@k"].items()} == pytest.approx(
        {1: 1 / 3, 2: 0.5, 3: 0.0}  # 2: the first block of two, "7" and "5", ties; the third is left out
    )


def test_a_share_of_a_right_answer_counts_in_the_mean_but_is_not_right(samples):
    each = evaluate(samples([row("a", 0, 0) | {"acc": 0.5}, row("a", 1, 0)]), draws=10)["tiny_tools"]
    assert each.metrics["acc/mean@k"].value == 0.25
    assert each.metrics["acc/best@k"].value == 0.0


def test_the_test_of_a_difference_is_of_the_problems_means(samples):
    before = samples([row(name, session, 0) for name in "abc" for session in (0, 1)])
    after = samples(
        [row("a", 0, 1), row("a", 1, 1), row("b", 0, 1), row("b", 1, 0), row("c", 0, 0), row("c", 1, 0)]
    )  # differences 1, 0.5, 0: both signs must be +, or both -, to reach 1.5: 2 of 4 ways
    test = compare(before, after, draws=10)["tiny_tools"].test
    assert (test.better, test.worse, test.equal, test.p_sign_flips, test.p_sign_test) == (2, 0, 1, 0.5, 0.5)
    assert compare(after, before, draws=10)["tiny_tools"].test.worse == 2
