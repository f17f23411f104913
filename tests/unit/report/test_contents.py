import pytest

from tests.unit.evaluation.rows import row, write
from verl_ext.records import store
from verl_ext.report.contents import read_run


def test_rollouts_of_the_first_and_last_step_are_read(tmp_path):
    for step in (2, 10, 9):
        rows = [row("p", 0, 1, step=step), row("p", 1, None, step=step)]
        store.write(store.path_of(tmp_path / "rl", "trajectories", step), "trajectories", rows)
    found = read_run(tmp_path).training_rollouts
    assert [(each["step"], each["uid"], each["session"]) for each in found] == [(2, "mine:p", 0), (10, "mine:p", 0)]
    assert found[0]["turns"][-1]["text"] == "\\boxed{7}"


def test_before_and_after_are_the_first_and_last_whole_validation(tmp_path):
    for step, acc in ((0, 0), (5, 1), (10, None)):
        write(tmp_path, [row("p", 0, acc)], step=step)
    write(tmp_path, [row("p", 0, 1)], step=15, light=True)
    run = read_run(tmp_path)
    assert ([each.acc for each in run.before], [each.acc for each in run.after]) == ([0.0], [None])
    assert run.sides == ("step 0", "step 10") and run.training_rollouts == []


def test_a_file_of_records_that_is_cut_short_is_passed_over_with_a_warning(tmp_path, caplog):
    for step in (1, 2, 3, 4):
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [row("p", 0, 1, step=step)])
    for step in (1, 4):
        path = store.path_of(tmp_path, "trajectories", step)
        path.write_bytes(path.read_bytes()[:100])
    assert [each["step"] for each in read_run(tmp_path).training_rollouts] == [2, 3]
    assert "step_000001.parquet" in caplog.text and "Another step's rollouts are shown" in caplog.text
    store.path_of(tmp_path, "trajectories", 2).unlink()
    assert [each["step"] for each in read_run(tmp_path).training_rollouts] == [3]


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
