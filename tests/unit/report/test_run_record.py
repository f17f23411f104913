import json

import pytest

from verl_ext.records import store
from verl_ext.report.run_record import read_run


def test_rollouts_of_the_first_and_last_step_are_read(tmp_path):
    for step in (2, 10, 9):
        path = tmp_path / "rl" / "rollouts" / f"{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step": step}) + "\n")
    assert read_run(tmp_path).training_rollouts == [{"step": 2}, {"step": 10}]


def test_before_and_after_are_the_first_and_last_validation_of_the_records(tmp_path):
    for step, acc in ((0, 0.0), (5, 1.0), (10, None)):
        row = {"uid": "u", "session": 0, "problem": "p", "end_reason": "answer", "acc": acc}
        store.write(store.path_of(tmp_path, "trajectories", step, validate=True), "trajectories", [row])
    run = read_run(tmp_path)
    assert ([each.acc for each in run.before], [each.acc for each in run.after]) == ([0.0], [None])
    assert run.sides == ("step 0", "step 10") and run.training_rollouts == []


def test_a_file_of_records_that_is_cut_short_is_passed_over_with_a_warning(tmp_path, caplog):
    for step in (1, 2, 3, 4):
        row = {"uid": "u", "session": 0, "step": step, "score": 1.0, "turns": []}
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [row])
    for step in (1, 4):
        path = store.path_of(tmp_path, "trajectories", step)
        path.write_bytes(path.read_bytes()[:100])
    assert [row["step"] for row in read_run(tmp_path).training_rollouts] == [2, 3]
    assert "step_000001.parquet" in caplog.text and "Another step's rollouts are shown" in caplog.text
    store.path_of(tmp_path, "trajectories", 2).unlink()
    assert [row["step"] for row in read_run(tmp_path).training_rollouts] == [3]


def test_a_quickstart_without_stages_is_an_empty_run_and_no_folder_an_error(tmp_path):
    (tmp_path / "stages.json").write_text("[]")
    run = read_run(tmp_path)
    assert (run.sft.steps, run.rl.steps, run.before, run.after, run.stages, run.configs) == ({}, {}, [], [], [], {})
    with pytest.raises(FileNotFoundError, match="quickstart.sh"):
        read_run(tmp_path / "nowhere")


def test_malformed_stage_times_are_named(tmp_path):
    (tmp_path / "stages.json").write_text('[{"stage": "sft", "status": "ok"}]')
    with pytest.raises(ValueError, match="stages.json: an entry has no wall_s"):
        read_run(tmp_path)
