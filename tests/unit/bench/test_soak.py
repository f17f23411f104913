"""`scripts/bench/soak.py`: when something dies, what is watched, and what counts as growth."""

import json
import subprocess
import threading
import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import create_autospec

import psutil
import pytest

from verl_ext.records import store


@pytest.fixture
def script():
    from scripts.bench import soak

    return soak


def test_deaths_are_spread_over_the_steps_and_usage_is_noted_until_the_run_ends(script, monkeypatch, tmp_path):
    died, counted = [], Counter()
    monkeypatch.setattr(script, "kill_sandbox", lambda scene, away_s: died.append("sandbox"))
    monkeypatch.setattr(script, "engine_killed", lambda scene: died.append("server"))
    monkeypatch.setattr(script, "EVERY_S", 0.05)
    processes = {"processes": lambda: [psutil.Process()]}
    scene = SimpleNamespace(run=tmp_path, notes=tmp_path / "notes", ended=threading.Event(), **processes)
    usage = tmp_path / "usage.jsonl"
    thread = threading.Thread(target=script.die_again_and_again, args=(scene, 34, usage, counted))
    thread.start()
    metrics = tmp_path / "metrics-1.jsonl"
    metrics.write_text("")
    for step, deaths in ((1, 0), (2, 1), (4, 2), (6, 3), (12, 6), (30, 15)):
        with open(metrics, "a") as file:
            file.writelines(f'{{"step": {each}, "data": {{}}}}\n' for each in range(1, step + 1))
        deadline = time.monotonic() + 5
        while len(died) < deaths:
            assert time.monotonic() < deadline, (step, died)
            time.sleep(0.02)
        time.sleep(0.3)
        assert len(died) == deaths
    assert died == ["sandbox", "sandbox", "server"] * 5 and counted == {"sandbox": 10, "server": 5}
    scene.ended.set()
    thread.join(5)
    assert not thread.is_alive()
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    assert len(lines) > 2 and all(line["processes"] == 1 and line["files"] > 0 < line["memory_mb"] for line in lines)


class Process:
    """Like psutil's Process; `ended`: one that has ended."""

    def __init__(self, files, memory_mb, ended=False):
        self.files, self.memory_mb, self.ended = files, memory_mb, ended

    def status(self):
        return psutil.STATUS_RUNNING

    def num_fds(self):
        if self.ended:
            raise psutil.NoSuchProcess(1)
        return self.files

    def memory_full_info(self):
        return SimpleNamespace(uss=self.memory_mb * 2**20)


def test_usage_is_that_of_all_processes_and_one_that_has_ended_counts_nothing(script):
    usage = script.Usage.of([Process(3, 10), Process(4, 2.5), Process(9, 9, ended=True)])
    assert usage == script.Usage(processes=2, files=7, memory_mb=12.5)
    assert script.Usage.of([]) == script.Usage(0, 0, 0)
    with subprocess.Popen(["true"]) as ended:  # a zombie until this process asks for its exit status
        process = psutil.Process(ended.pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert script.Usage.of([process]) == script.Usage(0, 0, 0)
    own = script.Usage.of([psutil.Process()])
    assert own.processes == 1 and own.files > 0 < own.memory_mb


@pytest.mark.parametrize(("last", "grown"), [([6, 6, 9, 6, 1], (6, 6)), ([7, 9, 9, 8, 1], (6, 8))])
def test_growth_is_from_after_the_start_to_the_end_without_what_comes_and_goes(script, last, grown):
    usages = [{"files": n} for n in [1, 2, 2, 3, 4, 5, 6, 6, 6, 6, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, *last]]
    assert script.growth(usages, "files") == grown


def test_the_run_that_is_measured_is_ours(script, monkeypatch, tmp_path):
    measure = create_autospec(script.measure, side_effect=InterruptedError)
    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "make_sft", lambda source: None)
    with pytest.raises(InterruptedError):
        script.main(["--out", str(tmp_path / "soak"), "--seed", "3"])
    side, fault, out, _, seed = measure.call_args.args
    assert (side, out, seed) == (script.SIDES["ours"], tmp_path / "soak", 3) and fault.steps == 130
    measure.side_effect = script.Missed("no process of the run is an engine")
    with pytest.raises(SystemExit, match="soak.py: no process of the run is an engine"):
        script.main(["--out", str(tmp_path / "soak")])


def test_calls_are_counted_beside_a_rollout_that_raised(script, tmp_path):
    ran, not_run = {"turn": 0, "attempts": 1}, {"turn": 0}
    rows = [{"uid": "a", "calls": [ran, not_run, ran]}, {"uid": "b", "calls": None}]
    store.write(store.path_of(tmp_path, "trajectories", 1), "trajectories", rows)
    assert script.count_calls(tmp_path) == 2
