"""What is said of a run's memory; the formula itself: tests/unit/memory."""

import json
import re

import pytest

from verl_ext.doctor.finding import Level
from verl_ext.doctor.memory import check_memory, check_simulation, plan_of
from verl_ext.memory.estimate import estimate, kv_tokens
from verl_ext.memory.shape import ModelShape
from verl_ext.memory.words import GIB
from verl_ext.settings import REPO

FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"
DEFERS = f"{FSDP}.use_no_sync_for_gradient_accumulation=true"
H200_GIB = 139.8  # as torch reports it


def test_another_kind_of_model_is_not_estimated(make_run, make_machine, told, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    text = told(check_memory(make_run("tiny_dapo"), make_machine()), Level.WARN)[0]
    assert "model type 'mixtral', expected one of qwen2, qwen3, llama" in text
    unknown = make_run("qwen2-32b_dapo", "actor_rollout_ref.model.path=someone/something")
    assert "is not a folder with a config.json" in told(check_memory(unknown, make_machine()), Level.WARN)[0]


def test_a_run_that_fits(make_run, make_machine, only_ok):
    only_ok(check_memory(make_run("qwen2-32b_dapo"), make_machine(gpu_gib=H200_GIB)))
    only_ok(check_memory(make_run("qwen2-32b_sft", nnodes=2, nproc_per_node=8), make_machine(gpu_gib=H200_GIB)))
    only_ok(check_memory(make_run("qwen2-7b_dapo"), make_machine(gpu_gib=79.1)))


@pytest.mark.parametrize(
    ("overrides", "gpu_gib", "changes", "message"),
    [
        (["trainer.nnodes=1", FSDP2], 79.1, {}, "at about 93 GiB on each GPU: (4 + 4 + 8) x 32.76 billion"),
        (["trainer.nnodes=1"], H200_GIB, {"memory_bytes": 256 * GIB}, "host memory of a node is about 430 GiB"),
        ([f"{FSDP}.param_offload=false"], H200_GIB, {}, "the actor keeps 8"),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.gpu_memory_utilization=0.83"],
            79.1,
            {},
            "0.4 sequences of 18,432 tokens at once",
        ),
        ([DEFERS], 79.1, {}, "unsharded gradients 122.1 GiB"),
        ([DEFERS, "actor_rollout_ref.actor.strategy=fsdp"], 79.1, {}, "unsharded gradients 61.0 GiB"),
    ],
)
def test_a_run_that_does_not_fit(overrides, gpu_gib, changes, message, make_run, make_machine, told):
    run = make_run("qwen2-32b_dapo", "actor_rollout_ref.rollout.gpu_memory_utilization=0.95", *overrides)
    texts = told(check_memory(run, make_machine(gpu_gib=gpu_gib, **changes)), Level.FAIL)
    assert any(message in text for text in texts), texts


def test_what_is_close_is_a_warning(make_run, make_machine, told):
    # 85.0 GiB x 1.06 + 3 = 93.1 of 85, but 85.0 < 1.05 x 85 = 89.3
    run = make_run("qwen2-32b_dapo", "trainer.nnodes=1", FSDP2)
    assert any(
        "training peaks at about 93 GiB" in text for text in told(check_memory(run, make_machine(0), 85.0), Level.WARN)
    )
    # 366 GiB of weights and moments fit into 400, but not with the processes' 64 added
    tight = make_machine(memory_bytes=400 * GIB)
    assert "host memory of a node is about 430 GiB" in told(check_memory(run, tight), Level.WARN)[0]


