"""The command of the quickstart: what it passes on, how it fails, and what `--fresh` deletes."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from tests.unit.quickstart.conftest import RecordingSupervisor
from verl_ext.quickstart import fresh, pipeline
from verl_ext.quickstart.supervise import CommandFailed


@pytest.mark.parametrize(
    ("arguments", "name", "path"), [([], "tiny", ""), (["--model", "small"], "small", "owner/name")]
)
def test_main_takes_the_rung_that_model_names(monkeypatch, tmp_path, arguments, name, path):
    seen = []
    monkeypatch.setenv("MODEL_PATH", "owner/name")  # tiny has its own model
    monkeypatch.setattr(pipeline, "run_pipeline", lambda run, stages: seen.append(run))
    monkeypatch.setattr(pipeline, "Supervisor", lambda lock: contextlib.nullcontext(RecordingSupervisor()))
    monkeypatch.setattr(sys, "argv", ["pipeline", "--out", str(tmp_path), *arguments])
    pipeline.main()
    [run] = seen
    assert (run.rung.name, run.model_path, bool(run.python)) == (name, path, name == "tiny")


def test_text_rl_runs_beside_tool_rl_on_the_same_problems_and_a_page_shows_both(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(pipeline, "run_pipeline", lambda run, stages: seen.append((run, stages)))
    monkeypatch.setattr(pipeline, "Supervisor", lambda lock: contextlib.nullcontext(RecordingSupervisor()))
    arguments = f"--out {tmp_path}/new --compare text --prepare=--rl=64 --sft a=1 --rl b=2 --seed 4"
    monkeypatch.setattr(sys, "argv", ["pipeline", *arguments.split()])
    pipeline.main()
    (tool, stages), (text, _) = seen
    assert stages == list(pipeline.STAGES) and (text.seed, text.rung) == (tool.seed, tool.rung)
    assert (tool.out, text.out) == (tmp_path / "new", tmp_path / "new-text") and text.out.is_dir()
    assert text.data_args == [*tool.data_args, "--no-tool"] and text.sft == [*tool.sft, "+tool=none_sft"]
    assert text.rl == [*tool.rl, "+tool=none"]
    pipeline.report(tool)
    pipeline.report(text)
    assert [each.command[3:] for each in tool.supervisor.commands] == [["--run", str(tool.out)]]
    *_, both = [each.command[3:] for each in text.supervisor.commands]
    assert both == ["--run", str(tool.out), str(text.out), "--out", str(tool.out)]


def test_a_run_from_a_small_quickstart_is_small_whatever_model_says(monkeypatch, tmp_path, source):
    journal = json.loads((source / "stages.json").read_text())
    for entry in journal:
        entry["settings"] |= {"model": "small", "model_path": ""}
    (source / "stages.json").write_text(json.dumps(journal))
    seen = []
    monkeypatch.setattr(pipeline, "run_pipeline", lambda run, stages: seen.append(run))
    monkeypatch.setattr(pipeline, "Supervisor", lambda lock: contextlib.nullcontext(RecordingSupervisor()))
    monkeypatch.setattr(sys, "argv", ["pipeline", "--from", str(source), "--out", str(tmp_path / "second")])
    pipeline.main()
    assert seen[0].rung.name == "small"


def test_main_passes_its_arguments_on_and_reports_a_failure_in_one_line(monkeypatch, tmp_path):
    seen = []

    def fails(run, stages):
        seen.append((run, stages))
        raise CommandFailed("the reason")

    monkeypatch.setattr(pipeline, "run_pipeline", fails)
    monkeypatch.setattr(pipeline, "Supervisor", lambda lock: contextlib.nullcontext(RecordingSupervisor()))
    arguments = f"--out {tmp_path}/new --seed 4 --stage sft --stage rl --sft a=1 --rl b=2 --prepare=--rl=64"
    monkeypatch.setattr(sys, "argv", ["pipeline", *arguments.split()])
    with pytest.raises(SystemExit, match="^quickstart: the reason$"):
        pipeline.main()
    [(run, stages)] = seen
    assert stages == ["sft", "rl"] and (tmp_path / "new").is_dir() and Path(run.python).name == "python"
    assert (run.out, run.seed, run.data_args, run.sft) == (tmp_path / "new", 4, ["--rl=64"], ["a=1"])
    assert run.rl == ["data.seed=4", "actor_rollout_ref.rollout.seed=4", "b=2"]


def test_two_pipelines_do_not_write_into_one_folder(monkeypatch, tmp_path):
    (tmp_path / "stages.json").write_text("[]")
    for arguments in ([], ["--fresh"]):
        monkeypatch.setattr(sys, "argv", ["pipeline", "--out", str(tmp_path), *arguments])
        with pipeline.lock_folder(tmp_path), pytest.raises(SystemExit, match=f"Another run writes into {tmp_path}"):
            pipeline.main()
        assert (tmp_path / "stages.json").exists()


def test_fresh_deletes_a_run_but_not_a_folder_that_holds_none(tmp_path):
    run, empty, home = tmp_path / "run", tmp_path / "empty", tmp_path / "home"
    for folder in (run / "sft/global_step_1", run / "eval/before/records", empty, home / "thesis"):
        folder.mkdir(parents=True)
    (run / "stages.json").write_text("[]")

    for folder in (run, empty):
        fresh.delete_run(folder)
        assert not folder.exists()
    with pytest.raises(SystemExit, match=f"would delete {home}, which holds no run"):
        fresh.delete_run(home)
    assert (home / "thesis").exists()


def test_fresh_does_not_delete_the_folder_above_other_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(fresh, "OUTPUTS", tmp_path / "outputs")  # below it a folder without stages.json may go
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "stages.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"holds other runs \(quickstart, quickstart-2\). Set --out"):
        fresh.delete_run(tmp_path / "outputs")
    assert len(list((tmp_path / "outputs").iterdir())) == 2


@pytest.mark.parametrize("name", ["", "dapo", "of_today/dapo"], ids=["is", "holds", "holds deeper"])
def test_fresh_does_not_delete_a_run_that_no_quickstart_made(monkeypatch, tmp_path, name):
    monkeypatch.setattr(fresh, "OUTPUTS", tmp_path)
    out, metrics = tmp_path / "mine", tmp_path / "mine" / name / "metrics-1.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1, "data": {"train/acc": 0.5}}\n')
    told = rf"other runs \({name}\)" if name else "mine, a run that no quickstart made"
    with pytest.raises(SystemExit, match=told):
        fresh.delete_run(out)
    if name:
        (out / "stages.json").write_text("[]")  # of a quickstart, in whose folder another run was put
        with pytest.raises(SystemExit, match=told):
            fresh.delete_run(out)
    assert metrics.exists()
