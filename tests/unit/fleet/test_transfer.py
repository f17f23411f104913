"""Updates of the weights of made-up replicas: none waits for the dead."""

import asyncio
import gc
import threading

import pytest

from tests.unit.fleet.fleet_scene import Replica, wait_until
from verl_ext.fleet.replicas import in_thread

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports

STEPS = ["abort", "release", "prepare", "init_process_group", "load", "finalize", "refill", "resume"]


def test_an_update_is_verls_if_all_are_alive(make):
    log: list = []
    replicas = [Replica(0, log), Replica(1, log)]
    manager = make(*replicas)
    assert manager.update_weights(global_steps=4) == {"sent": 1.0}
    assert log == [(name, number) for name in STEPS for number in (0, 1)]
    assert manager.replicas == replicas and manager.actor_wg.sent == [4] and manager.version == 4
    assert not manager.dead and not manager.updating


@pytest.mark.parametrize("mode", ["dead", "gone", "oom"])
@pytest.mark.parametrize("step", STEPS)
def test_an_update_continues_without_a_replica_that_dies_in_it(make, step, mode):
    dying, other = Replica(0, **{step: mode}), Replica(1)
    manager = make(dying, other)
    manager.update_weights(global_steps=4)
    assert manager.replicas == [other] and manager.dead == {dying}
    assert [name for name, _ in other.log] == STEPS
    assert dying.log[-1][0] == step


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_replica_that_cannot_be_reached_in_an_update_lives_and_waits_for_the_next_one(make, step, is_new):
    away, other = Replica(0, **{step: "unreachable"}), Replica(1)
    manager = make(other) if is_new else make(away, other)
    manager.newcomers += [away] * is_new
    manager.update_weights(global_steps=4)
    assert manager.replicas == [other] and manager.newcomers == [away] and not manager.dead
    assert [name for name, _ in other.log] == STEPS and away.log[-1][0] == step
    away.at, away.server.mode = {}, "well"
    away.log.clear()
    manager.let_newcomers_in()
    assert [name for name, _ in away.log] == STEPS and manager.replicas == [other, away] and not manager.newcomers


@pytest.mark.parametrize("step", ["abort", "prepare", "load", "resume"])
def test_an_update_waits_for_one_that_hangs_until_it_is_declared_dead(make, step):
    hanging, other = Replica(0, **{step: "hangs"}), Replica(1)
    manager = make(hanging, other)
    update = in_thread(lambda: manager.update_weights(global_steps=4))
    wait_until(lambda: (step, 0) in hanging.log and (step, 1) in other.log)
    assert not update.done()
    manager.dead.add(hanging)  # as the fleet's thread does
    update.result(10)
    assert manager.replicas == [other] and other.log[-1][0] == "resume"


def test_what_was_declared_dead_before_is_not_asked(make):
    dead, other = Replica(0), Replica(1)
    manager = make(dead, other)
    manager.dead.add(dead)
    manager.update_weights(global_steps=4)
    assert not dead.log and [name for name, _ in other.log] == STEPS and manager.replicas == [other]


class Wrong(Replica):
    async def resume_generation(self):
        raise TimeoutError("2 admitted requests did not reach vLLM's engine")


def test_the_only_replica_that_fails_counts_as_dead(make, caplog):
    wrong, other = Wrong(0), Replica(1)
    manager = make(wrong, other)
    manager.update_weights(global_steps=4)
    assert manager.replicas == [other] and manager.dead == {wrong} and not manager.updating
    assert "2 admitted" in manager.failures[wrong] and "server 0 failed during the update of its weights" in caplog.text


def test_a_newcomer_that_cannot_load_counts_as_dead_even_if_it_is_asked_alone(make):
    wrong, other = Wrong(1), Replica(0)
    manager = make(other)
    manager.newcomers.append(wrong)
    manager.let_newcomers_in()
    assert manager.replicas == [other] and manager.dead == {wrong} and not manager.newcomers


def test_an_error_that_all_replicas_have_is_raised(make):
    manager = make(Wrong(0), Wrong(1))
    with pytest.raises(TimeoutError, match="2 admitted"):
        manager.update_weights(global_steps=4)
    assert not manager.updating and not manager.dead