def test_kv_cache_of_a_server(make_run, make_machine, told):
    # 0.9 x 139.8 - 3 - 2 x 32.764e9 / 4 / 2^30 (15.26) = 107.56 GiB a GPU; a token has 2 x 2 x 64 layers x 8 heads x
    # 128 = 262,144 bytes, over 4 GPUs 65,536: 107.56 x 2^30 / 65,536 = 1.762 million
    run = make_run("qwen2-32b_dapo")
    assert kv_tokens(run.shape, 107.56 * GIB, 4) == pytest.approx(1.762e6, rel=1e-3)
    assert any("1,762,314 tokens of KV cache" in text for text in told(check_memory(run, make_machine()), Level.OK))
    small = make_run("qwen2-32b_dapo", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    text = told(check_memory(small, make_machine(gpu_gib=79.1)), Level.WARN)
    assert any("generation is slow" in each for each in text), text


@pytest.mark.parametrize("given", ["null", "40960"])
def test_kv_cache_holds_what_vllm_takes_not_only_what_the_run_sends(given, make_run, make_machine, told, only_ok):
    # 0.6B: 2 x 2 x 28 layers x 8 heads x 128 = 114,688 bytes a token; 0.43 x 15.6 - 3 - 1.11 (weights) = 2.60 GiB, or
    # 24,311 tokens: enough for a prompt and a response, not for the model's 40,960 positions
    small = ["actor_rollout_ref.rollout.gpu_memory_utilization=0.43"]
    run, machine = make_run("qwen3-0.6b_dapo", *small), make_machine(1, gpu_gib=15.6)
    assert run.longest < 24_311
    assert not [each for each in check_memory(run, machine) if "KV cache" in each.message and each.level == Level.FAIL]
    texts = told(
        check_memory(make_run("qwen3-0.6b_dapo", *small, f"{ROLLOUT}.max_model_len={given}"), machine), Level.FAIL
    )
    text = next(text for text in texts if "KV cache" in text)
    assert "vLLM needs room for a sequence of max_model_len=40,960" in text
    assert f"or gpu_memory_utilization, or rollout.max_model_len={run.longest}." in text


def test_separate_async_has_servers_on_gpus_of_their_own(make_run, make_machine, told, only_ok):
    mode = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8"]
    settings = [f"{FSDP}.param_offload=false", f"{ROLLOUT}.gpu_memory_utilization=0.95"]
    machine = make_machine(gpu_gib=H200_GIB)
    assert (
        "while the run generates, vLLM takes"
        in told(check_memory(make_run("qwen2-32b_dapo", *settings), machine), Level.FAIL)[0]
    )
    alone = list(
        check_memory(make_run("qwen2-32b_dapo", *mode, "actor_rollout_ref.hybrid_engine=false", *settings), machine)
    )
    only_ok(alone)
    # 512 x 16 responses over 8 GPUs / 4 = 2 servers
    assert any("out of 4,096 in a step" in text for text in told(alone, Level.OK))
    # with the hybrid engine, verl's default, servers also use the actor's GPUs, and are awake while it validates
    hybrid = list(check_memory(make_run("qwen2-32b_dapo", *mode, *settings), machine))
    assert "while the run validates, vLLM takes" in told(hybrid, Level.WARN)[0]
    assert Level.FAIL not in {finding.level for finding in hybrid}


def test_without_gpus_the_formula_is_shown_and_nothing_compared(make_run, make_machine, only_ok, told):
    findings = list(check_memory(make_run(), make_machine(0)))
    only_ok(findings)
    assert any("there is no GPU here to compare with" in text for text in told(findings, Level.OK))
    with_size = list(check_memory(make_run("qwen2-32b_dapo", "trainer.nnodes=1"), make_machine(0), 79.1))
    assert "a GPU has 79" in told(with_size, Level.FAIL)[0]


@pytest.mark.parametrize("switch", ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"])
def test_the_reference_model_of_a_kl_term_is_on_the_host(switch, make_run):
    # fp32 on two nodes of eight GPUs: 4 x 32.76e9 x 8 / 16 bytes of each node
    without, with_kl = (estimate(plan_of(run)) for run in (make_run(), make_run("qwen2-32b_dapo", switch)))
    assert with_kl.host - without.host == with_kl.weights_on_host - without.weights_on_host == 2 * 32763876352
    assert with_kl.training == without.training and "the reference model 61.0 GiB, " in with_kl.terms["host"]
    half = make_run("qwen2-32b_dapo", switch, "actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16")
    assert estimate(plan_of(half)).host - without.host == 32763876352
    lora = make_run("qwen2-32b_dapo", switch, "actor_rollout_ref.model.lora_rank=8")  # the actor without its adapters
    assert "the reference model" not in estimate(plan_of(lora)).terms["host"]


def test_a_critic_is_not_in_the_estimate(make_run, make_machine, told):
    run = make_run("qwen2-32b_dapo", "algorithm.adv_estimator=gae")
    assert (
        "trains a critic, whose memory is not in this estimate"
        in told(check_memory(run, make_machine()), Level.WARN)[0]
    )


@pytest.mark.parametrize(
    ("override", "field", "expected"),
    [
        ("trainer.nnodes=1", "ranks", 8),
        ("trainer.n_gpus_per_node=4", "ranks_per_node", 4),
        (f"{FSDP}.fsdp_size=4", "ranks", 4),
        (f"{FSDP}.fsdp_size=64", "ranks", 16),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000", "tokens", 20_000),
        ("actor_rollout_ref.actor.use_dynamic_bsz=false", "tokens", 18_432 // 8),
        (f"{FSDP}.model_dtype=bf16", "weight_bytes", 2),
        (f"+{FSDP}.mixed_precision={{param_dtype: fp32}}", "compute_bytes", 4),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=false", "checkpointing", False),
        (f"{FSDP}.reshard_after_forward=false", "reshards", False),
        (f"{FSDP}.use_no_sync_for_gradient_accumulation=true", "defers_gradients", True),
        (FSDP2, "is_fsdp2", True),
        ("actor_rollout_ref.actor.strategy=fsdp", "is_fsdp2", False),
        ("trainer.nnodes=1", "fused", True),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.fused=false", "fused", False),
        ("actor_rollout_ref.actor.optim.override_optimizer_config=null", "fused", False),
        ("actor_rollout_ref.actor.calculate_entropy=true", "entropy", True),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "entropy", True),
        (f"{FSDP}.ulysses_sequence_parallel_size=4", "ulysses", 4),
        (f"{FSDP}.param_offload=false", "offloads_weights", False),
        (f"{FSDP}.optimizer_offload=false", "offloads_optimizer", False),
        ("actor_rollout_ref.actor.use_kl_loss=true", "reference_bytes", 4),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", "vllm_bytes", 1),
        (f"{ROLLOUT}.dtype=float32", "vllm_bytes", 1),  # 4 over 4 GPUs
        ("actor_rollout_ref.model.lora_rank=8", "vllm_sleeps_on_host", True),
        ("trainer.nnodes=1", "padded", 0),
        ("+hardware=no_flash_attn", "padded", 1),
        ("+hardware=no_flash_attn", "tokens", 18_432),
    ],
)
def test_the_formula_is_given_what_the_settings_say(override, field, expected, make_run):
    assert getattr(plan_of(make_run("qwen2-32b_dapo", override)), field) == expected


def test_sft_has_no_vllm(make_run):
    plan = plan_of(make_run("qwen2-32b_sft", nnodes=2, nproc_per_node=8))
    assert (plan.ranks, plan.ranks_per_node, plan.vllm_bytes) == (16, 8, 0)


def test_padding_counts_for_every_sequence_of_a_micro_batch(make_run, make_machine, told):
    run = make_run("qwen2-32b_sft", "model.use_remove_padding=false", nnodes=2, nproc_per_node=8)
    assert (plan_of(run).padded, plan_of(run).tokens) == (4, 16_384)  # 4 of 16,384 over 4 GPUs
    dynamic = make_run("qwen2-32b_dapo", "actor_rollout_ref.model.use_remove_padding=false")
    text = told(check_memory(dynamic, make_machine()), Level.WARN)[0]
    assert "use_dynamic_bsz does not count the padding" in text and "Set use_dynamic_bsz=false and micro_batch" in text
    assert "a training step with padding cannot be simulated" in told(check_simulation(dynamic), Level.WARN)[0]


def test_only_what_is_not_fused_is_advised_to_be(make_run, make_machine, told):
    tight = make_machine(0), 60.0
    fused, foreach = "", "actor_rollout_ref.actor.optim.override_optimizer_config.fused=false"
    for override, advised in ((fused, False), (foreach, True)):
        run = make_run("qwen2-32b_dapo", "trainer.nnodes=1", *[override] * bool(override))
        text = told(check_memory(run, *tight), Level.FAIL)[0]
        assert ("override_optimizer_config.fused=true" in text) == advised and "Use more GPUs, or" in text


@pytest.mark.timeout(120)
def test_a_simulation_has_a_row_for_each_kind_beside_the_estimate(make_run, told, tmp_path):
    assert "a training step cannot be simulated: " in told(check_simulation(make_run("tiny_dapo")), Level.WARN)[0]
    (tmp_path / "model").mkdir()
    shape = ModelShape("qwen2", 3, 128, 512, 4, 2, 32, 4096, False)
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape.config()))
    text = next(iter(check_simulation(make_run("tiny_dapo", FSDP2)))).message
    first, *rows = text.splitlines()
    assert "a simulated training step peaks at " in first and "; the estimate is " in first
    assert [row.split()[0] for row in rows] == "weights gradients optimizer activations logits temporary".split()
    weights, unit = rows[0].split()[1:]
    assert (unit, float(weights)) == ("MiB", pytest.approx(4 * shape.parameters / 2**20, abs=0.1))
    other = make_run("tiny_dapo", "actor_rollout_ref.actor.strategy=fsdp")
    assert "with fsdp2 instead of fsdp" in next(iter(check_simulation(other))).message


