"""The trainer's modes as schedules to redo on paper: a response has 10 tokens, and an iteration takes 1 s."""

import pytest

from scripts.studies import schedules
from scripts.studies.events import Speed
from scripts.studies.schedules import Machine, asynchronous, coarser, partial, sync
from scripts.studies.workload import Shape, draw

# One group of one response without a call; quantiles above .001 are all as long as the longest.
ONE = Shape(1, 1, 0.0, 9.99999, 10.0, 0.999, 1.0, 0.0, 1, 0.0)


def machine(*, slots=1, gpus=1, update_s=0.2):
    return Machine(gpus, 1, Speed(slots, 1.0, 0.0), 0.1, update_s, switch_s=2.0, other_s=1.0, workers=1)


def shape(**changes):
    return Shape(**(vars(ONE) | changes))


def test_sync():
    """Two slots, three groups: rollouts until 20 s and 2 s of the switch; 30 tokens x (.1 + .2) s and 1 s."""
    step = sync(machine(slots=2), shape(prompts=3))
    assert (step.rollout_s, step.train_s, step.step_s) == pytest.approx((22, 10, 32))
    assert (step.useful, step.tokens, step.generate_s) == pytest.approx((3, 30, 40 / 3))  # ready after 10, 10 and 20 s


def test_without_a_pass_for_old_log_probs():
    assert sync(machine(slots=2), shape(prompts=3), log_probs=False).train_s == pytest.approx(7)


def test_active_sampling_replaces_equal_groups_up_to_the_limit():
    """Two are trained, at most four generated, and none is useful: two more at 10 s, nothing more at 20 s."""
    step = sync(machine(slots=4), shape(prompts=4), train=2, useful=0.0, active=True)
    assert (step.rollout_s, step.useful, step.tokens) == pytest.approx((22, 0, 20))


def test_active_sampling_ends_when_enough_groups_are_useful():
    step = sync(machine(slots=8), shape(prompts=4), useful=0.5, active=True)
    assert step.useful == 4
    assert step.rollout_s >= 22  # at least one more round of 10 s
    assert sync(machine(slots=8), shape(prompts=4), useful=0.5).useful == 2


def test_partial_rollouts_go_on_after_the_update():
    """One slot, one call of 4 s between turns of 5 tokens, two responses in flight.

    A: 0-5, call 5-9. B: 5-10, call 10-14. A again: 10-15, so the first step waits 15 s. B's call has ended, and after
    the update B needs 5 s more. So steps wait 15 and 5 s alternately, and those of sync would wait 14 s.
    10 tokens x .3 s and 1 s of other things: 4 s; the switch 2 s.
    """
    one_call = shape(calls=1.0, tool_s=4.0)
    step = partial(machine(), one_call, steps=2)
    assert (step.rollout_s, step.train_s, step.step_s) == pytest.approx((12, 4, 16))
    assert step.oldest == 1
    assert sync(machine(), one_call).step_s == pytest.approx(14 + 2 + 4)


def test_asynchronous_where_rollouts_take_longer():
    """Two GPUs, one of them the server's: an update takes 10 x .3 x 2 + 1 = 7 s. One slot, so 10 s a response.

    Staleness 1: the next response begins as one ends. 7 s of it pass during the update, 2 s of pause follow, and the
    trainer waits for the last 3: 12 s a step.
    """
    step = asynchronous(machine(gpus=2), ONE, staleness=1, rollout_gpus=1, steps=2)
    assert (step.rollout_s, step.train_s, step.step_s) == pytest.approx((3, 9, 12))
    assert step.oldest == 1


def test_asynchronous_where_the_update_takes_longer():
    """10 x .7 x 2 + 1 = 15 s and the pause: 17 s a step, in which a response of 10 s is always there."""
    step = asynchronous(machine(gpus=2, update_s=0.6), ONE, staleness=1, rollout_gpus=1, steps=2)
    assert (step.rollout_s, step.step_s) == pytest.approx((0, 17))


def test_staleness_0_takes_turns():
    step = asynchronous(machine(gpus=2), ONE, staleness=0, rollout_gpus=1, steps=2)
    assert (step.step_s, step.oldest) == pytest.approx((10 + 7 + 2, 0))


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_groups_are_at_most_as_old_as_the_staleness_where_none_overtakes(staleness):
    """One slot: groups end in the order in which they were issued."""
    step = asynchronous(machine(gpus=2, update_s=0.6), ONE, staleness=staleness, rollout_gpus=1, steps=3)
    assert step.oldest == staleness


def test_of_the_groups_that_ended_those_issued_first_are_trained_first(monkeypatch):
    """Three slots, one group a step, 20 tokens and 10 and 10: the last two have ended at 10 s, the first one at 20 s.

    At 10 s the second one is trained, and at 20 s the first one, which the third one overtook.
    """

    def draw_one_long(*arguments):
        groups = draw(*arguments)
        groups[0].responses[0].turn_tokens = 20.0
        return groups

    monkeypatch.setattr(schedules, "draw", draw_one_long)
    player = schedules._Player(machine(slots=3), 1, ONE, 1.0, 0)
    player.issue(3)
    first, second, third = player._groups
    player.simulation.run(lambda: player.ended == 2)
    assert player.simulation.now_s == 10 and player.take(0) == ([second], 0)
    player.simulation.run(lambda: player.ended == 2)
    assert player.simulation.now_s == 20 and player.take(1) == ([first], 1)
    assert player.take(2) == ([third], 2) and player.ended == 0


def test_the_trainer_needs_gpus():
    with pytest.raises(ValueError, match="2 of 2 GPUs"):
        asynchronous(machine(gpus=2), ONE, staleness=1, rollout_gpus=2)


def test_a_coarser_step_takes_the_same_time():
    """64 groups of 8 on two servers of 32, and an eighth of all three."""
    fine = Machine(2, 1, Speed(32, 0.02, 4e-6), 1e-5, 5e-5, 0.1, 0.3, workers=64)
    drawn = Shape(64, 8, 30.0, 40.0, 128.0, 0.02, 1.0, 1.0, 3, 0.5)
    expected, found = sync(fine, drawn), sync(*coarser(fine, drawn, 8))
    assert found.rollout_s == pytest.approx(expected.rollout_s, rel=0.05)
    assert found.train_s == pytest.approx(expected.train_s, rel=0.02)
    assert (8 * found.useful, found.generate_s) == (64, pytest.approx(expected.generate_s, rel=0.05))
    with pytest.raises(ValueError, match="multiples of 7"):
        coarser(fine, drawn, 7)
