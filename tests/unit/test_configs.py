"""configs/*.yaml against verl's own schema; test_launchers.py has the launchers that run them.

Hydra accepts an unknown key inside a YAML without a word, so a misspelt one would silently do nothing. The tests
compose with Hydra only and read verl's sources. A value that several runs share is set once, in configs/shared.
"""

import ast
import copy
import functools
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_ext.checkpoints.rolling import Rolling
from verl_ext.doctor.schema import (
    KEYS_WITHOUT_EFFECT,
    has_type_of,
    is_field_of_own_class,
    is_known,
    is_open,
    is_within,
    own_keys,
    own_parts,
    own_yaml,
    schema,
)
from verl_ext.evaluation.store import flatten
from verl_ext.settings import Retool, SftData, SftRetool
from verl_ext.settings import compose_run as composed
from verl_ext.settings.checks import known_keys

ROOT = Path(__file__).parents[2]
RUNS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SHARED = sorted(f"shared/{path.stem}" for path in (ROOT / "configs" / "shared").glob("*.yaml"))
OPTIONS = sorted(f"lora/{path.stem}" for path in (ROOT / "configs" / "lora").glob("*.yaml"))  # `+lora=rl`
PUBLISHED_RUN = "qwen2-32b_dapo_published"  # without dynamic sampling and overlong shaping
RL_RUNS = [run for run in RUNS if "_dapo" in run]
SFT_RUNS = [run for run in RUNS if run.endswith("_sft")]

# The published runs: verl-recipe@48ea0a7 retool/run_qwen2-32b_{sft,dapo}.sh, and for SFT the defaults of verl 0.6.1.
PUBLISHED = {
    "qwen2-32b_sft": {
        "data.train_batch_size": 32,
        "data.micro_batch_size_per_gpu": 4,
        "data.use_dynamic_bsz": False,
        "data.max_length": 16384,
        "model.use_remove_padding": True,
        "engine.ulysses_sequence_parallel_size": 4,
        "optim.lr": 1e-5,
        "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.betas": [0.9, 0.95],
        "trainer.total_epochs": 6,
    },
    "qwen2-32b_dapo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "data.train_batch_size": 512,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 16384,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.clip_ratio_c": 10.0,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048 + 16384,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 8,
        "actor_rollout_ref.actor.fsdp_config.param_offload": True,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
        "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.rollout.temperature": 1.0,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.9,
        "actor_rollout_ref.rollout.val_kwargs.n": 30,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        "actor_rollout_ref.rollout.val_kwargs.top_p": 0.6,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
        "trainer.save_freq": 30,
        "trainer.test_freq": 5,
    },
}


composed_once = functools.cache(composed)


def entry(run: str) -> str:
    """Return verl's YAML that a run begins with."""
    return "ppo_trainer" if run in RL_RUNS else "sft_trainer_engine"


@pytest.mark.parametrize("run", RUNS)
def test_verl_knows_every_key(run: str):
    keys = [key for key in own_keys(run) if not is_open(key)]
    known = schema(entry(run))
    assert [key for key in keys if not (is_known(key, known) or is_field_of_own_class(key, composed_once(run)))] == []
    assert len(keys) > 5


# Keys that count something else in SFT (traces) than in RL (problems), so that an equal number there says nothing.
COUNTS = {"data.train_batch_size", "trainer.total_epochs"}


def test_no_two_yamls_say_the_same():
    """Runs and what they share set each value in one YAML. `???` does not count as a value."""
    said = defaultdict(list)
    for name in RUNS + SHARED + OPTIONS:
        tree = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / f"{name}.yaml"))
        tree.pop("defaults", None)
        for key, value in flatten(tree).items():
            said[key, repr(value), key in COUNTS and name.endswith("sft")].append(name)
    twice = [f"{key}: {value} in {' and '.join(places)}" for (key, value, _), places in said.items() if places[1:]]
    assert [text for text in twice if "'???'" not in text] == [], "move it to a YAML of configs/shared that both name"


