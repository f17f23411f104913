"""The two benchmarks of RL: a second start keeps the figures of the first, and has its own."""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import pytest


class Launched:
    """In the place of the Supervisor: the launcher, and TRL's side, write what a run of four steps leaves behind."""

    started: list[Path] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, command, *, log, env):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started.append(log.parent)
        if "OUTPUT_DIR" not in env:
            figures = Path(command[command.index("--out") + 1])
            figures.write_text(json.dumps({"step_ends": [10, 12, 14, 16], "reward": [0.0]}))
            return
        data = {"timing_s/step": 2.0, "timing_s/update_actor": 0.5}
        data |= {"filter_groups/generated": 16, "train/acc": 0.5}
        rows = [json.dumps({"step": step, "data": data}) for step in (1, 2, 3, 4)]
        # The launcher names the file after the time it starts.
        (Path(env["OUTPUT_DIR"]) / f"metrics-{len(self.started)}.jsonl").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bench_speedups", ["--rounds", "1"]),
        ("bench_vs_trl", ["--trl-python", "python", "--rounds", "1", "--latencies", "0"]),
    ],
)
def test_a_second_start_keeps_the_figures_of_the_first(name, options, load_script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "scripts")
    script = load_script(name)
    (tmp_path / "run" / "sft" / "merged").mkdir(parents=True)
    monkeypatch.setattr(script, "Supervisor", Launched)
    monkeypatch.setattr(script, "running_server", lambda options: contextlib.nullcontext("http://127.0.0.1:1"))
    seconds = itertools.count()
    monkeypatch.setattr("time.strftime", lambda form: f"20260101-00000{next(seconds)}")
    monkeypatch.setattr(sys, "argv", [name, "--run", f"{tmp_path}/run", "--out", f"{tmp_path}/out", *options])
    monkeypatch.setattr(Launched, "started", [])
    script.main()
    first = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    script.main()
    assert {path: path.read_bytes() for path in first} == first
    assert len(set(Launched.started)) == len(Launched.started) > 2
    assert len([*(tmp_path / "out").glob("*/summary.json")]) == 2
