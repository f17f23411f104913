"""scripts/compare_metrics.py on metric files of a few lines."""

import json
import math
import sys

import pytest


def write(folder, *records):
    folder.mkdir()
    lines = [json.dumps({"step": step, "data": data}) for step, data in records]
    (folder / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def compare(load_script, monkeypatch, capsys):
    def compare(*runs):
        monkeypatch.setattr(sys, "argv", ["compare_metrics.py", *map(str, runs)])
        return load_script("compare_metrics").main(), capsys.readouterr().out.splitlines()

    return compare


def test_times_and_memory_may_differ_and_nothing_else(compare, tmp_path):
    a = write(
        tmp_path / "a", (1, {"loss": 0.1, "nan": float("nan"), "timing_s/step": 1.0, "perf/gb": 1.0, "train/mfu": 1.0})
    )
    b = write(
        tmp_path / "b", (1, {"loss": 0.1, "nan": float("nan"), "timing_s/step": 2.0, "perf/gb": 2.0, "train/mfu": 2.0})
    )
    assert compare(a, b) == (0, ["equal: 1 steps, 2 values"])
    assert compare(a, next(b.iterdir()))[0] == 0  # a file instead of the folder
    c = write(tmp_path / "c", (1, {"loss": math.nextafter(0.1, 1), "nan": 0.0}))
    assert compare(a, c) == (1, ["step 1 | loss: 0.1 | 0.10000000000000002", "step 1 | nan: nan | 0.0"])


def test_the_first_step_that_differs_is_shown_with_all_its_differences(compare, tmp_path):
    a = write(tmp_path / "a", (1, {"x": 1}), (2, {"x": 1, "y": 2, "z": 3}), (3, {"x": 1}))
    b = write(tmp_path / "b", (1, {"x": 1}), (2, {"x": 5, "y": 2}), (3, {"x": 2}))
    assert compare(a, b) == (1, ["step 2 | x: 1 | 5", "step 2 | z: 3 | None"])
    c = write(tmp_path / "c", (1, {"x": 1}))
    assert compare(c, a)[0] == 1  # a run that is shorter is not equal


def test_a_folder_without_metrics_is_refused(compare, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no metrics"):
        compare(tmp_path, tmp_path)
