"""Test LoRA's launchers on a CPU: SFT continues after a stop and is merged; RL starts from it with adapters in vLLM."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import launch, read_metrics, run_to_end
from verl_ext.cpu.warm_python import ENVIRONMENT
from verl_ext.evaluation.checkpoint import Checkpoint, find_checkpoint, merge
from verl_ext.sandbox import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
LAYER = "model.layers.0.self_attn.q_proj"


def adapter(checkpoint: Checkpoint) -> torch.Tensor:
    """Return lora_alpha / lora_rank B A of a layer; both are 32."""
    shards = [torch.load(path, weights_only=False) for path in sorted(checkpoint.shards.glob("model_*.pt"))]
    a, b = (
        torch.cat([shard[f"base_model.model.{LAYER}.lora_{name}.default.weight"].to_local() for shard in shards])
        for name in "AB"
    )
    assert (b @ a).abs().max() > 1e-3, "too little to be seen in bf16, or untrained"
    return b @ a


@pytest.fixture(scope="module")
def sft(small: Path, python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make merged weights after three steps of SFT on two ranks that share a sequence, and three by a second start."""
    out = tmp_path_factory.mktemp("lora") / "sft"
    for last in (3, 6):
        process = launch(
            "run_qwen3-0.6b_sft.sh",
            out / "log",
            "+lora=sft",
            "+hardware=cpu_tiny_sft",
            "optim.lr=0.01",
            f"trainer.total_training_steps={last}",
            MODEL_PATH=str(small / "model"),
            TRAIN_FILE=str(small / "data" / "sft_val.parquet"),
            OUTPUT_DIR=str(out),
            NPROC_PER_NODE="2",
            **ENVIRONMENT | {"PYTHON": python, "DOCTOR": "1"},
        )
        run_to_end(process, out / "log")
    losses = read_metrics(out, keep=lambda data: "train/loss" in data)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6], "the second start did not continue"
    assert losses[-1][1]["train/loss"] < losses[0][1]["train/loss"]
    assert "1 FAIL" not in (out / "log").read_text()
    checkpoint = find_checkpoint(out)
    before, after = (
        load_file(path / "model.safetensors")[f"{LAYER}.weight"].float()
        for path in (small / "model", merge(checkpoint))
    )
    torch.testing.assert_close(after, before + adapter(checkpoint), rtol=0.02, atol=2e-3)  # merged in bf16
    return checkpoint.merged


def test_rl_samples_with_the_adapters_that_it_trains(small: Path, sft: Path, python: str, tmp_path: Path) -> None:
    """vLLM's log-probs are the actor's, also in the second step; this is the 4B's run, with hermes' tool calls."""
    out, log = tmp_path / "out", tmp_path / "log"
    with running_server(options=("--preload", "")) as url:
        process = launch(
            "run_qwen3-4b_lora_dapo.sh",
            log,
            "+hardware=cpu_tiny",
            "algorithm.filter_groups.enable=false",  # groups of wrong answers also train: their length penalties differ
            "actor_rollout_ref.actor.optim.lr=0.03",
            MODEL_PATH=str(sft),
            TRAIN_FILE=str(small / "data" / "rl_train.parquet"),
            VAL_FILE=str(small / "data" / "eval.parquet"),
            OUTPUT_DIR=str(out),
            SANDBOX_URL=url,
            **ENVIRONMENT | {"PYTHON": python, "DOCTOR": "1"},
            RAY_TMPDIR=os.environ.get("RAY_TMPDIR", "/tmp/ray"),
        )
        run_to_end(process, log)
    steps = read_metrics(out, keep=lambda data: "actor/grad_norm" in data)
    assert [step for step, _ in steps] == [1, 2] and steps[0][1]["actor/grad_norm"] > 0
    assert [data["training/rollout_probs_diff_max"] < 1e-3 for _, data in steps] == [True, True], steps
    assert json.loads((out / "validation.json").read_text())["values"].keys() == {"0", "2"}, "not evaluated"
    adapter(find_checkpoint(out))
