import pytest

from verl_ext.trainer.validation import (
    LightValidation,
    ValidationPlan,
    ValidationSchedule,
    as_light,
    light_batches,
)

SCHEDULE = ValidationSchedule([[0, 3], [30, 5], [80, 10]])
LIGHT = LightValidation(problems=15, n=10, full_every=20)


def test_frequency_follows_the_phase():
    plan = ValidationPlan(5, SCHEDULE)
    due = [step for step in range(1, 111) if plan.is_due(step)]
    assert due == [*range(3, 30, 3), *range(30, 80, 5), *range(80, 111, 10)]


def test_most_validations_are_light_and_every_so_many_steps_one_is_full():
    plan = ValidationPlan(5, SCHEDULE, LIGHT)
    due = [step for step in range(1, 111) if plan.is_due(step)]
    assert [step for step in due if not plan.is_light(step, 110)] == [20, 40, 60, 80, 100, 110]
    assert 20 in due, "a full validation happens, whatever the phase's frequency"
    assert not plan.is_light(0, 110) and not plan.is_light(33, 33), "before the first and after the last step"


def test_light_validation_also_works_with_verls_own_frequency():
    plan = ValidationPlan(5, light=LightValidation(problems=1, n=1, full_every=15))
    assert [(step, plan.is_light(step, 99)) for step in range(1, 16) if plan.is_due(step)] == [
        *[(5, True), (10, True), (15, False)]
    ]


@pytest.mark.parametrize(("test_freq", "schedule"), [(20, None), (5, ValidationSchedule([[0, 20], [50, 40]]))])
def test_light_validation_that_never_comes_is_refused(test_freq, schedule):
    with pytest.raises(ValueError, match="full_every is 20 .* no validation would be light"):
        ValidationPlan(test_freq, schedule, LIGHT)
    ValidationPlan(5, None, LIGHT)


@pytest.mark.parametrize("wrong", [{"problems": 0}, {"n": 0}, {"full_every": 0}])
def test_settings_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="retool.validation_schedule.phases is .* values of at least 1"):
        ValidationSchedule([[0, 0]])
    with pytest.raises(ValueError, match="retool.light_validation: expected numbers of at least 1"):
        LightValidation(**{"problems": 1, "n": 1, "full_every": 1} | wrong)


@pytest.mark.parametrize(("size", "expected"), [(30, [0, 7, 15, 22]), (5, [0, 1, 2, 3]), (3, [0, 1, 2])])
def test_the_light_problems_are_spaced_evenly_and_always_the_same(size, expected):
    dataset, light = [{"problem": i} for i in range(size)], LightValidation(4, 2, 9)
    for _ in range(2):
        (batch,) = light_batches(dataset, light, lambda rows: {"problem": [row["problem"] for row in rows]})
        assert batch["problem"] == expected and list(batch["__rollout_n__"]) == [2] * len(expected)


def test_light_metrics_have_separate_names():
    assert as_light({"val-core/aime/acc/mean@10": 0.5, "val-aux/num_turns/min": 2}) == {
        "val-light/aime/acc/mean@10": 0.5,
        "val-light-aux/num_turns/min": 2,
    }