# LoRA ----------------------------------------------------------------------------------------------------------------


def test_only_adapters_have_gradients_and_moments(make_run):
    run = make_run("qwen3-4b_lora_dapo")
    weights, adapters = 4_022_468_096, 66_060_288  # of rank 32, as counted above
    memory = estimate(plan_of(run))
    assert memory.checkpoint == 4 * (weights + adapters) + 8 * adapters
    assert memory.sync == 2 * weights + 4 * (weights + adapters)  # vLLM's, and the actor's without its moments
    whole = make_run("qwen3-4b_dapo")
    saved = estimate(plan_of(whole)).training - memory.training
    assert 12 * (weights - adapters) * 0.98 < saved < 12 * weights  # including 1 layer's gradients
    assert "vLLM's weights while it sleeps 7.5 GiB" in memory.terms["host"]
    merged = estimate(plan_of(make_run("qwen3-4b_lora_dapo", "actor_rollout_ref.model.lora.merge=true")))
    assert "vLLM's weights while it sleeps" not in merged.terms["host"]  # at level 2, which drops them


def test_adapters_are_those_of_the_layers_that_are_named(make_run):
    def adapters(*overrides) -> int:
        return plan_of(make_run("qwen3-4b_lora_dapo", *overrides)).adapters

    # rank 32 x (inputs + outputs) x 36 layers: 2560 and 32 heads x 128
    queries = 32 * (2560 + 4096) * 36
    assert adapters("actor_rollout_ref.model.target_modules=[q_proj]") == queries
    assert adapters("actor_rollout_ref.model.exclude_modules=[q_proj]") == 66_060_288 - queries


