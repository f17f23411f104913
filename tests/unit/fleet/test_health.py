"""When a server counts as dead, with a fake clock and scripted heartbeats."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.unit.fleet.members_scene import as_the_doctors
from verl_ext.fleet.health import Health, Pulse, State, refusals
from verl_ext.fleet.modes import IN_SERVER
from verl_ext.settings import HealthSettings, compose_run
from verl_ext.settings.checks import problems, read_settings

LIMITS = HealthSettings(
    every_s=1, suspect_s=3, dead_s=10, update_s=100, start_s=20, attempts=3, wait_s=1, max_replacements=1
)
ON = {
    "retool.fleet.health.enable": True,
    "trainer.v1.trainer_mode": "separate_async",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.rebuild_group": True,
}


class Scene:
    """A server that was started at 0 s, looked at once a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.health = Health(LIMITS, clock=lambda: self.now)

    def until(self, second: float, *, answers: bool = True, updating: bool = False) -> State:
        while self.now < second:
            self.now += 1
            if answers:
                self.health.answered()
            self.health.look(updating)
        return self.health.state


def test_a_server_that_answers_is_well_once_it_is_no_longer_young():
    scene = Scene()
    assert scene.until(19) is State.STARTING and scene.health.takes_requests
    assert scene.until(500) is State.WELL and scene.health.takes_requests


def test_a_killed_engine_is_dead_at_once_and_for_good():
    scene = Scene()
    scene.until(30)
    scene.health.failed("its engine is dead")
    assert scene.until(40) is State.DEAD and not scene.health.takes_requests
    scene.health.failed("another reason")
    assert scene.health.why == "its engine is dead"


def test_a_stopped_engine_is_suspected_then_dead():
    scene = Scene()
    scene.until(30)
    assert scene.until(33, answers=False) is State.WELL
    assert scene.until(34, answers=False) is State.SUSPECTED and not scene.health.takes_requests
    assert scene.until(40, answers=False) is State.SUSPECTED
    assert scene.until(41, answers=False) is State.DEAD
    assert scene.health.why == "its engine did not answer for 11.0 s; the limit is 10 s (retool.fleet.health)"


def test_a_slow_engine_that_answers_now_and_then_stays_alive():
    scene = Scene()
    scene.until(30)
    for _ in range(20):
        assert scene.until(scene.now + 9, answers=False) is State.SUSPECTED
        assert scene.until(scene.now + 1) is State.WELL


def test_silence_while_weights_change_is_not_a_death_and_is_forgotten_after_it():
    scene = Scene()
    scene.until(30)
    assert scene.until(125, answers=False, updating=True) is State.WELL
    assert scene.until(128, answers=False) is State.WELL
    assert scene.until(140, answers=False) is State.DEAD


def test_silence_before_an_update_does_not_count_in_it():
    scene = Scene()
    scene.until(30)
    scene.until(39, answers=False)
    assert scene.until(139, answers=False, updating=True) is State.SUSPECTED
    assert scene.until(140, updating=True) is State.WELL


def test_an_engine_that_is_stopped_in_an_update_is_dead_after_the_updates_limit():
    scene = Scene()
    scene.until(30)
    assert scene.until(130, answers=False, updating=True) is not State.DEAD
    assert scene.until(131, answers=False, updating=True) is State.DEAD
    assert "the limit is 100 s while its weights change" in scene.health.why


def test_a_young_server_may_compile_for_longer_and_gets_requests():
    scene = Scene()
    assert scene.until(19, answers=False) is State.STARTING and scene.health.takes_requests
    assert scene.until(20, answers=False) is State.DEAD  # 20 s of silence: the grace is over


def test_silence_of_a_young_server_ends_with_an_answer():
    scene = Scene()
    scene.until(18, answers=False)
    assert scene.until(19) is State.STARTING
    assert scene.until(25, answers=False) is State.SUSPECTED


def test_a_server_is_young_again_at_its_first_requests():
    scene = Scene()
    scene.until(30)
    scene.health.begins()
    assert scene.until(49, answers=False) is State.STARTING and scene.health.takes_requests
    assert scene.until(50, answers=False) is State.DEAD


