import pytest

from tests.unit.evaluation.rows import row
from verl_ext.report.rollouts import pick_rollouts, pick_training_rollouts


def sample(problem, *, acc=1.0, calls=1, errors=0, source="tiny_tools", **columns):
    return row(problem, 0, acc, calls=calls, errors=errors, domain=source, id=None, **columns)


@pytest.fixture
def sides():
    before = [sample(f"p{i}", acc=0.0, calls=0) for i in range(5)] + [sample("p5", acc=0.0), sample("p6")]
    before += [sample("p7", calls=2, errors=1), sample("o1", acc=0.0, source="tiny_tools_ood_large")]
    after = [sample(f"p{i}") for i in range(7)] + [sample("p7", calls=2, errors=1), sample("p8", acc=0.0)]
    after += [sample("o1", source="tiny_tools_ood_large")]
    return before, after


def test_each_kind_of_behaviour_is_shown_before_and_after(sides):
    picks = pick_rollouts(*sides)
    assert [(pick.where, pick.why, pick.row["acc"]) for pick in picks] == [
        ("before RL", "wrong without code", 0),
        ("before RL", "wrong with code", 0),
        ("before RL", "right with code", 1),
        ("before RL", "an error, repaired", 1),
        ("before RL", "out of distribution, wrong", 0),
        ("after RL", "the same problem", 1),
        ("after RL", "right with code", 1),
        ("after RL", "an error, repaired", 1),
        ("after RL", "out of distribution, right", 1),
        ("after RL", "wrong", 0),
    ]
    assert picks[0].row["problem"] == picks[5].row["problem"] in {f"p{i}" for i in range(5)}


def test_two_sides_of_the_same_name_are_both_shown(sides):
    """A validation in training, and an evaluation of the checkpoint of that step."""
    assert len(pick_rollouts(*sides, ("step 5", "step 5"))) == 10


def test_the_choice_does_not_depend_on_the_order_of_the_dump(sides):
    assert pick_rollouts(*sides) == pick_rollouts(sides[0][::-1], sides[1][::-1])


def test_places_without_their_kind_are_filled_without_repeats():
    after = [sample(f"p{i}", calls=0) for i in range(12)]
    picks = pick_rollouts([], after)
    assert len(picks) == 10
    assert {pick.why for pick in picks} == {"another"}
    assert len({pick.row["problem"] for pick in picks}) == 10


def test_training_rollouts_are_shown_in_order_of_steps():
    rows = [sample(f"q{i}", step=step) for step in (40, 1) for i in range(8)]
    picks = pick_training_rollouts(rows)
    assert len(picks) == 10
    assert [pick.where for pick in picks] == sorted((pick.where for pick in picks), key=lambda w: int(w.split()[-1]))
    assert picks == pick_training_rollouts(rows[::-1])
