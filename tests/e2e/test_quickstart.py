"""Test the main job itself: the command that `scripts/quickstart.sh` runs after the install, with few rows and
steps."""

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from scripts.studies.record_batches import read_batch
from tests.e2e.conftest import MARK, OWN_SERVER, REPO, SMALL_DATA, pipeline, read_metrics
from tests.e2e.versions import SAME, differences, load_version, log_probs_of, recorded_responses
from verl_ext.records import store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

OVERRIDES = [
    "--sft=trainer.total_training_steps=30",
    "--rl=trainer.total_training_steps=2",
    *("--rl=trainer.save_freq=1", "--rl=retool.checkpoints.keep_last=null"),
    "--rl=data.train_batch_size=4",
    "--rl=actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "--rl=actor_rollout_ref.rollout.n=4",
    "--rl=algorithm.filter_groups.max_num_gen_batches=1",
    # After 30 steps of SFT every answer is wrong: equal rewards, no gradient. Random ones make the updates real.
    "--rl=+reward.reward_kwargs.random_reward_p=0.5",
    "--rl=actor_rollout_ref.actor.optim.lr_warmup_steps=0",  # with a warm-up step 1 has learning rate 0
    "--rl=retool.observers=[scripts/studies/record_batches.py:BatchRecorder]",
    # The trainer's own old log-probs, to compare with vLLM's; and all of vLLM's, to recompute them.
    *("--rl=algorithm.rollout_correction.bypass_mode=false", "--rl=retool.recorder.token_share=1"),
]


def traces() -> set[str]:
    """List what a run could leave on this machine: processes, shared memory, sockets, temporary folders."""
    processes = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK]:
                processes.add(f"process {process.pid} {process.name()}")
    patterns = (
        "/tmp/retool-*",
        "/tmp/rl-colocate-zmq-*",
        "/tmp/ray",
        "/dev/shm/*",
        f"{tempfile.gettempdir()}/retool-*",
    )
    return processes | {path for pattern in patterns for path in glob.glob(pattern)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, set[str], set[str]]:
    """Run a whole small quickstart; return its folder, its output, and the machine's traces before and after."""
    out = tmp_path_factory.mktemp("quickstart")
    before = traces()
    output = pipeline(out, *OVERRIDES, RECORD_EVERY="2", **OWN_SERVER)
    return out, output, before, traces()


def test_every_stage_leaves_its_result(run: tuple) -> None:
    out = run[0]
    for path in (
        "data/eval.parquet",
        "model/config.json",
        "sft/merged/model.safetensors",
        "rl/merged/model.safetensors",
    ):
        assert (out / path).exists(), path
    stages = {entry["stage"]: entry for entry in json.loads((out / "stages.json").read_text())}
    assert {entry["status"] for entry in stages.values()} == {"done"}
    assert 0 < stages["rl"]["peak_gb"] < 12
    assert "<svg" in (out / "report.html").read_text()
    assert f".venv/bin/retool view {out}\n" in run[1]


def test_before_and_after_are_measured_on_the_same_problems(run: tuple) -> None:
    evaluation = json.loads((run[0] / "summary.json").read_text())["evaluation"]
    rows = {
        when: sorted((row["domain"], row["prompt"]) for row in store.rows(run[0] / "eval" / when))
        for when in ("before", "after")
    }
    assert rows["before"] == rows["after"]
    assert len(rows["before"]) == 2 * (16 + 8 + 8)  # val_kwargs.n samples of each problem
    assert evaluation["before"] and evaluation["after"]