def test_a_suspected_server_stays_so_at_its_first_requests():
    scene = Scene()
    scene.until(30)
    scene.until(35, answers=False)
    scene.health.begins()
    assert not scene.health.takes_requests


def test_time_in_which_the_watcher_itself_stood_still_is_not_silence():
    scene = Scene()
    scene.until(30)
    scene.now += 3600
    assert scene.health.look() is State.WELL  # two seconds of it count
    assert scene.until(scene.now + 7, answers=False) is State.SUSPECTED
    assert scene.until(scene.now + 2, answers=False) is State.DEAD


def refused(changes):
    return [*refusals(as_the_doctors(ON | changes))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.v1.trainer_mode": "sync"}, "trainer_mode=sync: expected separate_async"),
        ({"actor_rollout_ref.hybrid_engine": True}, "hybrid_engine=true"),
        ({"actor_rollout_ref.rollout.name": "sglang"}, "name=sglang"),
        ({"actor_rollout_ref.rollout.agent.agent_loop_manager_class": IN_SERVER}, "never ask a router"),
        ({"actor_rollout_ref.rollout.checkpoint_engine.backend": "delta_sharded"}, "backend=delta_sharded"),
        ({"actor_rollout_ref.rollout.checkpoint_engine.backend": "kimi_ckpt_engine"}, "kimi_ckpt_engine keeps"),
        (
            {"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.rebuild_group": None},
            "Set ++actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.rebuild_group=true",
        ),
    ],
)
def test_a_run_whose_servers_cannot_be_watched_is_refused(changes, message):
    (text,) = refused(changes)
    assert message in text and " -> " in text and "retool.fleet.health.enable=false" in text
    assert not refused(changes | {"retool.fleet.health.enable": False})


def test_the_key_that_makes_a_group_anew_is_verls():
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "checkpoint_engine"
    assert "checkpoint_engine.engine_kwargs.get(backend, {})" in (folder / "base.py").read_text()
    for name, line, what in (
        ("nccl", 297, "if self.rebuild_group or not collective.is_group_initialized(self.group_name):"),
        ("hccl", 215, "if self.rebuild_group or self.pyhccl is None:"),
        ("kimi", 303, "if not self.initialized:"),
    ):
        lines = (folder / f"{name}_checkpoint_engine.py").read_text().splitlines()
        assert lines[line - 1].strip() == what and "rebuild_group: bool = False," in "".join(lines)
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    (remedy,) = re.findall(r"Set (\S+),", refused({f"{engine}.engine_kwargs.nccl.rebuild_group": None})[0])
    config = compose_run("tiny_dapo", ["hardware=cpu_separate", f"{engine}.backend=nccl", remedy])
    assert config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.rebuild_group is True


def test_a_run_with_dedicated_servers_is_not_refused():
    assert not refused({})


def test_dedicated_servers_are_watched_if_a_config_has_them_and_others_are_not():
    assert read_settings(compose_run("tiny_dapo"), "fleet.health", HealthSettings) is None
    config = compose_run("tiny_dapo", ["hardware=cpu_separate"])
    assert read_settings(config, "fleet.health", HealthSettings).dead_s == 30
    assert config.retool.fleet.routing == "ring"


def test_limits_in_the_wrong_order_are_refused():
    section = vars(LIMITS) | {"enable": True, "dead_s": 3}
    (problem,) = problems(section, HealthSettings, "retool.fleet.health")
    assert "expected 2 x every_s <= suspect_s < dead_s <= update_s" in str(problem)


def test_a_pulse_is_silent_while_no_round_ends_and_somebody_looks():
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    for at, rounds, silent_s in [(1, 1, 0), (5, 1, 4), (9, 1, 8), (10, 2, 0), (14, 2, 4)]:
        now[0], pulse.rounds = float(at), rounds
        assert pulse.silent_s() == silent_s


def test_time_in_which_nobody_looked_at_a_pulse_is_not_silence():
    """The whole process may have stood still: only the 10 s of a look count, even after an hour."""
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    now[0], pulse.rounds = 1.0, 1
    pulse.silent_s()
    now[0] = 3600.0
    assert pulse.silent_s() == 10
