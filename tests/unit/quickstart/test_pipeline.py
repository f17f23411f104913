"""The steps of the quickstart: which ones run, with what, and what is kept when one breaks."""

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.quickstart.conftest import RecordingSupervisor
from verl_ext.quickstart import pipeline, rungs
from verl_ext.quickstart.own import Own
from verl_ext.quickstart.pipeline import Journal, Quickstart, run_pipeline
from verl_ext.quickstart.supervise import CommandFailed
from verl_ext.runs.folder import path_of

STEP_NAMES = ["data", "sft", "merge_sft", "rl", "merge_rl", "eval_before", "eval_after"]


def test_steps_stand_after_what_they_need():
    names = [step[0] for step in pipeline.STEPS]
    assert names == STEP_NAMES
    for position, (_, stage, _, _, needs) in enumerate(pipeline.STEPS):
        assert stage in pipeline.STAGES
        assert set(needs) <= set(names[:position])


def test_all_steps_run_once_in_order_and_the_report_each_time(make_run, called, capsys):
    run_pipeline(make_run(), list(pipeline.STAGES))
    assert called == [*STEP_NAMES, "report"]
    called.clear()
    run_pipeline(make_run(), list(pipeline.STAGES))
    assert called == ["report"]
    assert "[sft] done already" in capsys.readouterr().out


def test_the_journal_says_when_each_step_ran_and_with_what(make_run, called, tmp_path):
    run = make_run(seed=3, sft=["optim.lr=1"])
    run_pipeline(run, ["data", "sft"])
    data, sft = json.loads((tmp_path / "stages.json").read_text())
    assert (data["stage"], sft["stage"]) == ("data", "sft")
    assert sft == {
        "stage": "sft",
        "started": 1010.0,
        "finished": 1020.0,
        "wall_s": 10.0,
        "status": "done",
        "peak_gb": 1.5,
        "settings": {
            "seed": 3,
            "task": run.rung.task_digest(),
            "data": [],
            "model": "tiny",
            "model_path": "",
            "sft": ["optim.lr=1"],
        },
    }


@pytest.mark.parametrize("changed", [{"seed": 1}, {"sft": ["a=1"]}, {"data_args": ["--rl=64"]}])
def test_a_run_with_other_settings_is_not_mixed_in(make_run, called, changed):
    run_pipeline(make_run(), ["data", "sft"])
    with pytest.raises(SystemExit, match="holds a run with other settings(.|\n)*--fresh.*--out"):
        run_pipeline(make_run(**changed), ["rl"])
    assert called == ["data", "sft"]