ON_24_GB = [
    "data.max_response_length=4096",
    "reward.reward_kwargs.overlong_buffer_cfg.len=1024",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.75",
]


@pytest.mark.parametrize(
    ("name", "overrides", "gpu_gib", "host_gib"),
    [
        ("qwen3-0.6b_sft", [], 23.6, 16),
        ("qwen3-0.6b_sft", ["+lora=sft"], 15.6, 16),
        ("qwen3-0.6b_dapo", [], 23.6, 24),
        ("qwen3-0.6b_dapo", ["+lora=rl", "actor_rollout_ref.rollout.gpu_memory_utilization=0.7"], 15.6, 24),
        ("qwen3-4b_lora_dapo", [], 47.5, 48),
        ("qwen3-4b_lora_dapo", ON_24_GB, 23.6, 32),
    ],
)
def test_a_small_run_fits_the_gpu_that_its_launcher_names(
    name, overrides, gpu_gib, host_gib, make_run, make_machine, only_ok
):
    run = make_run(name, *overrides, **({"nnodes": 1, "nproc_per_node": 1} if name.endswith("_sft") else {}))
    only_ok(check_memory(run, make_machine(1, gpu_gib=gpu_gib, memory_bytes=host_gib * GIB)))
    launcher = (REPO / "recipe" / "retool" / f"run_{name}.sh").read_text().partition("\nset -")[0]
    yaml = (REPO / "configs" / f"{name}.yaml").read_text().partition("\ndefaults:")[0]
    for header in (launcher, yaml):
        assert f"{round(gpu_gib)} GB" in header and "y the doctor's estimate" in header
    assert all(override in launcher for override in overrides) and f"{host_gib} GB" in launcher


@pytest.mark.parametrize("name", ["qwen3-0.6b_dapo", "qwen3-4b_dapo", "qwen3-4b_lora_dapo"])
def test_a_checkpoint_has_the_size_that_its_yaml_names(name, make_run):
    named = re.search(r"# a checkpoint .*?is (\d+) GB", (REPO / "configs" / f"{name}.yaml").read_text())
    assert int(named[1]) == round(estimate(plan_of(make_run(name))).checkpoint / 1e9)


def test_fewer_gigabytes_than_that_are_told(make_run, make_machine, told):
    told(check_memory(make_run("qwen3-0.6b_dapo"), make_machine(1, gpu_gib=15.6)), Level.WARN)
    told(check_memory(make_run("qwen3-4b_lora_dapo"), make_machine(1, gpu_gib=23.6)), Level.FAIL)