def test_rollout_and_actor_agree_after_an_update(run: tuple) -> None:
    """Step 2 rolls out with the weights of step 1's update, not with SFT's: the sync to vLLM is real."""
    steps = dict(read_metrics(run[0] / "rl", lambda data: "actor/grad_norm" in data))
    assert steps[2]["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert steps[2]["training/rollout_probs_diff_mean"] < 1e-3
    rl, sft = run[0] / "rl", run[0] / "sft" / "merged"
    rows = recorded_responses(rl, sft, 2)
    assert len(rows) == 4 * 4
    updated = load_version(rl, sft, 1)
    own, before = (differences(model, rows) for model in (updated, load_version(rl, sft, 0)))
    print(f"log-probs differ from the updated weights' by {own.max():.1e} at most, from SFT's by {before.mean():.1e}")
    assert own.max() < SAME
    assert before.mean() > 100 * own.mean(), "the update changed next to nothing; the test shows nothing"
    # The step has one update, so the trainer's log-probs in it are those of the same weights.
    for column in ("old_log_prob", "log_prob"):
        assert differences(updated, rows, column).max() < SAME, column
    trained = [token for token in store.rows(rl, "tokens") if token["step"] == 2 and token["mask"]]
    assert {token["decision"] for token in trained} == {"kept"}
    assert all(token["ratio"] == pytest.approx(1.0, abs=1e-3) for token in trained)


def test_the_records_have_the_trainers_time(run: tuple) -> None:
    times = {row["what"] for row in store.rows(run[0] / "rl", "timeline")}
    assert times >= {"wait", "log_probs", "update", "weight_sync", "save"}


def test_a_recorded_batch_has_the_policies_around_its_updates_and_goes_through_the_lab(run: tuple) -> None:
    """The trainer's log-probs before step 2 are those of step 1's checkpoint, and after it those of step 2's."""
    rl, sft = run[0] / "rl", run[0] / "sft" / "merged"
    recorded, rows = read_batch(rl, 2), recorded_responses(rl, sft, 2)
    by_noted = {tuple(row["rollout_log_prob"][row["mask"]].tolist()): row for row in rows}
    assert len(recorded.groups) == len(by_noted) == 4 * 4
    for version, found in ((1, recorded.old_log_prob), (2, recorded.log_prob)):
        model = load_version(rl, sft, version)
        for own, mask, noted in zip(found, recorded.mask, recorded.rollout_log_prob, strict=True):
            row = by_noted[tuple(noted[mask].tolist())]
            assert (log_probs_of(model, [row])[0][row["mask"]] - own[mask]).abs().max() < SAME
    command = [sys.executable, "-m", "scripts.studies.correction_lab", str(rl), "--step", "2"]
    printed = subprocess.run(command, cwd=REPO, env=os.environ | OWN_SERVER, capture_output=True, text=True, check=True)
    assert "Step 2: 16 responses of 4 prompts" in printed.stdout and "tir_otb" in printed.stdout
    places = json.loads((rl / "correction_lab" / "step_2.json").read_text())
    assert places["start"]["presets"]["dapo"]["clipped_low"] == 0  # here the policy is the old one


def test_merged_weights_are_the_checkpoint_s(run: tuple) -> None:
    import torch
    from safetensors.torch import load_file

    merged = load_file(run[0] / "rl/merged/model.safetensors")
    shard = torch.load(run[0] / "rl/global_step_2/actor/model_world_size_1_rank_0.pt", weights_only=False)
    for name, weight in merged.items():
        full = shard[name].full_tensor() if hasattr(shard[name], "full_tensor") else shard[name]
        assert torch.equal(weight, full.to(weight.dtype)), name
    before = load_file(run[0] / "sft/merged/model.safetensors")
    assert any(not torch.equal(weight, before[name]) for name, weight in merged.items()), "RL changed nothing"


def test_nothing_is_left_behind(run: tuple) -> None:
    _, _, before, after = run
    assert after - before == set()


def test_a_second_call_does_nothing_again(run: tuple) -> None:
    stamps = {path: path.stat().st_mtime for path in run[0].rglob("model.safetensors")}
    output = pipeline(run[0], *OVERRIDES, **OWN_SERVER)
    assert output.count("done already") == 7
    assert {path: path.stat().st_mtime for path in run[0].rglob("model.safetensors")} == stamps


@pytest.mark.nightly
def test_ctrl_c_in_the_middle_of_rl_leaves_nothing_behind(run: tuple, small: Path, tmp_path: Path) -> None:
    before = traces()
    command = [sys.executable, "-m", "verl_ext.quickstart", "--out", str(small), *SMALL_DATA]
    command += ["--sft=trainer.total_training_steps=30", "--rl=trainer.total_training_steps=500", "--stage=rl"]
    with open(tmp_path / "output.txt", "w+") as output:
        process = subprocess.Popen(command, cwd=REPO, env=os.environ | OWN_SERVER, stdout=output, stderr=output)
        deadline = time.time() + 300
        while "step 1/500" not in (tmp_path / "output.txt").read_text() and time.time() < deadline:
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert "interrupted" in (tmp_path / "output.txt").read_text()
    assert traces() - before == set()
