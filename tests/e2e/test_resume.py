"""Test that a killed run continues when the same command is started again.

Each case is a chain: a run is killed at one moment, started again, killed at the next, and finally runs to its end.
"""

import itertools
import json
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from scripts.studies.slow_sandbox import proxied
from tests.e2e.conftest import OWN_SERVER, launch_tiny, read_metrics, run_to_end
from tests.processes import kill_tree, stop_at
from verl_ext.checkpoints import folder as checkpoints
from verl_ext.ledger.prompts import read_tally
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SFT = [
    "trainer.total_training_steps=14",
    "trainer.save_freq=4",
    f"data.train_max_samples={8 * 64}",  # step 8 ends an epoch
    "trainer.total_epochs=2",
    "trainer.test_freq=4",
    "data.val_max_samples=64",
    "retool.checkpoints.keep_last=1",
    "retool.checkpoints.best_metric=val/loss",
    "retool.checkpoints.best_mode=max",  # the highest loss is that of step 4, of the first start: it must stay
]
AGENT = "actor_rollout_ref.rollout.agent"
RL = [
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "retool.checkpoints.keep_last=null",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",  # 2 updates per step
    "actor_rollout_ref.rollout.n=4",
    "algorithm.filter_groups.max_num_gen_batches=1",
]
COLOCATE = ["trainer.v1.trainer_mode=colocate_async"]
MODES = {
    "sync": [],
    "colocate_async": COLOCATE,
    "colocate_async, loops in an actor": [
        *COLOCATE,
        f"{AGENT}.agent_loop_manager_class=verl_ext.rollout.workers.LeanAgentLoopManager",
    ],
    "colocate_async, resampled": [*COLOCATE, "objective=grpo_roc"],
    "separate_async": ["hardware=cpu_separate"],
    "separate_async, adaptive n": ["hardware=cpu_separate", "retool.adaptive_n.enable=true"],
    "sync, epochs of 2 steps": ["data.train_max_samples=8"],
}

# Files of a run's folder that another machine needs besides the newest checkpoint (docs/guides/resume.md).
MOVED_FILES = [checkpoints.TRACKER, "*.json*"]

# For each start that is killed: `<moment>:<n>` of moments.py, and the checkpoint's step from which the next resumes.
Kills = list[tuple[str, int]]
SFT_KILLS: Kills = [("update:6", 4), ("data:1", 4), ("shard:2", 8), ("update:2", 8)]
RL_KILLS: list[Kills] = [[("rollout:3", 2), ("update:2", 2)], [("shard:2", 2), ("data:1", 2)]]
SEPARATE_KILLS: Kills = [("rollout:5", 2), ("update:2", 2)]  # it samples one mini-batch at a time
NIGHTLY: list[tuple[str, str, Kills]] = [
    ("sync", "auto", RL_KILLS[0]),
    ("sync", "resume_path", RL_KILLS[1]),
    ("sync, epochs of 2 steps", "auto", [("update:6", 2)]),
    ("colocate_async", "auto", RL_KILLS[1]),
    ("colocate_async", "resume_path", RL_KILLS[0]),
    ("colocate_async", "moved", [("rollout:3", 2)]),
    ("colocate_async, resampled", "auto", RL_KILLS[0]),
    ("separate_async", "auto", SEPARATE_KILLS),
    ("separate_async", "moved", SEPARATE_KILLS[:1]),
    ("separate_async, adaptive n", "auto", SEPARATE_KILLS),
]
CASES = [("sync", "auto", [("shard:2", 2)]), *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]


