"""A quickstart whose commands are only recorded."""

from types import SimpleNamespace

import pytest

from verl_ext.quickstart import pipeline
from verl_ext.quickstart.pipeline import Journal, Quickstart


class RecordingSupervisor:
    """Stands in for the commands: records them, and does what the test says instead."""

    def __init__(self, act=lambda command, env: None):
        self.commands, self.act = [], act

    def run(self, command, *, log, env=None, watch=None):
        self.commands.append(SimpleNamespace(command=command, log=log, env=env or {}, watch=watch))
        self.act(command, env or {})

    def peak_gb(self):
        return 1.5


@pytest.fixture
def make_run(tmp_path):
    def make(act=lambda command, env: None, **settings):
        values = {"out": tmp_path, "seed": 0, "data_args": [], "sft": [], "rl": []} | settings
        return Quickstart(**values, supervisor=RecordingSupervisor(act))

    return make


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0, time=lambda: clock.now)
    monkeypatch.setattr(pipeline, "time", clock)
    return clock


@pytest.fixture
def called(monkeypatch, clock):
    """Names of the steps that ran; each takes 10 s instead of doing its work."""
    called = []

    def act(name):
        def action(run):
            called.append(name)
            clock.now += 10

        return action

    monkeypatch.setattr(pipeline, "STEPS", [(n, s, t, act(n), needs) for n, s, t, _, needs in pipeline.STEPS])
    monkeypatch.setattr(pipeline, "report", act("report"))
    return called


@pytest.fixture
def source(tmp_path):
    """A quickstart after SFT, seed 7, with a checkpoint and the RL run that followed."""
    folder = tmp_path / "first"
    for name, text in {
        "data/rl_train.parquet": "problems",
        "data/eval.parquet": "held out",
        "model/config.json": "{}",
        "sft/merged/model.safetensors": "weights",
        "sft/merged/config.json": "{}",
        "sft/merged/tokenizer.json": "{}",
        "sft/metrics-1.jsonl": "",
        "sft/global_step_500/model.pt": "",
        "sft/latest_checkpointed_iteration.txt": "500",
        "rl/merged/model.safetensors": "other weights",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run = Quickstart(folder, 7, ["--rl=64"], ["optim.lr=1"], ["a=1"], None)
    for step in ("data", "sft", "merge_sft", "rl"):
        Journal(folder / "stages.json").add(stage=step, status="done", wall_s=100.0, settings=run.settings(step))
    return folder
