"""When a server that has started gets its first weights."""

import asyncio

import pytest

from tests.unit.fleet.fleet_scene import Replica
from verl_ext.ledger.servers import read_servers

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports


@pytest.mark.parametrize(
    ("is_exact", "others_live", "comes_in"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_a_newcomer_is_let_in_while_the_actor_waits_with_the_weights_of_the_others(
    scene, is_exact, others_live, comes_in
):
    async def script(made):
        for each in made.replicas[: 1 if others_live else 2]:
            each.server.mode = "dead"
        await made.until(lambda: len(made.weights.newcomers) == (1 if others_live else 2))
        await made.rounds(3)
        assert "server 2" not in made.routed()
        made.fleet.actor_waits(is_exact=is_exact)
        await made.rounds(1)
        if comes_in:
            await made.until(lambda: "server 2" in made.routed())
        else:
            assert not made.fleet.lets_newcomers_in
            await made.rounds(5)
            assert "server 2" not in made.routed()
        assert made.weights.actor_wg.sent == [1] * comes_in
        made.fleet.actor_works()
        assert not made.fleet.lets_newcomers_in

    scene(script)


def test_the_actor_continues_only_when_a_newcomer_has_its_weights(scene):
    async def script(made):
        made.weights.newcomers.append(Replica(7, load="hangs"))
        made.fleet.actor_waits(is_exact=True)
        await made.until(lambda: made.weights.updating)
        goes_on = asyncio.ensure_future(asyncio.to_thread(lambda: made.fleet.actor_works() or made.weights.updating))
        await made.until(lambda: not made.fleet.lets_newcomers_in)
        made.weights.dead.add(made.weights.newcomers[0])
        assert not await goes_on

    scene(script)


def test_no_further_newcomer_is_let_in_once_the_actor_would_work(scene):
    async def script(made):
        made.weights.newcomers.append(Replica(7, load="hangs"))
        made.fleet.actor_waits(is_exact=True)
        await made.until(lambda: made.weights.updating)
        made.weights.newcomers.append(Replica(8))
        goes_on = asyncio.ensure_future(asyncio.to_thread(made.fleet.actor_works))
        await made.until(lambda: not made.fleet.lets_newcomers_in)
        made.weights.dead.add(made.weights.newcomers[0])
        await made.until(goes_on.done)
        await made.rounds(3)
        assert made.weights.replicas == made.replicas and made.routed() == ["server 0", "server 1"]

    scene(script)


def test_a_newcomer_that_hangs_while_it_joins_does_not_block_the_actor_forever(scene):
    async def script(made):
        made.replicas[0].server.mode = "dead"
        await made.until(lambda: made.weights.newcomers)
        made.weights.newcomers[0].at["load"] = "hangs"
        made.fleet.actor_waits(is_exact=True)
        await made.until(lambda: made.weights.updating)
        goes_on = asyncio.ensure_future(asyncio.to_thread(made.fleet.actor_works))
        await made.until(goes_on.done)
        assert made.weights.replicas == [made.replicas[1]] and len(made.weights.dead) == 2

    scene(script)


def test_the_others_are_watched_and_routed_as_usual_while_a_newcomer_gets_its_weights(scene):
    async def script(made):
        made.weights.newcomers.append(Replica(7, load="hangs"))
        made.fleet.actor_waits(is_exact=True)
        await made.until(lambda: made.weights.updating)
        silent = made.replicas[0]
        silent.server.mode = "hangs"
        await made.rounds(6)
        assert made.routed() == ["server 1"] and not made.weights.dead
        await made.rounds(8)
        assert made.weights.dead == {silent}
        made.weights.dead.add(made.weights.newcomers[0])
        await made.until(lambda: not made.weights.updating)

    scene(script)


def test_a_server_that_is_suspected_when_weights_change_comes_back_when_it_answers(scene):
    async def script(made):
        silent = made.replicas[0]
        silent.server.mode = "hangs"
        await made.rounds(5)
        await asyncio.wait_for(made.weights.update_weights(global_steps=2), 5)
        made.fleet.actor_waits(is_exact=True)
        await made.rounds(2)
        assert made.weights.newcomers == [silent] and made.routed() == ["server 1"] and not silent.log
        silent.server.wake()
        await made.until(lambda: "server 0" in made.routed())
        assert made.weights.replicas == [made.replicas[1], silent] and not made.weights.dead and not made.started

    scene(script)


def test_a_server_that_cannot_be_reached_in_an_update_comes_back_with_the_weights_of_the_others(scene):
    async def script(made):
        away = made.replicas[0]
        away.at["load"] = "unreachable"
        await made.weights.update_weights(global_steps=2)
        away.at["load"], away.server.mode = "well", "well"
        await made.rounds(2)
        assert made.routed() == ["server 1"] and made.weights.newcomers == [away]
        made.fleet.actor_waits(is_exact=True)
        await made.until(lambda: made.routed() == ["server 1", "server 0"])
        assert made.weights.actor_wg.sent == [2, 2] and not made.weights.dead and not made.stopped

    scene(script)


@pytest.mark.parametrize("starts", ["in place of a dead one", "by command"])
def test_a_newcomer_that_dies_in_an_update_before_its_first_round_is_buried_and_replaced(scene, tmp_path, starts):
    async def script(made):
        if starts == "by command":
            new = Replica(7, abort="gone")
            made.weights.newcomers.append(new)
        else:
            made.replicas[0].server.mode = "dead"
            await made.rounds(1)
            while not made.weights.newcomers:  # no round in this time
                await asyncio.sleep(0.01)
            (new,) = made.weights.newcomers
            new.at["abort"] = "gone"
        await made.weights.update_weights(global_steps=2)
        assert new in made.weights.dead and new not in made.weights.newcomers
        await made.until(lambda: made.weights.newcomers)
        assert made.stopped[-1] is new and made.started[-1] is made.weights.newcomers[0]
        await made.rounds(10)
        assert made.stopped.count(new) == 1

    scene(script)
    servers = read_servers(tmp_path)
    number = 1 if starts == "by command" else 2
    assert (servers.died, servers.replaced) == (number, number) and servers.started == 4 and not servers.faults()


@pytest.mark.parametrize("joins", [True, False])
def test_a_server_that_an_update_moves_while_a_round_looks_was_not_removed(scene, tmp_path, joins):
    """From newcomers to the others, or back because it is silent; the update runs in a thread during the round."""

    async def script(made):
        class Newcomers(list):
            def __iter__(self):
                if joins and server in made.weights.newcomers:
                    made.weights.replicas = [*made.weights.replicas, server]
                    self.remove(server)
                seen = self.copy()
                if not joins and server in made.weights.replicas:
                    self.append(server)
                    made.weights.replicas = [each for each in made.weights.replicas if each is not server]
                return iter(seen)

        server = Replica(7) if joins else made.replicas[0]
        made.weights.newcomers += [server] * joins
        await made.rounds(1)
        made.weights.newcomers = Newcomers(made.weights.newcomers)
        await made.rounds(2)
        assert (server in made.weights.replicas) == joins

    scene(script)
    assert read_servers(tmp_path).removed == 0


@pytest.mark.parametrize(("step", "limit_s"), [("abort", 0.1), ("load", 1.0)])
def test_a_server_that_stops_in_an_update_holds_it_for_dead_s_at_its_pause_and_for_update_s_at_its_load(
    scene, step, limit_s
):
    async def script(made):
        made.replicas[0].at[step] = "hangs"
        update = asyncio.ensure_future(made.weights.update_weights(global_steps=2))
        await made.until(lambda: made.weights.dead)
        assert limit_s < made.now < limit_s + 0.1
        await update
        assert made.weights.replicas == [made.replicas[1]]

    scene(script)