@dataclass
class Run:
    """A run's folder, and the way it is started."""

    kind: str  # sft, or one of MODES
    out: Path
    small: Path
    sandbox: str = ""
    starts: list[list[int]] = field(default_factory=list)  # steps that each start logged
    home: Path = field(default_factory=Path.home)

    def start(self, *overrides: str, **environment: str):
        if self.starts:
            time.sleep(1.1)  # metrics files are named by the second
        kind, settings = ("sft", SFT) if self.kind == "sft" else ("dapo", RL + MODES[self.kind])
        environment |= {"SANDBOX_URL": self.sandbox, "HOME": str(self.home)}
        return launch_tiny(kind, self.out, self.small, *settings, *overrides, **environment)

    @property
    def log(self) -> Path:
        return self.out / "log.txt"

    def kill_at(self, moment: str, *overrides: str) -> None:
        """Start the run, and SIGKILL all its processes when it reaches the moment."""
        environment, stopped = stop_at(moment, self.out)
        process = self.start(*overrides, **environment, **OWN_SERVER)  # its forks are killed with it
        try:
            deadline = time.time() + 600
            while not stopped.exists():
                assert process.poll() is None and time.time() < deadline, self.tail()
                time.sleep(0.02)
        finally:
            kill_tree(process.pid)
        self.note_steps()

    def finish(self, *overrides: str) -> None:
        run_to_end(self.start(*overrides), self.log)
        self.note_steps()

    def move(self, step: int) -> None:
        """Continue in another folder, with another home and copies of model and data; the old ones are gone."""
        there = self.out.parent / "there"
        for old, new in ((self.small / "data", "data"), (self.small / "sft" / "merged", "sft/merged")):
            shutil.copytree(old, there / new)
        out = there / "run"
        shutil.copytree(checkpoints.path_of(self.out, step), checkpoints.path_of(out, step))
        for path in itertools.chain.from_iterable(map(self.out.glob, MOVED_FILES)):
            shutil.copy2(path, out)
        self.out.rename(self.out.with_name("gone"))
        self.out, self.small, self.home = out, there, there / "home"
        self.home.mkdir()

    def note_steps(self) -> None:
        newest = sorted(self.out.glob("metrics*.jsonl"))
        rows = map(json.loads, newest[-1].read_text().splitlines() if newest else [])
        self.starts.append([row["step"] for row in rows if "val/loss" not in row["data"]])

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def go_through(self, kills: Kills, mode: str) -> None:
        """Kill the run at each moment and restart it, then let it end; each start must begin at the right step."""
        overrides: list[str] = []
        for moment, step in kills:
            self.kill_at(moment, *overrides)
            assert checkpoints.whole_steps(self.out) == checkpoints.steps(self.out), "a half-written one was left"
            assert checkpoints.tracked_step(self.out) == checkpoints.steps(self.out)[-1] == step
            if mode == "resume_path":
                point = checkpoints.path_of(self.out, step)
                overrides = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path='{point}'"]
            elif mode == "moved":
                self.move(step)
        self.finish(*overrides)
        for (_, step), logged in zip(kills, self.starts[1:], strict=True):
            assert logged[:1] in ([step + 1], []), self.starts  # []: it was killed in its first step


def losses(run: Run) -> dict[int, float]:
    return {step: data["train/loss"] for step, data in read_metrics(run.out, lambda data: "train/loss" in data)}


