import math

import pytest

from verl_ext.events import Started, Validated
from verl_ext.runs.journal import StepJournal
from verl_ext.trainer.early_stop import EarlyStop, EarlyStopWatch, reason_to_stop, watched_value

SETTINGS = {"metric": None, "patience": 3, "min_delta": 0.1, "max_drop": 0.25}
METRICS = {
    "val-core/aime_2024/acc/mean@30": 0.5,
    "val-core/aime_2025/acc/mean@30": 0.3,
    "val-core/aime_2025/acc/best@30/mean": 0.9,
    "val-aux/aime_2025/score/mean@30": 0.1,
}


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ([], False),
        ([0.5], False),
        ([0.5, 0.5, 0.5], False),  # two without progress
        ([0.5, 0.5, 0.5, 0.5], True),  # three
        ([0.5, 0.55, 0.59, 0.59], True),  # each less than 0.1 above 0.5
        ([0.5, 0.55, 0.59, 0.625], False),  # 0.125 above 0.5 at the third
        ([0.5, 0.75, 0.7, 0.7, 0.9], False),
        ([0.5, 0.75, 0.7, 0.7, 0.7], True),
        ([0.5, 0.75, 0.5], False),  # 0.25 below the best is not more than 0.25
        ([0.5, 0.75, 0.45], True),
        ([0.5, 0.55, 0.29], True),  # 0.26 below 0.55, which was no progress, but the best
    ],
)
def test_stops_without_progress_or_when_it_collapses(values, stops):
    assert (reason_to_stop(values, EarlyStop(**SETTINGS)) is not None) is stops


def test_the_reason_says_what_was_seen_and_expected():
    settings = EarlyStop(**SETTINGS)
    assert reason_to_stop([0.5] * 4, settings) == (
        "has not risen by min_delta=0.1 above 0.5 in 3 validations (patience=3), and is 0.5"
    )
    assert reason_to_stop([0.75, 0.25], settings) == "fell to 0.25, more than max_drop=0.25 below its best, 0.75"


def test_without_max_drop_only_patience_counts_and_a_plateau_is_no_progress():
    settings = EarlyStop(metric=None, patience=2, min_delta=0.0, max_drop=None)
    assert reason_to_stop([0.9, 0.0], settings) is None
    assert reason_to_stop([0.9, 0.9, 0.9], settings) is not None
    assert reason_to_stop([0.9, 0.91, 0.92], settings) is None


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"min_delta": -0.1}, {"max_drop": 0.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="retool.early_stop: expected patience >= 1"):
        EarlyStop(**SETTINGS | wrong)


def test_the_default_metric_is_the_mean_accuracy_over_the_data_sources_of_full_validations():
    assert watched_value(METRICS, EarlyStop(**SETTINGS), light=False) == pytest.approx(0.4)
    assert watched_value({}, EarlyStop(**SETTINGS), light=True) is None


def test_a_named_metric_is_looked_for_where_it_belongs():
    best = EarlyStop(**SETTINGS | {"metric": "val-core/aime_2025/acc/best@30/mean"})
    assert watched_value(METRICS, best, light=False) == 0.9
    assert watched_value({}, best, light=True) is None
    light = EarlyStop(**SETTINGS | {"metric": "val-light/aime_2025/acc/mean@10"})
    assert watched_value(METRICS, light, light=False) is None
    assert watched_value({"val-light/aime_2025/acc/mean@10": 0.2}, light, light=True) == 0.2


def test_a_metric_that_is_not_there_is_an_error_that_names_those_that_are():
    misspelt = EarlyStop(**SETTINGS | {"metric": "val-core/aime/acc/mean@30"})
    with pytest.raises(
        ValueError, match="val-core/aime/acc/mean@30 is not one of .*val-core/aime_2024/acc/mean@30, val"
    ):
        watched_value(METRICS, misspelt, light=False)
    with pytest.raises(ValueError, match=r"val-core/\*/acc/mean@\* is not finite\. Expected"):
        watched_value({"val-core/a/acc/mean@30": math.nan}, EarlyStop(**SETTINGS), light=False)


def full(value):
    return {"val-core/aime/acc/mean@30": value}


def test_the_watch_continues_counting_over_a_resume(tmp_path):
    journal = tmp_path / "early_stop.jsonl"
    watch = EarlyStopWatch(EarlyStop(**SETTINGS), StepJournal(journal))
    for step in (0, 5, 10):
        assert watch.on_validated(Validated(step, full(0.5))) == {"early_stop/value": 0.5, "early_stop/best": 0.5}
    assert (
        watch.on_validated(Validated(12, {"val-light/aime/acc/mean@10": 0.9}, is_light=True)) == {}
        and watch.reason() is None
    )

    resumed = EarlyStopWatch(EarlyStop(**SETTINGS), StepJournal(journal))
    resumed.on_started(Started(8, decode=str))  # from a checkpoint of step 8: what was seen at step 10 is gone
    resumed.on_validated(Validated(8, full(0.5)))  # validated before training
    assert resumed.reason() is None
    resumed.on_validated(Validated(8, full(0.5)))
    assert resumed.reason() is None, "the same step counts once"
    resumed.on_validated(Validated(10, full(0.5)))
    assert resumed.reason().startswith("the mean validation accuracy has not risen by min_delta=0.1 above 0.5 in 3 val")
    again = EarlyStopWatch(EarlyStop(**SETTINGS | {"patience": 4}), StepJournal(journal))
    again.on_started(Started(10, decode=str))
    assert again.reason() is None, "more patience lets a stopped run continue"
