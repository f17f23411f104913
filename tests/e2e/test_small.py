"""Test the small run, `quickstart --model small`, with few rows and steps: from SmolLM2-135M's 4 bits to the report."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import REPO, read_metrics, run_to_end
from tests.e2e.versions import differences, load_version, recorded_responses
from verl_ext.cpu.patches import round_products

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# The pipeline starts run_smollm2_sft.sh and run_smollm2_dapo.sh.
ROWS = ["--prepare=--sft=40", "--prepare=--sft-val=4", "--prepare=--rl=40", "--prepare=--test=6", "--prepare=--svamp=2"]
STEPS = [
    *("--sft=trainer.total_training_steps=2", "--sft=data.train_batch_size=4", "--sft=trainer.save_freq=2"),
    *("--rl=trainer.total_training_steps=2", "--rl=trainer.save_freq=1", "--rl=data.train_batch_size=2"),
    *("--rl=actor_rollout_ref.actor.ppo_mini_batch_size=2", "--rl=actor_rollout_ref.rollout.n=4"),
    *("--rl=algorithm.filter_groups.max_num_gen_batches=6", "--rl=data.max_response_length=96"),
    "--rl=reward.reward_kwargs.overlong_buffer_cfg.len=64",
    # After 2 steps of SFT every answer is wrong: equal rewards, no gradient. Random ones make the updates real. SFT's
    # merged weights are bf16: if products are rounded to bf16, most weights count the same after an update of 4e-5.
    *("--rl=+reward.reward_kwargs.random_reward_p=0.5", "--rl=actor_rollout_ref.actor.optim.lr=2e-4"),
    # The trainer's own old log-probs, to compare with vLLM's; and all of vLLM's, to recompute them.
    *("--rl=algorithm.rollout_correction.bypass_mode=false", "--rl=retool.recorder.token_share=1"),
    "--rl=retool.checkpoints.keep_last=null",  # step 1's weights, with which step 2 rolls out
]


def quickstart(out: Path, log: Path, *stages: str) -> str:
    """Run the quickstart, or some stages of it; return what it printed."""
    command = [sys.executable, "-m", "verl_ext.quickstart", "--model", "small", "--out", str(out), *ROWS, *STEPS]
    with open(log, "w") as output:
        process = subprocess.Popen([*command, *stages], cwd=REPO, stdout=output, stderr=output)
    run_to_end(process, log, timeout_s=2400)
    return log.read_text()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the quickstart up to the end of RL; return its folder."""
    out, log = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("logs") / "output.txt"
    quickstart(out, log, *(f"--stage={name}" for name in ("data", "sft", "merge", "rl")))
    return out


@pytest.mark.nightly
def test_the_evaluations_and_the_report_complete_the_run(out: Path, tmp_path: Path):
    printed = quickstart(out, tmp_path / "output.txt")
    entries = json.loads((out / "stages.json").read_text())
    assert sorted(entry["stage"] for entry in entries) == sorted(
        ("data", "sft", "merge_sft", "rl", "merge_rl", "eval_before", "eval_after")
    )
    assert {(entry["status"], entry["settings"]["model"]) for entry in entries} == {("done", "small")}
    assert (out / "report.html").is_file() and "Accuracy of rules that do not read the problem:" in printed
    assert "weights from 4 bits" in (out / "data.log").read_text()
    assert {"word_problems", "svamp_ood"} < json.loads((out / "summary.json").read_text())["evaluation"]["after"].keys()


@pytest.fixture
def rounding_of_the_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Round this process's products to bf16 if the launcher rounds those of the run."""
    from scripts.studies.shared import whole_cpu

    name, exact = "ONEDNN_DEFAULT_FPMATH_MODE", torch.get_float32_matmul_precision()
    monkeypatch.setenv(name, whole_cpu().get(name, "STRICT"))
    round_products()
    yield
    torch.set_float32_matmul_precision(exact)


@pytest.mark.usefixtures("rounding_of_the_run")
def test_vllm_and_the_actor_agree_after_an_update(out: Path):
    """Step 2 rolls out with the weights of step 1's update, not with SFT's."""
    metrics = read_metrics(out / "rl")
    assert [step for step, _ in metrics] == [1, 2]
    for _, data in metrics:
        correlation = data["training/rollout_actor_probs_pearson_corr"]
        print(f"correlation {correlation:.6f}, mean difference {data['training/rollout_probs_diff_mean']:.2e}")
        assert correlation > 0.999
        assert data["actor/grad_norm"] > 0
    rl, sft = out / "rl", out / "sft" / "merged"
    rows = recorded_responses(rl, sft, 2)
    assert len(rows) == 2 * 4
    models = (load_version(rl, sft, version) for version in (1, 0))
    own, before = (differences(model, rows[:2]).mean().item() for model in models)  # each costs seconds
    # Rounded products differ by some .02 a token, and responses are few. With the versions confused: below 1/3.
    print(f"log-probs differ from the updated weights' by {own:.1e}, from SFT's by {before:.1e} in the mean")
    assert before > 3 * own, "the update changed next to nothing, or vLLM has SFT's weights"
