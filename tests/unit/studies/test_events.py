"""Schedules of servers and sandbox that can be redone on paper."""

import pytest

from scripts.studies.events import Simulation, Speed
from scripts.studies.workload import Group, Response


def play(turns, *, speed, servers=1, workers=1, tool_s=0.0, context=0.0, tool_tokens=0.0):
    """(when each response was there, its generate_s): responses of [tokens of a turn, turns], each its own group."""
    ends, groups = {}, []

    def note(group):
        ends[id(group)] = simulation.now_s

    simulation = Simulation(servers, speed, workers=workers, tool_s=tool_s, on_group=note)
    for tokens, number in turns:
        group = Group([], True, open=1)
        group.responses.append(Response(group, tokens, number, context, tool_tokens))
        groups.append(group)
        simulation.issue(group)
    simulation.run(lambda: len(ends) == len(turns))
    return [ends[id(group)] for group in groups], [group.responses[0].generate_s for group in groups]


def test_a_turn_waits_for_a_slot():
    """Two slots, 1 s an iteration, 2, 4 and 3 tokens: the third begins as the first ends, at 2, and ends at 5."""
    ends, waits = play([(2, 1), (4, 1), (3, 1)], speed=Speed(2, 1.0, 0.0))
    assert ends == pytest.approx([2, 4, 5])
    assert waits == pytest.approx([2, 4, 5])


def test_two_servers_take_turns():
    """Responses 1 and 3 on the first server, one slot each: 2 + 3; the second on the other: 4."""
    assert play([(2, 1), (4, 1), (3, 1)], speed=Speed(1, 1.0, 0.0), servers=2)[0] == pytest.approx([2, 4, 5])


def test_context_makes_iterations_longer():
    """Prompt 2, 2 tokens, 1 s + .5 s x context, which goes from 2 to 4: the integral of 2 to 3 over 2 tokens is 5 s."""
    assert play([(2, 1)], speed=Speed(1, 1.0, 0.5), context=2.0)[0] == pytest.approx([5])


def test_contexts_add_up_and_leave_with_their_turns():
    """Contexts begin at 0, .5 s a token, 1 and 2 tokens, 1 s an iteration.

    Both: contexts grow by 2 a token, the first token takes 1 + .5 x 2 / 2 = 1.5 s. Then only the second continues,
    with a context of 1: 1 + .5 + .5 / 2 = 1.75 s.
    """
    assert play([(1, 1), (2, 1)], speed=Speed(2, 1.0, 0.5))[0] == pytest.approx([1.5, 3.25])


def test_time_that_passes_in_parts_is_the_same_time():
    """As above, and a call of .7 s ends in between on the same server, whose second turn waits for a slot."""
    ends, _ = play([(1, 2), (2, 1), (2, 1)], speed=Speed(2, 1.0, 0.5), tool_s=0.7)
    # 0-1.5: first turn of 1 and half of 2 (context 1). Slot to 3 (context 0). Both need 1 and 2 tokens.
    # 2's last token: 1 + .5 x 1 + .5 x 2 / 2 = 2 s, so 2 ends at 3.5. The call ends at 2.2 and waits until then.
    # 3 (context 1, 1 token left) and 1 (context 1, 1 token): 1 + .5 x 2 + .5 x 2 / 2 = 2.5 s, both end at 6.
    assert ends == pytest.approx([6, 3.5, 6])


def test_calls_wait_for_a_worker_and_queue_again():
    """One worker, 3 s a call, turns of 1 token: calls run 1-4 and 4-7, so the responses end at 5 and 8.

    Neither waits for a slot: each generated for 2 s.
    """
    ends, waits = play([(1, 2), (1, 2)], speed=Speed(2, 1.0, 0.0), tool_s=3.0)
    assert ends == pytest.approx([5, 8])
    assert waits == pytest.approx([2, 2])
    assert play([(1, 2), (1, 2)], speed=Speed(2, 1.0, 0.0), tool_s=3.0, workers=2)[0] == pytest.approx([5, 5])


def test_output_of_a_call_is_context():
    """Turns of 1 token, output 4: the second turn begins with a context of 5: 1 + .5 x 5 + .25 = 3.75 s after 1.25."""
    assert play([(1, 2)], speed=Speed(1, 1.0, 0.5), tool_tokens=4.0)[0] == pytest.approx([1.25 + 3.75])


def test_a_paused_server_does_not_go_on_and_its_calls_do():
    simulation = Simulation(1, Speed(1, 1.0, 0.0), workers=1, tool_s=0.0, on_group=lambda group: ends.append(group))
    ends = []
    group = Group([], True, open=1)
    group.responses.append(Response(group, 4, 1, 0.0, 0.0))
    simulation.issue(group)
    simulation.after(1.0, lambda: simulation.pause(True))
    simulation.after(6.0, lambda: simulation.pause(False))
    simulation.run(lambda: bool(ends))
    assert simulation.now_s == pytest.approx(9)  # 1 s, 5 s of pause, 3 s


def test_an_end_that_never_comes_is_an_error():
    simulation = Simulation(1, Speed(1, 1.0, 0.0), workers=1, tool_s=0.0, on_group=lambda group: None)
    with pytest.raises(RuntimeError, match="nothing is due"):
        simulation.run(lambda: False)
