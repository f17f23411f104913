"""The top of the report, from hand-made figures."""

import pytest

from verl_ext.evaluation.figures import compare, evaluate, to_json
from verl_ext.evaluation.samples import Sample
from verl_ext.report.contents import RunContents
from verl_ext.report.verdict import changes, judge
from verl_ext.runs.metrics import Metrics

KEYS = ("acc/mean@k", "acc/best@k", "acc/maj@k", "tool/error_rate", "tool/timeout_rate", "truncation_rate")


def figures(sources, k=1, **values):
    """Figures of a group; a value is (value, low, high), by the first word of its key; 0 unless given."""
    metrics = {}
    for key in KEYS:
        given = values.get(key.replace("/", "_").replace("@k", ""), 0.0)
        value, low, high = given if isinstance(given, tuple) else (given, given, given)
        metrics[key] = {"value": value, "low": low, "high": high}
    return {"data_sources": sources, "num_problems_scored": 64, "n": k, "k": k, "metrics": metrics}


def a_sample(problem, calls=0, errors=0):
    """A judged, right sample."""
    texts = {"prompt": problem, "ground_truth": "1", "pred": "1", "data_source": "d", "end_reason": "answer"}
    counts = {"tool_calls": calls, "tool_errors": errors, "tool_timeouts": 0, "response_tokens": 3}
    return Sample(uid=f"{problem}_0_0", turns=(("model", ""),), acc=1.0, score=1.0, **texts, **counts)


def a_run(kind="quickstart", sft=None, rl=None, sides=("before RL", "after RL")):
    empty = Metrics({}, set())
    return RunContents(None, kind, sft or empty, rl or empty, [], [], sides, ([], []), [], None, [], {})


def two_sources(before, after, difference, ood=(0.0, 0.0, 0.0), k=1):
    """`in` is in distribution, `x_ood` is not: the three figures of each."""
    sides = {}
    for side, values, of_ood in zip(("before", "after", "difference"), (before, after, difference), ood, strict=True):
        inside, outside = figures(["in"], k, **values), figures(["x_ood"], k, acc_mean=of_ood)
        groups = {"in": inside, "x_ood": outside, "in_distribution": inside, "out_of_distribution": outside}
        sides[side] = groups | {"overall": figures(["in", "x_ood"], k, **values)}
    return sides


UP = ({"acc_mean": (0.2, 0.1, 0.3)}, {"acc_mean": (0.9, 0.8, 1.0)}, {"acc_mean": (0.7, 0.6, 0.8)})


def test_an_accuracy_that_stays_at_zero_stands_beside_the_one_that_rose():
    verdict = judge(a_run(), two_sources(*UP))
    assert verdict.sentence.startswith("RL raised accuracy from 20.0% [10.0, 30.0] to 90.0%")
    assert verdict.not_improved == ["accuracy on x_ood stays at 0.0%"]
    assert verdict.text.endswith("points. Not improved: accuracy on x_ood stays at 0.0%.")


def test_an_interval_that_holds_zero_is_no_improvement_and_one_below_is_worse():
    unclear = judge(a_run(), two_sources(*UP, ood=(0.10, 0.14, (0.04, -0.02, 0.09))))
    assert unclear.not_improved == [
        "accuracy on x_ood from 10.0% to 14.0%, +4.0 [-2.0, +9.0] points, an interval that contains 0"
    ]
    worse = judge(a_run(), two_sources(*UP, ood=(0.50, 0.30, (-0.2, -0.3, -0.1))))
    assert worse.not_improved == ["accuracy on x_ood fell from 50.0% to 30.0%"]
    better = judge(a_run(), two_sources(*UP, ood=(0.10, 0.50, (0.4, 0.3, 0.5))))
    assert (better.improved, better.not_improved) == (["accuracy on x_ood rose from 10.0% to 50.0%"], [])


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("tool_error_rate", "calls that failed"),
        ("tool_timeout_rate", "calls over the time limit"),
        ("truncation_rate", "responses cut by the budget"),
    ],
)
def test_failures_that_rose_are_named_and_those_that_fell_are_improvements(key, name):
    before, after, difference = UP
    up, down = difference | {key: (0.04, 0.02, 0.06)}, difference | {key: (-0.04, -0.06, -0.02)}
    rose = two_sources(before | {key: 0.01}, after | {key: 0.05}, up, ood=(1, 1, 0))
    assert judge(a_run(), rose).not_improved == [f"{name} rose from 1.0% to 5.0%"]
    fell = two_sources(before | {key: 0.05}, after | {key: 0.01}, down, ood=(1, 1, 0))
    assert judge(a_run(), fell).improved == [f"{name} fell from 5.0% to 1.0%"]
    assert judge(a_run(), fell).not_improved == []


def test_what_got_worse_stands_before_what_is_unclear():
    before, after, difference = UP
    rose = {"tool_error_rate": (0.04, 0.02, 0.06)}
    sides = two_sources(before, after | {"tool_error_rate": 0.04}, difference | rose)
    assert judge(a_run(), sides).not_improved == [
        "calls that failed rose from 0.0% to 4.0%",
        "accuracy on x_ood stays at 0.0%",
    ]