@pytest.fixture(scope="module")
def uninterrupted(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return step -> loss of the SFT run that nothing kills."""
    run = Run("sft", tmp_path_factory.mktemp("whole"), small)
    run.finish()
    return losses(run)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["auto", "resume_path", "moved"])
def test_sft_has_the_losses_of_an_uninterrupted_run(
    small: Path, tmp_path: Path, uninterrupted: dict[int, float], mode: str
) -> None:
    run = Run("sft", tmp_path / "sft", small)
    run.go_through(SFT_KILLS, mode)
    assert run.starts[0] == [1, 2, 3, 4, 5] and run.starts[-1] == [9, 10, 11, 12, 13, 14]
    there = [8, 12, 14] if mode == "moved" else [4, 8, 12, 14]  # only the newest checkpoint was moved, the second time
    val = {step: data["val/loss"] for step, data in read_metrics(run.out, lambda data: "val/loss" in data)}
    best = max(there, key=val.__getitem__)
    assert checkpoints.whole_steps(run.out) == sorted({best, 14}), "the best and the last"
    assert mode == "moved" or best == 4, "of the first start"
    assert len(uninterrupted) == 14 and losses(run) == pytest.approx(uninterrupted, rel=1e-5)


def optimizer_steps(checkpoint: Path) -> set[float]:
    """Return the numbers of updates that Adam counts in a checkpoint's first shard."""
    import torch

    state = torch.load(next(checkpoint.rglob("optim_world_size_*_rank_0.pt")), weights_only=False)["state"]
    return {float(entry["step"]) for entry in state.values()}


def prompts_drawn(checkpoint: Path) -> int:
    import torch

    return torch.load(checkpoint / "data.pt", weights_only=False)["_num_yielded"]


@pytest.mark.parametrize(("trainer", "mode", "kills"), CASES)
def test_rl_ends_at_its_last_step(small: Path, tmp_path: Path, trainer: str, mode: str, kills: Kills) -> None:
    with running_server() as url:
        run = Run(trainer, tmp_path / "rl", small, url)
        run.go_through(kills, mode)
    assert run.starts[0][:2] == [1, 2] and run.starts[-1] == [3, 4]
    tally = read_tally(run.out)
    assert tally.faults() == [] and tally.step == 4
    if "epochs" not in trainer:
        assert set(tally.problems.values()) == {1}, "a problem was drawn twice, by the ledger"
    early, late = run.out / "global_step_2", run.out / "global_step_4"
    assert optimizer_steps(early) == {4.0}
    assert optimizer_steps(late) == {8.0}, "the optimizer started anew"
    assert prompts_drawn(early) >= 8
    if "epochs" not in trainer:  # the counter is of an epoch
        assert prompts_drawn(late) >= prompts_drawn(early) + 8, "the data started anew"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("colocate_async, loops in an actor", "LeanAgentLoopWorker"),
        ("colocate_async", "FleetServer"),
        ("sync", "vLLMHttpServer"),
    ],
)
def test_a_process_of_the_agent_loops_that_is_gone_ends_the_run(small: Path, tmp_path: Path, mode: str, name: str):
    """The tiny run's agent loops are in the server's process, or in an actor's. If their death did not end the run, it
    would wait forever: its rollouts wait for the sandbox when the process is killed.
    """
    out, waits, killed = tmp_path / "rl", threading.Event(), threading.Event()

    def hold_back(program: str) -> None:
        if checkpoints.tracked_step(out) == 2 and not killed.is_set():
            waits.set()
            killed.wait(60)

    with running_server() as url, proxied(url, hold_back) as held:
        run = Run(mode, out, small, held)
        process = run.start(**OWN_SERVER)
        try:
            while not waits.wait(0.1):
                assert process.poll() is None, run.tail()
            for each in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if f"ray::{name}" in " ".join(each.cmdline()):
                        each.kill()
            assert process.wait(60) != 0
        finally:
            killed.set()
            kill_tree(process.pid)
        run.note_steps()
        assert "A process of the agent loops is gone, and its rollouts with it" in run.log.read_text(errors="replace")
        run.finish()
    assert run.starts[-1] == [3, 4] and read_tally(run.out).faults() == []


@pytest.mark.nightly
def test_a_half_written_checkpoint_is_refused_by_path(small: Path, tmp_path: Path) -> None:
    broken = tmp_path / "sft" / "global_step_6"
    broken.mkdir(parents=True)
    (broken / "model_world_size_2_rank_0.pt").write_bytes(b"PK")
    run = Run("sft", tmp_path / "sft", small)
    process = run.start("trainer.resume_mode=resume_path", f"trainer.resume_from_path='{broken}'")
    assert process.wait(120) != 0
    assert f"trainer.resume_from_path={broken} is not a complete checkpoint: it has no checkpoint.json" in run.tail()
    assert not list(run.out.glob("metrics*.jsonl")), "it trained"