def test_a_run_of_another_task_is_not_done_already(make_run, called, tmp_path):
    (tmp_path / "run.yaml").write_text("lr: 1  # of today")
    rung = replace(pipeline.RUNGS["small"], task=(f"{tmp_path.name}/*.yaml",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rungs, "REPO", tmp_path.parent)
        run_pipeline(make_run(rung=rung), ["data"])
        (tmp_path / "run.yaml").write_text("lr: 1  # another comment")
        run_pipeline(make_run(rung=rung), ["data"])
        (tmp_path / "run.yaml").write_text("lr: 2")
        with pytest.raises(SystemExit, match="holds a run with other settings"):
            run_pipeline(make_run(rung=rung), ["data", "sft"])
    assert called == ["data"]


@pytest.mark.parametrize("rung", pipeline.RUNGS.values(), ids=pipeline.RUNGS)
def test_the_files_that_make_a_task_are_there(rung):
    for pattern in rung.task:
        assert [*rungs.REPO.glob(pattern)], pattern


def test_settings_of_later_steps_may_change(make_run, called):
    run_pipeline(make_run(), ["data", "sft", "merge"])
    run_pipeline(make_run(rl=["a=1"]), ["rl"])
    assert called == ["data", "sft", "merge_sft", "rl"]


@pytest.mark.parametrize("error", [CommandFailed("no"), KeyboardInterrupt()])
def test_a_broken_step_keeps_its_seconds_and_runs_again(make_run, called, clock, monkeypatch, tmp_path, error):
    def breaks(run):
        clock.now += 25
        raise error

    whole = pipeline.STEPS
    broken = [(n, s, t, breaks if n == "sft" else action, needs) for n, s, t, action, needs in whole]
    monkeypatch.setattr(pipeline, "STEPS", broken)
    for _ in range(2):
        with pytest.raises(type(error)):
            run_pipeline(make_run(), list(pipeline.STAGES))
    assert called == ["data"]
    entry = json.loads((tmp_path / "stages.json").read_text())[1]
    assert (entry["stage"], entry["status"], entry["wall_s"]) == ("sft", "broken", 50.0)

    monkeypatch.setattr(pipeline, "STEPS", whole)
    run_pipeline(make_run(), list(pipeline.STAGES))
    assert called == [*STEP_NAMES, "report"]
    entry = Journal(tmp_path / "stages.json").entries[1]
    assert (entry["stage"], entry["status"], entry["wall_s"]) == ("sft", "done", 60.0)


@pytest.mark.parametrize(
    ("done", "stage", "ran", "missing"),
    [
        ([], "sft", [], "[sft] needs data"),
        ([], "rl", [], "[rl] needs merge_sft"),
        (["data", "sft"], "rl", [], "[rl] needs merge_sft"),
        ([], "merge", [], "[merge_sft] needs sft"),
        ([], "eval", [], "[eval_before] needs merge_sft"),
        (["data", "sft"], "merge", ["merge_sft"], None),
        (["data", "sft", "merge_sft"], "eval", ["eval_before"], None),
        (["data", "sft", "merge_sft", "rl"], "merge", ["merge_rl"], None),
        ([], "report", ["report"], None),
    ],
)
def test_a_single_stage_needs_those_before_it(make_run, called, tmp_path, done, stage, ran, missing):
    run = make_run()
    journal = Journal(tmp_path / "stages.json")
    for step in done:
        journal.add(stage=step, status="done", wall_s=1.0, settings=run.settings(step))
    if missing:
        with pytest.raises(CommandFailed) as raised:
            run_pipeline(run, [stage])
        assert str(raised.value).startswith(f"{missing}, which was not run. Run ")
    else:
        run_pipeline(run, [stage])
    assert called == ran


def test_a_half_of_a_stage_that_waits_for_rl_says_so(make_run, called, tmp_path, capsys):
    run = make_run()
    for step in ("data", "sft"):
        Journal(tmp_path / "stages.json").add(stage=step, status="done", wall_s=1.0, settings=run.settings(step))
    run_pipeline(run, ["merge", "eval"])
    assert called == ["merge_sft", "eval_before"]
    printed = capsys.readouterr().out
    assert "[merge_rl] skipped: rl was not run" in printed and "[eval_after] skipped: merge_rl was not run" in printed


def test_a_journal_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "stages.json"
    Journal(path).add(stage="data", status="done", wall_s=1.0)
    whole = path.read_text()
    monkeypatch.setattr("os.replace", lambda part, target: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Journal(path).add(stage="sft", status="done", wall_s=1.0)
    assert path.read_text() == whole


def test_data_and_model_are_made_with_the_runs_seed_and_arguments(make_run, tmp_path):
    run = make_run(seed=5, data_args=["--rl=64"])
    pipeline.make_data(run)
    prepare, build = (c.command for c in run.supervisor.commands)
    assert all(Path(command[1]).exists() for command in (prepare, build))
    assert prepare[2:] == ["--out", str(tmp_path / "data"), "--seed", "5", "--rl=64"]
    assert build[2:] == ["--out", str(tmp_path / "model"), "--seed", "5"]


def test_the_small_rung_has_its_own_tools_and_launchers(make_run, tmp_path):
    run = make_run(rung=pipeline.RUNGS["small"], data_args=["--rl=64"])
    pipeline.make_data(run)
    pipeline.train_sft(run)
    prepare, build, sft = run.supervisor.commands
    for command in (prepare, build, sft):
        assert Path(command.command[1]).exists()
    assert prepare.command[1].endswith("data/small/prepare.py") and prepare.command[-3:] == ["--seed", "0", "--rl=64"]
    assert build.command[1:] == [prepare.command[1].replace("prepare", "build_model"), "--out", str(tmp_path / "model")]
    assert sft.command[1].endswith("run_smollm2_sft.sh") and sft.env["MODEL_PATH"] == str(tmp_path / "model")
    assert run.settings("data")["model"] == "small" and run.settings("data")["data"] == ["--rl=64"]


def test_a_model_that_is_there_is_taken_instead(make_run):
    run = make_run(rung=pipeline.RUNGS["small"], model_path="owner/name")
    pipeline.make_data(run)
    pipeline.train_sft(run)
    prepare, sft = run.supervisor.commands
    assert prepare.command[1].endswith("prepare.py") and sft.env["MODEL_PATH"] == "owner/name"
    assert run.settings("sft")["model_path"] == "owner/name"


def test_text_rl_gets_no_sandbox(make_run):
    run = make_run(rl=["+tool=none"])
    pipeline.train_rl(run)
    [rl] = run.supervisor.commands
    assert rl.env["SANDBOX_URL"] == ""


def test_sft_starts_from_the_random_model_and_shows_its_progress(make_run, tmp_path):
    run = make_run(sft=["optim.lr=1"], python="/warm/python")
    pipeline.train_sft(run)
    [sft] = run.supervisor.commands
    assert sft.command[0] == "bash" and Path(sft.command[1]).exists() and sft.command[2:] == ["optim.lr=1"]
    assert sft.env == {
        "PYTHON": sys.executable,
        "RETOOL_WARM_PYTHON": "/warm/python",
        "DATA_DIR": str(tmp_path / "data"),
        "MODEL_PATH": str(tmp_path / "model"),
        "OUTPUT_DIR": str(tmp_path / "sft"),
    }
    assert sft.log == tmp_path / "sft" / "log.txt" and callable(sft.watch)


def test_rl_starts_from_the_merged_sft_model_with_a_sandbox_that_runs_code(make_run, tmp_path):
    import urllib.error
    import urllib.request

    urls = []

    def act(command, env):
        urls.append(env["SANDBOX_URL"])
        body = json.dumps({"code": "print(6*7)", "language": "python"}).encode()
        request = urllib.request.Request(f"{urls[0]}/run_code", body, {"Content-Type": "application/json"})
        assert json.load(urllib.request.urlopen(request))["run_result"]["stdout"] == "42\n"

    run = make_run(act, rl=["trainer.total_training_steps=2"])
    pipeline.train_rl(run)
    [rl] = run.supervisor.commands
    assert rl.command[-1] == "trainer.total_training_steps=2" and Path(rl.command[1]).exists()
    assert "DOCTOR" not in rl.env
    assert rl.env["MODEL_PATH"] == str(tmp_path / "sft" / "merged") and rl.env["OUTPUT_DIR"] == str(tmp_path / "rl")
    with pytest.raises(urllib.error.URLError):  # stopped with the command
        urllib.request.urlopen(urls[0])


@pytest.mark.parametrize(("name", "shards"), [("sft", "global_step_20"), ("rl", "global_step_20/actor")])
def test_merging_takes_the_last_whole_checkpoint_and_replaces_an_older_merge(make_run, tmp_path, name, shards):
    folder = tmp_path / name
    (folder / "global_step_30").mkdir(parents=True)  # being saved when the run was killed
    (folder / "latest_checkpointed_iteration.txt").write_text("20\n")
    (folder / "merged").mkdir()
    (folder / "merged" / "old").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "NOTICE").write_text("changed: 4 bits")

    def act(command, env):
        target = Path(command[command.index("--target_dir") + 1])
        assert target != folder / "merged"  # it is either absent or whole
        target.mkdir()
        (target / "new").touch()

    run = make_run(act)
    pipeline.merge(run, name)
    [merge] = run.supervisor.commands
    assert merge.command[1:6] == ["-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    assert merge.command[merge.command.index("--local_dir") + 1] == str(folder / shards)
    assert merge.env == {"VERL_USE_EXTERNAL_MODULES": "verl_ext"}
    assert {path.name for path in (folder / "merged").iterdir()} == {"new", "NOTICE"}
    assert (folder / "merged" / "NOTICE").read_text() == "changed: 4 bits"


def test_merging_without_a_checkpoint_says_what_to_run(make_run, tmp_path):
    with pytest.raises(CommandFailed, match=f"no checkpoint in {tmp_path}/sft. Run `--stage sft` first"):
        pipeline.merge(make_run(), "sft")


@pytest.mark.parametrize(("when", "model"), [("before", "sft"), ("after", "rl")])
def test_evaluation_rolls_out_the_merged_model_and_must_leave_records(make_run, tmp_path, when, model):
    target = tmp_path / "eval" / when
    records = path_of(target, "trajectories", 0, validate=True)
    records.parent.mkdir(parents=True)
    records.touch()  # of a failed attempt

    with pytest.raises(CommandFailed, match=f"wrote no records into {target}"):
        pipeline.evaluate(make_run(), when)

    def act(command, env):
        assert env["MODEL_PATH"] == str(tmp_path / model / "merged") and env["DOCTOR"] == "0"
        assert env["OUTPUT_DIR"] == str(target) and "trainer.val_only=True" in command
        for now, before in (("resume_mode=disable", "resume_mode=auto"), ("recorder.enable=true", "enable=false")):
            places = [number for number, each in enumerate(command) if each.endswith((now, before))]
            assert command[places[-1]].endswith(now), "the last wins"
        records.parent.mkdir(parents=True)
        records.touch()

    pipeline.evaluate(make_run(act, rl=["trainer.resume_mode=auto", "retool.recorder.enable=false"]), when)


def test_an_apostrophe_in_the_folders_name_stays_in_the_names_of_the_problems(make_run, tmp_path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    out = tmp_path / "it's"

    def act(command, env):
        (files,) = [each for each in command if each.startswith("data.val_files=")]
        assert set(OverridesParser.create().parse_override(files).value()) == {str(out / "data" / "eval.parquet")}
        path_of(out / "eval" / "after", "trajectories", 0, validate=True).parent.mkdir(parents=True)
        path_of(out / "eval" / "after", "trajectories", 0, validate=True).touch()

    pipeline.evaluate(make_run(act, out=out), "after")


def test_the_command_that_shows_the_rollouts_is_one_that_is_there(make_run, tmp_path, capsys):
    pipeline.report(make_run())
    retool, *rest = capsys.readouterr().out.splitlines()[-1].partition(": ")[2].split()
    assert Path(retool).is_file() and rest == ["view", str(tmp_path)]


@pytest.mark.parametrize("own", [Own(), Own(Path("mine.jsonl"))])
def test_what_shortcuts_score_is_shown_of_the_problems_that_are_evaluated(make_run, tmp_path, capsys, own):
    records = path_of(tmp_path / "eval" / "after", "trajectories", 0, validate=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shortcuts.txt").write_text("svamp_ood: sum of all numbers 5.0%\n")

    def act(command, env):
        records.parent.mkdir(parents=True)
        records.touch()

    pipeline.evaluate(make_run(act, own=own), "after")
    assert ("svamp_ood" in capsys.readouterr().out) is (own.data is None)


# The doctor, in the real launcher ------------------------------------------------------------------------------------


def done_until(folder, *steps, **settings):
    """A quickstart's folder whose steps are done, with empty results."""
    run = Quickstart(folder, 0, [], [], settings.get("rl", []), None)
    for name in ("data", "sft/merged"):
        (folder / name).mkdir(parents=True)
    for step in steps:
        Journal(folder / "stages.json").add(stage=step, status="done", wall_s=1.0, settings=run.settings(step))


def test_rl_does_not_start_past_the_doctor_and_its_findings_are_shown(tmp_path):
    done_until(tmp_path, "data", "sft", "merge_sft")
    command = [sys.executable, "-m", "verl_ext.quickstart", "--out", str(tmp_path), "--stage", "rl"]
    done = subprocess.run(
        [*command, "--rl", "+trainer.total_training_stepz=2"],
        cwd=pipeline.REPO,
        env={key: value for key, value in os.environ.items() if key != "DOCTOR"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert re.search(r"FAIL  config .*total_training_stepz", done.stderr), done.stderr
    assert "FAIL  data " in done.stderr and "run_tiny_dapo.sh: not started, see above." in done.stderr
    assert "doctor: tiny_dapo, quick checks: " in done.stdout + done.stderr
    assert "verl.trainer.main_ppo" not in (tmp_path / "rl" / "log.txt").read_text()


# A full disk ---------------------------------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_written_does_not_hide_what_broke_a_step(make_run, called, monkeypatch):
    def breaks(run):
        raise CommandFailed("the reason")

    monkeypatch.setattr(pipeline, "STEPS", [("data", "data", "", breaks, ())])
    monkeypatch.setattr(pipeline.durable, "write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(CommandFailed, match="the reason"):
        run_pipeline(make_run(), ["data"])


def test_a_full_disk_that_the_pipeline_meets_itself_is_named(monkeypatch, tmp_path):
    def fails(run, stages):
        raise OSError(28, "No space left on device", str(tmp_path / "new" / "stages.part"))

    monkeypatch.setattr(pipeline, "run_pipeline", fails)
    monkeypatch.setattr(pipeline, "Supervisor", lambda lock: contextlib.nullcontext(RecordingSupervisor()))
    monkeypatch.setattr(sys, "argv", ["pipeline", "--out", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        pipeline.main()
    message = str(ended.value)
    assert f"The disk is full: {tmp_path}/new (on " in message and " are free" in message
    assert "`du -xh --max-depth=2 " in message and "the same command continues from here" in message