def test_a_run_is_made_of_verls_config_then_what_is_shared_then_its_own():
    assert [*own_parts("qwen2-32b_sft")] == ["shared/every_run", "shared/sft", "qwen2-32b_sft"]  # the last one counts
    assert [*own_parts("hardware/cpu_separate")] == ["hardware/cpu", "hardware/cpu_separate"]  # it says `cpu`
    assert [*own_parts("tiny_dapo")][-1] == "hardware/cpu"
    assert own_keys("qwen2-32b_dapo")["retool.protocol"] == "code"  # shared/retool
    assert own_keys("qwen2-32b_dapo_published")["retool.protocol"] == "hermes"  # shared/hermes, on top of it
    assert own_keys("qwen2-32b_dapo_published")["retool.max_tool_calls"] == 7  # its own
    assert set(SHARED) <= {name for run in RUNS for name in own_parts(run)}


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("actor_rollout_ref.actor.clip_ratio_high", True),
        ("actor_rollout_ref.actor.clip_higher", False),  # no such key
        ("actor_rollout_ref.rollout.enable_sleep_mode", True),  # in RolloutConfig, not in rollout.yaml
        (
            "actor_rollout_ref.actor.fsdp_config.max_token_len_per_gpu",
            True,
        ),  # in EngineConfig, a base of FSDPEngineConfig
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.anything", True),  # handed on to vLLM
        ("trainer.v1.sampler.sampler_kwargs.anything", True),  # handed on to the sampler
        ("trainer.savefreq", False),
        ("trainer.save_freq.unit", False),
        ("data.max_length", False),  # SFT's
    ],
)
def test_key_check_tells_known_from_unknown(key: str, known: bool):
    assert is_known(key, schema("ppo_trainer")) is known


@pytest.mark.parametrize(
    ("key", "known"), [("lr_decay_steps_ratio", True), ("betas", True), ("lr_decay_ratio", False), ("fused", False)]
)
def test_key_check_knows_the_fields_of_our_optimizer_section(key: str, known: bool):
    config = composed_once("qwen2-32b_dapo")
    assert is_field_of_own_class(f"actor_rollout_ref.actor.optim.{key}", config) is known
    assert not is_field_of_own_class(f"critic.optim.{key}", config)


@pytest.mark.parametrize("run", RUNS)
def test_values_have_the_type_of_verls_default(run: str):
    defaults = flatten(schema(entry(run)))
    for key, value in own_keys(run).items():
        is_word = key == "trainer.save_freq" and value == "after_each_epoch"
        assert is_word or has_type_of(value, defaults.get(key)), f"{key}: {value!r}"


@pytest.mark.parametrize("run", RUNS)
def test_no_key_without_effect_is_set(run: str):
    dead = {
        key: use for key in own_keys(run) for section, use in KEYS_WITHOUT_EFFECT.items() if is_within(key, section)
    }
    assert dead == {}


def test_every_section_without_effect_exists_in_verl():
    schemas = [schema("ppo_trainer"), schema("sft_trainer_engine")]
    assert [key for key in KEYS_WITHOUT_EFFECT if not any(is_known(key, tree) for tree in schemas)] == []


@pytest.mark.parametrize("run", RUNS)
def test_settings_has_a_field_for_every_retool_key_and_every_field_has_a_key(run: str):
    config = OmegaConf.to_container(composed_once(run), resolve=False)
    if run in SFT_RUNS:
        assert flatten(config["data"]["retool"], "data.retool.").keys() == set(known_keys(SftData, "data.retool"))
        assert flatten(config["retool"], "retool.").keys() == set(known_keys(SftRetool, "retool"))
    else:
        assert flatten(config["retool"], "retool.").keys() == set(known_keys(Retool, "retool"))


def test_verl_ext_reads_every_field_of_its_settings():
    paths = [path for path in (ROOT / "verl_ext").rglob("*.py") if path.parent.name != "settings"]
    source = "\n".join(path.read_text() for path in paths)
    keys = [*known_keys(Retool, "retool"), *known_keys(SftData, "data.retool")]
    assert [key for key in keys if not re.search(rf"\b{key.split('.')[-1]}\b", source)] == []


