"""Keys of verl that docs/fleet.md names, and that nothing here runs: they are in the schema of the verl of the lock."""

import re

from verl_ext.settings import REPO, compose_run

SECTION = "## Prefill and decode apart, and multi-token prediction"


def named() -> list[str]:
    page = (REPO / "docs" / "fleet.md").read_text(encoding="utf-8")
    section = page.split(SECTION)[1].split("\n## ")[0]
    return re.findall(r"^\| `(\+?actor_rollout_ref\.\S+=\S+)` \|", section, re.MULTILINE)


def test_each_key_that_the_guide_names_is_verls(cpu_platform):
    from verl.utils.config import omega_conf_to_dataclass

    keys = named()
    assert len(keys) == 9
    overrides = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=false", *keys]
    overrides.append("+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method=mtp")
    rollout = omega_conf_to_dataclass(compose_run("tiny_dapo", overrides).actor_rollout_ref.rollout)
    apart, heads = rollout.disaggregation, rollout.mtp
    assert (apart.enabled, apart.prefill_replicas, apart.decode_replicas) == (True, 1, 2)
    assert (apart.decode_tensor_model_parallel_size, apart.transfer_backend) == (1, "nixl")
    assert heads.enable and heads.enable_rollout and heads.enable_train and heads.num_speculative_tokens == 1
    assert rollout.engine_kwargs["vllm"]["speculative_config"] == {"method": "mtp"}