@pytest.mark.parametrize("step", ["init_process_group", "load"])
def test_an_actor_that_fails_ends_the_update_at_once_and_kills_no_replica(make, monkeypatch, step):
    """The replicas wait for what it would send."""
    replicas = [Replica(0, **{step: "hangs"}), Replica(1, **{step: "hangs"})]
    manager = make(*replicas)

    async def fail():
        while any(each.log[-1][0] != step for each in replicas):
            await asyncio.sleep(0)
        raise ValueError("the actor is out of memory")

    method = {"init_process_group": "execute_checkpoint_engine", "load": "update_weights"}[step]
    verls = getattr(manager.actor_wg, method)

    def fail_in_time(method=("update_weights",), **arguments):
        return verls(method, **arguments) if method == ["prepare"] else [fail()]

    monkeypatch.setattr(manager.actor_wg, method, fail_in_time)
    rescue = threading.Timer(3, manager.dead.update, [replicas])  # the watch, after update_s
    rescue.start()
    with pytest.raises(ValueError, match="out of memory"):
        manager.update_weights(global_steps=4)
    rescue.cancel()
    assert not manager.dead and not manager.updating


def test_no_error_of_an_update_that_fails_stays_unread(make):
    """asyncio would print it when it is thrown away."""
    complaints, failing, hanging = [], Replica(0), Replica(1, load="hangs")
    manager = make(failing, hanging)

    async def fail(name):
        if name == "load":
            manager.fault = ValueError("we erred")
            raise OSError("a CUDA error")

    failing.call = fail

    async def update():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        with pytest.raises(RuntimeError, match="we erred"):
            await manager.update_weights(global_steps=4)
        gc.collect()

    asyncio.run(update())
    assert complaints == []


def test_an_update_without_a_server_left_sends_nothing(make):
    manager = make(Replica(0, abort="dead"))
    assert manager.update_weights(global_steps=4) == {}
    assert manager.replicas == [] and manager.actor_wg.sent == [] and manager.version == 4


def test_newcomers_get_the_next_update_and_belong_to_it_then(make):
    old, new = Replica(0), Replica(1)
    manager = make(old)
    manager.newcomers.append(new)
    manager.update_weights(global_steps=4)
    assert manager.replicas == [old, new] and manager.newcomers == []
    assert [name for name, _ in new.log] == [name for name, _ in old.log] == STEPS


def test_a_silent_replica_delays_no_update_and_comes_back_as_a_newcomer(make):
    silent, other = Replica(0, abort="hangs"), Replica(1)
    manager = make(silent, other)
    manager.suspected.add(silent)
    rescue = threading.Timer(5, manager.dead.add, [silent])  # of an update that waits for it
    rescue.start()
    manager.update_weights(global_steps=4)
    rescue.cancel()
    assert not silent.log and manager.replicas == [other] and manager.newcomers == [silent] and not manager.dead
    manager.let_newcomers_in()
    assert not silent.log and manager.newcomers == [silent]
    manager.suspected.clear()
    silent.at.clear()
    manager.let_newcomers_in()
    assert [name for name, _ in silent.log] == STEPS and manager.replicas == [other, silent] and not manager.newcomers


def test_replicas_are_updating_only_while_they_load(make):
    seen = []

    class Seen(Replica):
        async def call(self, name):
            seen.append((name, self in manager.updating))
            await super().call(name)

    manager = make(Seen(0))
    manager.update_weights(global_steps=4)
    assert [name for name, is_updating in seen if is_updating] == STEPS[2:6]
    assert [name for name, is_updating in seen if not is_updating] == STEPS[:2] + STEPS[6:]


def test_only_newcomers_get_the_weights_that_the_others_have(make):
    old, new = Replica(0), Replica(1)
    manager = make(old)
    manager.update_weights(global_steps=4)
    old.log.clear()
    manager.newcomers.append(new)
    manager.let_newcomers_in()
    assert manager.actor_wg.sent == [4, 4] and [name for name, _ in new.log] == STEPS and not old.log
    assert manager.replicas == [old, new] and manager.newcomers == []
