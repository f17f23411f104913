"""A run that was killed goes on from its checkpoint when the same command is started again."""

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import kill_tree, launch, read_metrics, run_to_end
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def wait_for(path: Path, text: str, process, log: Path, timeout_s: float = 400) -> None:
    deadline = time.time() + timeout_s
    while not (path.exists() and path.read_text().strip() == text):
        assert process.poll() is None and time.time() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.2)


def optimizer_steps(checkpoint: Path) -> set[float]:
    """How many updates Adam counts in a checkpoint's first shard."""
    import torch

    state = torch.load(next(checkpoint.rglob("optim_world_size_*_rank_0.pt")), weights_only=False)["state"]
    return {float(entry["step"]) for entry in state.values()}


def prompts_drawn(checkpoint: Path) -> int:
    import torch

    return torch.load(checkpoint / "data.pt", weights_only=False)["_num_yielded"]


def test_rl_goes_on_after_sigkill(small: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "rl", tmp_path / "rl" / "log.txt"
    overrides = [
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.max_actor_ckpt_to_keep=null",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.max_num_gen_batches=1",
    ]
    with running_server() as url:
        environment = {
            "DATA_DIR": str(small / "data"),
            "MODEL_PATH": str(small / "sft" / "merged"),
            "OUTPUT_DIR": str(out),
            "SANDBOX_URL": url,
        }
        process = launch("run_tiny_dapo.sh", log, *overrides, **environment)
        try:
            wait_for(out / "latest_checkpointed_iteration.txt", "2", process, log)
        finally:
            kill_tree(process.pid)
        assert not (out / "global_step_4").exists(), "the run ended before it was killed; nothing was tested"
        time.sleep(1.1)  # metrics files are named by the second
        run_to_end(launch("run_tiny_dapo.sh", log, *overrides, **environment), log)

    starts = [read_metrics_of(path) for path in sorted(out.glob("metrics*.jsonl"))]
    assert starts[1] == [3, 4], starts
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert optimizer_steps(out / "global_step_2") == {4.0}  # 2 steps x 2 mini-batches
    assert optimizer_steps(out / "global_step_4") == {8.0}, "the optimizer started anew"
    assert prompts_drawn(out / "global_step_2") >= 8
    assert prompts_drawn(out / "global_step_4") >= prompts_drawn(out / "global_step_2") + 8, "the data started anew"


def read_metrics_of(path: Path) -> list[int]:
    """Steps that one start of an RL run logged."""
    import json

    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_sft_after_sigkill_has_the_losses_of_an_uninterrupted_run(small: Path, tmp_path: Path) -> None:
    def start(out: Path, log: Path):
        return launch(
            "run_tiny_sft.sh",
            log,
            *("trainer.total_training_steps=14", "trainer.save_freq=6", "trainer.test_freq=100", "data.val_files=null"),
            DATA_DIR=str(small / "data"),
            MODEL_PATH=str(small / "sft" / "merged"),
            OUTPUT_DIR=str(out),
        )

    whole = tmp_path / "whole"
    run_to_end(start(whole, whole / "log.txt"), whole / "log.txt")
    broken, log = tmp_path / "broken", tmp_path / "broken" / "log.txt"
    process = start(broken, log)
    try:
        # Not when the tracker names step 6: verl 0.9.1 writes it before the other rank has saved its data-loader state.
        deadline = time.time() + 300
        while 7 not in dict(read_metrics(broken)):
            assert process.poll() is None and time.time() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.05)
    finally:
        kill_tree(process.pid)
    assert not (broken / "global_step_12").exists(), "the run went on for too long; nothing was tested"
    time.sleep(1.1)
    run_to_end(start(broken, log), log)

    def losses(folder: Path) -> dict[int, float]:
        return {step: data["train/loss"] for step, data in read_metrics(folder, lambda data: "train/loss" in data)}

    expected, found = losses(whole), losses(broken)
    assert sorted(found) == list(range(1, 15))
    resumed = range(7, 15)
    assert [found[step] for step in resumed] == pytest.approx([expected[step] for step in resumed], rel=1e-5)
