"""Which runs can use which mode of `retool.fleet.weight_update`."""

import pytest

from tests.unit.fleet.members_scene import as_the_doctors
from verl_ext.fleet.weight_update import install, refusals
from verl_ext.settings import compose_run

KEEP = {
    "retool.fleet.weight_update": "keep",
    "trainer.v1.trainer_mode": "separate_async",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "algorithm.rollout_correction.bypass_mode": True,
}
ROLLOUT, LORA = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BYPASS, WEIGHTS = "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.rollout_is"


def refused(changes):
    return [*refusals(as_the_doctors(KEEP | changes))]


@pytest.mark.parametrize("changes", [{}, {BYPASS: False, WEIGHTS: "token"}, {BYPASS: None, WEIGHTS: "sequence"}])
def test_keep_takes_an_objective_that_uses_the_rollouts_log_probs(changes):
    assert not refused(changes)


def test_log_probs_of_a_mixed_cache_are_not_computed_again():
    (text,) = refused({BYPASS: False})
    assert "bypass_mode=false and rollout_is=null" in text and "objective=glm5_async" in text
    assert not refused({BYPASS: False, "retool.fleet.weight_update": "drain"})


@pytest.mark.parametrize("mode", ["drain", "keep"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.v1.trainer_mode": "sync"}, "expected separate_async"),
        ({"trainer.v1.trainer_mode": "colocate_async"}, "trainer_mode=colocate_async"),
        ({"actor_rollout_ref.hybrid_engine": True}, "hybrid_engine=true"),
        ({"actor_rollout_ref.hybrid_engine": None}, "hybrid_engine=true"),  # verl's default
        ({f"{ROLLOUT}.name": "sglang"}, "name=sglang"),
        ({f"{ROLLOUT}.disaggregation.enabled": True}, "disaggregation"),
    ],
)
def test_only_vllms_servers_on_dedicated_gpus_have_it(mode, changes, message):
    (text,) = refused(changes | {"retool.fleet.weight_update": mode})
    assert message in text and f"weight_update is {mode}" in text and " -> " in text
    assert not refused(changes | {"retool.fleet.weight_update": "abort"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ROLLOUT}.free_cache_engine": True}, "free_cache_engine=true"),
        ({f"{ROLLOUT}.free_cache_engine": None}, "free_cache_engine=true"),  # verl's default
        ({f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config": {"kv_connector": "x"}}, "kv_transfer_config"),
        ({f"{LORA}.lora_rank": 8}, "adapters of rank 8"),
        ({f"{LORA}.lora.rank": 4}, "adapters of rank 4"),
    ],
)
def test_keep_refuses_what_would_drop_or_mix_up_the_cache(changes, message):
    (text,) = refused(changes)
    assert message in text and " -> " in text
    assert not refused(changes | {"retool.fleet.weight_update": "drain"})


def test_adapters_that_are_merged_are_weights():
    assert not refused({f"{LORA}.lora_rank": 8, f"{LORA}.lora.merge": True})


@pytest.fixture
def registered(cpu_platform, monkeypatch):
    """What is registered with verl from now on: name -> what loads the class."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    loads = {}
    monkeypatch.setattr(RolloutReplicaRegistry, "register", lambda name, load: loads.update({name: load}))
    return loads


def composed(mode, objective="glm5_async", *overrides):
    overrides = (f"objective={objective}", f"retool.fleet.weight_update={mode}", *overrides)
    return compose_run("tiny_dapo", ["hardware=cpu_separate", *overrides])


@pytest.mark.timeout(180)  # vLLM's import
@pytest.mark.parametrize(
    ("mode", "replica"), [("abort", "FleetReplica"), ("drain", "DrainReplica"), ("keep", "KeepReplica")]
)
def test_verl_gets_the_replica_of_the_mode(registered, mode, replica):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    install(composed(mode))
    assert registered["vllm"]().__name__ == replica


@pytest.mark.parametrize("override", ["trainer.v1.trainer_mode=sync", "actor_rollout_ref.rollout.name=sglang"])
def test_verls_own_stays_if_no_request_meets_an_update_and_with_other_servers(registered, override):
    install(composed("abort", "dapo", override, "retool.fleet.health.enable=false"))
    assert registered == {}


@pytest.mark.timeout(180)  # vLLM's import
@pytest.mark.parametrize("mode", ["abort", "drain", "keep"])
def test_ray_can_send_the_servers_class(cpu_platform, mode):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import ray

    from verl_ext.fleet import server

    name = {"abort": "FleetServer", "drain": "DrainServer", "keep": "KeepServer"}[mode]
    actor = ray.remote(getattr(server, name))
    ray.cloudpickle.dumps(actor.__ray_metadata__.modified_class)


def test_the_start_of_a_run_says_what_is_wrong_and_what_to_do(registered):
    with pytest.raises(ValueError, match=r"rollout_is=null: the trainer would use its own .* versions\. Use an obj"):
        install(composed("keep", "dapo"))
    assert registered == {}