def test_with_several_samples_best_and_majority_count_as_well():
    before, after, difference = UP
    sides = two_sources(
        before | {"acc_best": 0.4, "acc_maj": 0.2},
        after | {"acc_best": 0.4, "acc_maj": 0.9},
        difference | {"acc_best": (0.0, -0.1, 0.1), "acc_maj": (0.7, 0.6, 0.8)},
        ood=(1, 1, 0),
        k=4,
    )
    verdict = judge(a_run(), sides)
    assert verdict.improved == ["maj@4 rose from 20.0% to 90.0%"]
    assert verdict.not_improved == ["best@4 stays at 40.0%"]
    assert [change.key for change in changes(two_sources(*UP, ood=(1, 1, 0)))] == ["acc/mean@k"]


def test_sources_that_are_pooled_are_named_one_by_one():
    sides = two_sources(*UP)
    for side, value in (("before", 0.1), ("after", 0.1), ("difference", (0.0, -0.1, 0.1))):
        groups = sides[side]
        groups["second"] = figures(["second"], acc_mean=value)
        groups["in_distribution"] = groups["in"] | {"data_sources": ["in", "second"]}
    assert judge(a_run(), sides).improved == ["accuracy on in rose from 20.0% to 90.0%"]
    assert judge(a_run(), sides).not_improved == [
        "accuracy on x_ood stays at 0.0%",
        "accuracy on second stays at 10.0%",
    ]


def test_a_difference_that_cannot_be_told_is_left_out():
    sides = two_sources(*UP, ood=(1, 1, 0))
    for side in sides.values():
        side["in_distribution"]["metrics"]["tool/error_rate"] = None  # 0 / 0
    assert judge(a_run(), sides).not_improved == []


def test_an_rl_run_names_the_steps_of_its_validations():
    verdict = judge(a_run("rl", sides=("step 0", "step 30")), two_sources(*UP))
    assert "to 90.0% [80.0, 100.0], step 0 to step 30 on 64 held-out problems" in verdict.sentence


def curve(**values):
    """Metrics of as many steps as the longest list; `__` stands for `/`."""
    length = max(map(len, values.values()))
    steps = {i + 1: {k.replace("__", "/"): v[i] for k, v in values.items() if i < len(v)} for i in range(length)}
    return Metrics(steps, set())


NONE = {"before": {}, "after": {}, "difference": {}}


def test_without_an_evaluation_training_speaks_and_says_that_it_has_no_interval():
    rl = curve(train__acc=[0.2, 0.2, 0.2, 0.6, 0.6, 0.6], tool__error_rate=[0.1] * 3 + [0.3] * 3)
    verdict = judge(a_run("rl", rl=rl), NONE)
    assert verdict.sentence.startswith(
        "6 RL steps, with no validation samples to give an interval. Higher: training acc"
    )
    assert verdict.not_improved == ["calls that failed from 10.0% to 30.0% (means of 2 steps at each end)"]


def test_without_samples_the_logged_validations_speak():
    rl = Metrics({0: {"val-core/aime/acc/mean@30": 0.25}, 8: {"val-core/aime/acc/mean@30": 0.20}}, set())
    assert judge(a_run("rl", rl=rl), NONE).not_improved == [
        "validation accuracy on aime from 25.0% (step 0) to 20.0% (step 8)"
    ]


def test_an_sft_run_says_whether_its_losses_fell():
    fell = judge(a_run("sft", sft=curve(train__loss=[4.0, 2.0, 1.0], val__loss=[2.0, 1.5, 1.8])), NONE)
    assert fell.sentence.startswith("3 SFT steps. Lower: training loss from 4 to 1")
    assert fell.not_improved == ["validation loss from 2 (step 1) to 1.8 (step 3), lowest at step 2 (1.5)"]
    assert "No loss is lower" in judge(a_run("sft", sft=curve(train__loss=[1.0, 2.0])), NONE).sentence


def test_a_difference_of_problems_that_have_no_calls_in_common_is_named_without_an_interval():
    """Before, only one problem had calls; after, only the other one: no problem has both rates of failed calls."""
    before = [a_sample("a", calls=2, errors=1), a_sample("b")]
    after = [a_sample("a"), a_sample("b", calls=2, errors=2)]
    sides = {"before": evaluate(before), "after": evaluate(after), "difference": compare(before, after)}
    sides = {side: to_json(groups) for side, groups in sides.items()}
    assert sides["difference"]["d"]["metrics"]["tool/error_rate"] == {"value": 0.5, "low": None, "high": None}
    texts = {change.key: (change.text, change.outcome) for change in changes(sides)}
    what = "calls that failed from 50.0% to 100.0%, +50.0 points without an interval"
    assert texts["tool/error_rate"] == (what, "unclear")