@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_roll_by_a_validation_that_the_run_has(run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = copy.deepcopy(composed_once(run))
    config.trainer.default_local_dir = str(tmp_path)
    trainer, retool = config.trainer, OmegaConf.to_container(config.retool)
    rolling = Rolling.from_config({"trainer": OmegaConf.to_container(trainer, resolve=True), "retool": retool})
    assert retool["checkpoints"].keys() == {"keep_last", "best_metric", "best_mode"}
    assert rolling.keep_last >= 1 and caplog.text == ""


@pytest.mark.parametrize(("run", "key", "expected"), [(r, k, v) for r in PUBLISHED for k, v in PUBLISHED[r].items()])
def test_published_parameter(run: str, key: str, expected: Any):
    assert OmegaConf.select(composed_once(run), key) == expected


@pytest.mark.parametrize("run", RL_RUNS)
def test_all_four_parts_of_dapo_are_on_but_in_the_published_run_and_kl_is_off(run: str):
    config = composed_once(run)
    actor, reward = config.actor_rollout_ref.actor, config.reward.reward_kwargs
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert config.algorithm.filter_groups.enable == reward.overlong_buffer_cfg.enable == (run != PUBLISHED_RUN)
    assert reward.get("tool_bonus", False) == (run == PUBLISHED_RUN)
    assert config.algorithm.filter_groups.metric in ("acc", "train_acc")
    assert actor.loss_agg_mode == "token-mean"
    assert reward.overlong_buffer_cfg.penalty_factor == 1.0
    assert 0 < reward.overlong_buffer_cfg.len < reward.max_resp_len == config.data.max_response_length
    assert config.algorithm.adv_estimator == "grpo"
    assert not (config.algorithm.use_kl_in_reward or actor.use_kl_loss)


@pytest.mark.parametrize("run", RL_RUNS)
def test_text_rl_differs_only_in_the_tool(run: str):
    with_tool, without = composed_once(run), composed(run, ["+tool=none"])
    assert (without.retool.protocol, without.retool.environment) == ("text", [])
    for key in ("retool.protocol", "retool.environment"):
        OmegaConf.update(without, key, OmegaConf.select(with_tool, key))
    assert without == with_tool


@pytest.mark.parametrize("run", SFT_RUNS)
def test_sft_of_text_rl_differs_only_in_the_protocol(run: str):
    without = composed(run, ["+tool=none_sft"])
    assert without.data.retool.protocol == "text"
    without.data.retool.protocol = composed_once(run).data.retool.protocol
    assert without == composed_once(run)


@pytest.mark.parametrize("run", RL_RUNS)
def test_sampler_filters_by_the_metric_of_the_algorithm_section(run: str):
    config = copy.deepcopy(composed_once(run))
    config.algorithm.filter_groups.metric = "another"
    assert config.trainer.v1.sampler.sampler_kwargs.filter_groups.metric == "another"


@pytest.mark.parametrize("run", RL_RUNS)
def test_rl_batches_divide_and_sequences_fit(run: str):
    config = composed_once(run)
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    ulysses = actor.fsdp_config.ulysses_sequence_parallel_size
    longest = config.data.max_prompt_length + config.data.max_response_length  # tokens
    assert rollout.n > 1, "a group of one has advantage 0"
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert gpus % ulysses == 0 and gpus % rollout.tensor_model_parallel_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % (gpus // ulysses) == 0
    assert actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu * ulysses >= longest
    assert rollout.max_model_len == longest
    assert config.retool.max_tool_response_tokens < config.data.max_response_length


@pytest.mark.parametrize("run", RL_RUNS)
def test_vllm_holds_the_longest_sequence_whatever_lengths_a_user_sets(run: str):
    rollout = composed(run, ["data.max_prompt_length=300", "data.max_response_length=700"]).actor_rollout_ref.rollout
    assert rollout.max_model_len == 1000


@pytest.mark.nightly
def test_a_process_that_only_imports_verl_can_resolve_a_run():
    """Like Ray's task runner, which gets the run as it was composed (verl/trainer/main_ppo.py:145)."""
    code = (
        "import pickle, sys, verl\nfrom omegaconf import OmegaConf\n"
        "print(OmegaConf.to_container(pickle.load(sys.stdin.buffer), resolve=True))"
    )
    config = OmegaConf.create({"a": 2, "sum": "${retool.sum:${a},3}", "product": "${retool.product:${a},3}"})
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "verl_ext"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(config), env=environment, capture_output=True, timeout=200
    )
    resolved = ast.literal_eval(done.stdout.decode().splitlines()[-1])
    assert resolved == {"a": 2, "sum": 5, "product": 6}, done.stderr.decode()


@pytest.mark.parametrize("run", RUNS)
def test_every_run_shards_by_fsdp2_as_those_do_that_were_run(run: str):
    config = composed_once(run)
    if run in SFT_RUNS:
        assert config.engine.strategy == "fsdp2"
    else:
        assert {config.actor_rollout_ref[part].strategy for part in ("actor", "ref")} == {"fsdp2"}


@pytest.mark.parametrize("run", RUNS)
def test_every_run_has_adamws_fused_kernel(run: str):
    config = composed_once(run)
    optim = config.optim if run in SFT_RUNS else config.actor_rollout_ref.actor.optim
    assert optim.override_optimizer_config.fused is True, "foreach takes 4 bytes per parameter more"


@pytest.mark.parametrize("run", SFT_RUNS)
def test_sft_batches_divide_and_sequences_fit(run: str):
    config = composed_once(run)
    if config.data.use_dynamic_bsz:
        assert (
            config.data.max_token_len_per_gpu * config.engine.ulysses_sequence_parallel_size >= config.data.max_length
        )
    else:
        assert config.data.train_batch_size % config.data.micro_batch_size_per_gpu == 0


def defined_makers(module: str) -> set[str]:
    path = ROOT / f"{module.replace('.', '/')}.py"
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("run", RUNS)
def test_every_class_that_a_config_names_exists(run: str):
    config = composed_once(run)
    if run in SFT_RUNS:
        named = [(config.data.custom_cls.path, config.data.custom_cls.name)]
    else:
        manager, sampler = config.reward.reward_manager, config.trainer.v1.sampler.custom_sampler
        assert manager.source == "importlib"
        named = [(manager.module.path, manager.name), (sampler.path, sampler.name)]
        agent = config.actor_rollout_ref.rollout.agent
        loops = {loop.name: loop._target_ for loop in OmegaConf.load(ROOT / agent.agent_loop_config_path)}
        named.append(loops[agent.default_agent_loop].rsplit(".", 1))
    for path, name in named:
        assert name in defined_makers(path.removeprefix("pkg://")), f"{path} has no class or function {name}"


@pytest.mark.parametrize("run", RL_RUNS)
def test_the_workers_of_a_run_tell_its_recorder(run: str):
    from verl_ext.trainer.run_records import check_recorder

    config = composed_once(run)
    assert config.retool.recorder.enable
    check_recorder(config)


def test_separate_rollouts_on_a_cpu_have_what_verl_wants():
    keys = [key for key in flatten(own_yaml("hardware/cpu_separate")) if not is_open(key)]
    assert [key for key in keys if not is_known(key, schema("ppo_trainer"))] == []
    config = composed("tiny_dapo", ["hardware=cpu_separate"])
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    mini_batches = trainer.v1.separate_async.parameter_sync_step * config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert config.data.train_batch_size == mini_batches
    servers = rollout.nnodes * rollout.n_gpus_per_node
    assert config.ray_kwargs.ray_init.num_gpus == servers + trainer.nnodes * trainer.n_gpus_per_node
    engine = importlib.util.find_spec(rollout.checkpoint_engine.custom_backend_module)
    assert f'register("{rollout.checkpoint_engine.backend}")' in Path(engine.origin).read_text()
    assert trainer.device == "cpu" and rollout.agent.agent_loop_manager_class.endswith(".LeanAgentLoopManager")


@pytest.mark.parametrize("run", [run for run in RL_RUNS if "lora" not in run and "tiny" not in run])
def test_separate_rollouts_on_gpus_fit_every_run(run: str):
    """Keys, names, batches and what the servers' health needs; the machine itself is not looked at."""
    from verl_ext.doctor.batch import check_batch
    from verl_ext.doctor.run import Run
    from verl_ext.fleet import balancer, health
    from verl_ext.fleet.modes import getter

    config = composed(run, ["+hardware=gpu_separate"])
    keys = [key for key in flatten(own_yaml("hardware/gpu_separate")) if not is_open(key)]
    assert [key for key in keys if not is_known(key, schema("ppo_trainer"))] == []
    assert [*health.refusals(getter(config)), *balancer.refusals(getter(config))] == []
    assert [finding.message for finding in check_batch(Run(run, config)) if finding.level != "OK"] == []
