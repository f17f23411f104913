"""The estimate: against torch's own count of a real FSDP model, and against what the published run logged."""

import dataclasses
import json

import pytest

from verl_ext.doctor.finding import Level
from verl_ext.doctor.memory import check_memory, estimate, kv_tokens
from verl_ext.doctor.run import GIB
from verl_ext.doctor.shape import ModelShape, read_shape

FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
H200_GIB = 139.8  # as torch tells it


# sum(p.numel()) of the whole models made on the meta device
EXPECTED = {
    "Qwen2.5-32B-Instruct": 32763876352,
    "Qwen2.5-7B-Instruct": 7615616512,
    "Qwen3-4B-Instruct-2507": 4022468096,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters_are_those_that_transformers_makes(name, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = read_shape(f"Qwen/{name}")
    assert whole.parameters == EXPECTED[name]
    shape = dataclasses.replace(whole, layers=2)  # of which all others are copies
    config = AutoConfig.for_model(
        shape.model_type,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        **({"head_dim": shape.head_dim} if shape.model_type == "qwen3" else {}),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    config.save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) == shape


def test_another_kind_of_model_is_not_estimated(make_run, make_machine, told, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    text = told(check_memory(make_run("tiny_dapo"), make_machine()), Level.WARN)[0]
    assert "model type 'mixtral', expected one of qwen2, qwen3, llama" in text
    unknown = make_run("qwen2-32b_dapo", "actor_rollout_ref.model.path=someone/something")
    assert "is no folder with a config.json" in told(check_memory(unknown, make_machine()), Level.WARN)[0]


# A real FSDP model ---------------------------------------------------------------------------------------------------

WORLD = 4


@pytest.fixture
def fake_world():
    """One process that shards as one of WORLD; what others would send is not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def measure(shape: ModelShape, tokens: int, *, checkpointing: bool) -> dict[str, int]:
    """Bytes by kind at the peak of a training step of two micro-batches, as verl's FSDP engine makes it, in bf16.

    The loss takes one copy of the logits for their gradient, as flash-attention's cross entropy does.
    """
    import torch
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM, Qwen2Config

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.save_for_backward(logits)
            return torch.stack([rows.float().logsumexp(-1).sum() for rows in logits.split(32)]).sum()

        @staticmethod
        def backward(ctx, _):
            (logits,) = ctx.saved_tensors
            gradient = torch.empty_like(logits)
            for rows, of in zip(gradient.split(32), logits.split(32), strict=True):
                rows.copy_(of.float().softmax(-1))
            return gradient

    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config).float().train()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, shape.vocabulary, (1, tokens))
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        for micro_batches in (1, 2):  # the optimizer's state is made in the first step
            for _ in range(micro_batches):
                CrossEntropy.apply(model(input_ids=ids).logits[0]).backward()
                tracker.reset_mod_stats()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(kind).rpartition(".")[2]: number for kind, number in peak.items()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("vocabulary", "checkpointing"),
    [(128, True), (4096, True), (128, False)],
    ids=["layer", "logits", "no-checkpointing"],
)
def test_estimate_agrees_with_torchs_count_of_a_sharded_model(vocabulary, checkpointing, make_run, fake_world):
    tokens = 256
    shape = ModelShape("qwen2", 2, 128, 512, 4, 2, 32, vocabulary, False)
    run = make_run(
        "qwen2-32b_dapo",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={WORLD}",
        f"{FSDP}.ulysses_sequence_parallel_size=1",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={str(checkpointing).lower()}",
    )
    seen = measure(shape, tokens, checkpointing=checkpointing)
    # weights 4 P / 4 ranks, gradients the same, Adam's moments twice that (and its step counters)
    assert seen["SHARDED_PARAM"] == seen["SHARDED_GRAD"] == shape.parameters
    assert seen["OPT"] == pytest.approx(2 * shape.parameters, rel=1e-3)
    assert estimate(run, shape).training == pytest.approx(seen["Total"], rel=0.12)


# The published run ---------------------------------------------------------------------------------------------------

LOGGED_GIB = (214.8, 216.1)  # perf/max_memory_allocated_gb of its first and tenth step, /1024**3 whatever its name says


def test_estimate_agrees_with_the_published_log_if_that_counts_a_sleeping_vllm(make_run):
    """214.8 GiB are more than an H200 has, so not all of it was there at once.

    Inferred, not read: that run's verl (0.5 or 0.6) had vLLM's worker in the actor's process, and torch goes on
    counting vLLM's pool as allocated when sleep mode has given its pages back (vllm pull 11743, verl pull 1101). Then
    the log is the actor's peak and 0.9 of the GPU. That it ran on 8 GPUs follows from its 641 tokens/s per GPU.
    """
    run = make_run("qwen2-32b_dapo", "trainer.nnodes=1")
    actor = estimate(run, run.shape).training / GIB
    vllm = 0.9 * H200_GIB
    assert (actor, vllm) == (pytest.approx(89.2, abs=0.1), pytest.approx(125.8, abs=0.1))
    for logged in LOGGED_GIB:
        assert actor + vllm == pytest.approx(logged, rel=0.02)


def test_reserved_memory_is_as_the_published_log_has_it():
    from verl_ext.doctor.memory import RESERVED

    assert pytest.approx(226.8 / 214.8, abs=0.005) == RESERVED


# What it says --------------------------------------------------------------------------------------------------------


def test_a_run_that_fits(make_run, make_machine, only_ok):
    only_ok(check_memory(make_run("qwen2-32b_dapo"), make_machine(gpu_gib=H200_GIB)))
    only_ok(check_memory(make_run("qwen2-32b_sft", nnodes=2, nproc_per_node=8), make_machine(gpu_gib=H200_GIB)))
    only_ok(check_memory(make_run("qwen2-7b_dapo"), make_machine(gpu_gib=79.1)))


@pytest.mark.parametrize(
    ("overrides", "gpu_gib", "changes", "message"),
    [
        (["trainer.nnodes=1"], 79.1, {}, "training peaks at about 98 GiB of a GPU: (4 + 4 + 8) x 32.76 billion"),
        (["trainer.nnodes=1"], H200_GIB, {"memory_bytes": 256 * GIB}, "host memory of a node about 430 GiB"),
        ([f"{FSDP}.param_offload=false"], H200_GIB, {}, "the actor keeps 8"),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.gpu_memory_utilization=0.83"],
            79.1,
            {},
            "0.4 sequences of 18,432 tokens at once",
        ),
        ([f"{FSDP}.use_no_sync_for_gradient_accumulation=true"], 79.1, {}, "unsharded gradients 61.0 GiB"),
    ],
)
def test_a_run_that_does_not_fit(overrides, gpu_gib, changes, message, make_run, make_machine, told):
    run = make_run("qwen2-32b_dapo", "actor_rollout_ref.rollout.gpu_memory_utilization=0.95", *overrides)
    texts = told(check_memory(run, make_machine(gpu_gib=gpu_gib, **changes)), Level.FAIL)
    assert any(message in text for text in texts), texts


def test_what_is_close_is_a_warning(make_run, make_machine, told):
    # 89.2 GiB x 1.06 + 3 = 97.6 of 85, but 89.2 < 1.12 x 85 = 95.2
    run = make_run("qwen2-32b_dapo", "trainer.nnodes=1")
    assert any(
        "training peaks at about 98 GiB" in text for text in told(check_memory(run, make_machine(0), 85.0), Level.WARN)
    )
    # 366 GiB of weights and moments fit into 400, the processes' 64 beside them do not
    tight = make_machine(memory_bytes=400 * GIB)
    assert "host memory of a node about 430 GiB" in told(check_memory(run, tight), Level.WARN)[0]


def test_kv_cache_of_a_server(make_run, make_machine, told):
    # 0.9 x 139.8 - 3 - 2 x 32.764e9 / 4 / 2^30 (15.26) = 107.56 GiB a GPU; a token has 2 x 2 x 64 layers x 8 heads x
    # 128 = 262,144 bytes, over 4 GPUs 65,536: 107.56 x 2^30 / 65,536 = 1.762 million
    run = make_run("qwen2-32b_dapo")
    assert kv_tokens(run, run.shape, H200_GIB) == pytest.approx(1.762e6, rel=1e-3)
    small = make_run("qwen2-32b_dapo", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    text = told(check_memory(small, make_machine(gpu_gib=79.1)), Level.WARN)
    assert any("Generation will be slow" in each or "KV cache" in each for each in text), text


def test_separate_async_has_servers_on_gpus_of_their_own(make_run, make_machine, told, only_ok):
    mode = ["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8"]
    settings = [f"{FSDP}.param_offload=false", f"{ROLLOUT}.gpu_memory_utilization=0.95"]
    machine = make_machine(gpu_gib=H200_GIB)
    assert (
        "while it generates, vLLM takes"
        in told(check_memory(make_run("qwen2-32b_dapo", *settings), machine), Level.FAIL)[0]
    )
    alone = list(
        check_memory(make_run("qwen2-32b_dapo", *mode, "actor_rollout_ref.hybrid_engine=false", *settings), machine)
    )
    only_ok(alone)
    # 512 x 16 responses over 8 GPUs / 4 = 2 servers
    assert any("of 4,096 a step" in text for text in told(alone, Level.OK))
    # with the hybrid engine, verl's default, servers are on the actor's GPUs, too, and awake while it validates
    hybrid = list(check_memory(make_run("qwen2-32b_dapo", *mode, *settings), machine))
    assert "while it validates, vLLM takes" in told(hybrid, Level.WARN)[0]
    assert Level.FAIL not in {finding.level for finding in hybrid}


def test_without_gpus_the_formula_is_shown_and_nothing_compared(make_run, make_machine, only_ok, told):
    findings = list(check_memory(make_run(), make_machine(0)))
    only_ok(findings)
    assert any("no GPU here to compare with" in text for text in told(findings, Level.OK))
    with_size = list(check_memory(make_run("qwen2-32b_dapo", "trainer.nnodes=1"), make_machine(0), 79.1))
    assert "there are 79" in told(with_size, Level.FAIL)[0]


def test_verl_logs_the_largest_mini_batch_of_the_first_rank_and_sums_nothing():
    """What the docstring of verl_ext/doctor/memory.py and docs/doctor.md say of verl 0.9.1."""
    from verl.single_controller.base.decorator import _concat_data_proto_or_future
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics

    def rank(*gib: float):  # as TrainingWorker.train_mini_batch returns it: a value for each mini-batch
        metrics = {"perf/max_memory_allocated_gb": list(gib), "perf/cpu_memory_used_gb": list(gib)}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})

    output = _concat_data_proto_or_future([rank(10.0, 30.0), rank(50.0, 70.0)])
    logged = reduce_metrics(dict(output["metrics"]))
    assert logged == {"perf/max_memory_allocated_gb": 30.0, "perf/cpu_memory_used_gb": 20.0}


@pytest.mark.parametrize("switch", ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"])
def test_the_reference_model_of_a_kl_term_is_on_the_host(switch, make_run):
    # fp32 on two nodes of eight GPUs: 4 x 32.76e9 x 8 / 16 bytes of each node
    without, with_kl = (estimate(run, run.shape) for run in (make_run(), make_run("qwen2-32b_dapo", switch)))
    assert with_kl.host - without.host == with_kl.weights_on_host - without.weights_on_host == 2 * 32763876352
    assert with_kl.training == without.training and "the reference model 61.0 GiB, " in with_kl.terms["host"]
    half = make_run("qwen2-32b_dapo", switch, "actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16")
    assert estimate(half, half.shape).host - without.host == 32763876352
    lora = make_run("qwen2-32b_dapo", switch, "actor_rollout_ref.model.lora_rank=8")  # the actor without its adapters
    assert estimate(lora, lora.shape).host == without.host


def test_a_critic_is_not_in_the_estimate(make_run, make_machine, told):
    run = make_run("qwen2-32b_dapo", "algorithm.adv_estimator=gae")
    assert (
        "trains a critic, whose memory is not in this estimate"
        in told(check_memory(run, make_machine()), Level.WARN)[0]
    )
