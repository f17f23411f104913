import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_ext.quickstart import pipeline
from verl_ext.quickstart.options import parse_options
from verl_ext.quickstart.pipeline import Journal, Quickstart, run_pipeline
from verl_ext.quickstart.source import NoSource, find_source
from verl_ext.quickstart.supervise import CommandFailed

STEP_NAMES = ["data", "sft", "merge_sft", "rl", "merge_rl", "eval_before", "eval_after"]


class RecordingSupervisor:
    """Stands for the commands: records them, and does what the test says in their place."""

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


def test_steps_stand_behind_what_they_need():
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
    run_pipeline(make_run(seed=3, sft=["optim.lr=1"]), ["data", "sft"])
    data, sft = json.loads((tmp_path / "stages.json").read_text())
    assert (data["stage"], sft["stage"]) == ("data", "sft")
    assert sft == {
        "stage": "sft",
        "started": 1010.0,
        "finished": 1020.0,
        "wall_s": 10.0,
        "status": "done",
        "peak_gb": 1.5,
        "settings": {"seed": 3, "data": [], "sft": ["optim.lr=1"]},
    }


@pytest.mark.parametrize("changed", [{"seed": 1}, {"sft": ["a=1"]}, {"data_args": ["--rl=64"]}])
def test_a_run_with_other_settings_is_not_mixed_in(make_run, called, changed):
    run_pipeline(make_run(), ["data", "sft"])
    with pytest.raises(SystemExit, match="holds a run with other settings(.|\n)*--fresh.*--out"):
        run_pipeline(make_run(**changed), ["rl"])
    assert called == ["data", "sft"]


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
    assert [path.name for path in (folder / "merged").iterdir()] == ["new"]


def test_merging_without_a_checkpoint_says_what_to_run(make_run, tmp_path):
    with pytest.raises(CommandFailed, match=f"no checkpoint in {tmp_path}/sft. Run `--stage sft` first"):
        pipeline.merge(make_run(), "sft")


@pytest.mark.parametrize(("when", "model"), [("before", "sft"), ("after", "rl")])
def test_evaluation_rolls_out_the_merged_model_and_must_leave_samples(make_run, tmp_path, when, model):
    target = tmp_path / "eval" / when
    target.mkdir(parents=True)
    (target / "0.jsonl").touch()  # of a broken attempt

    with pytest.raises(CommandFailed, match=f"wrote no samples into {target}"):
        pipeline.evaluate(make_run(), when)

    def act(command, env):
        assert env["MODEL_PATH"] == str(tmp_path / model / "merged") and env["DOCTOR"] == "0"
        assert {"trainer.val_only=True", f"trainer.validation_data_dir='{target}'"} <= set(command)
        assert command.index("trainer.resume_mode=disable") > command.index("trainer.resume_mode=auto")  # the last wins
        target.mkdir()
        (target / "0.jsonl").touch()

    pipeline.evaluate(make_run(act, rl=["trainer.resume_mode=auto"]), when)


def test_help_names_every_option_also_where_nothing_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeline", "--help"])
    with pytest.raises(SystemExit) as ended:
        pipeline.main()
    assert ended.value.code == 0
    ours = capsys.readouterr().out
    bare = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/nowhere"}
    shown = subprocess.run(
        ["bash", "scripts/quickstart.sh", "--help"], cwd=pipeline.REPO, env=bare, capture_output=True, text=True
    )
    assert shown.returncode == 0 and not shown.stderr
    options = set(re.findall(r"--[a-z]+", ours)) - {"--help"}
    assert options >= {"--stage", "--fresh", "--out", "--seed"}
    for word in (*options, *pipeline.STAGES):
        assert word in shown.stdout, f"scripts/quickstart.sh does not say {word}"


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
        timeout=50,
    )
    assert done.returncode == 1
    assert re.search(r"FAIL  config .*total_training_stepz", done.stderr), done.stderr
    assert "FAIL  data " in done.stderr and "run_tiny_dapo.sh: not started, see above." in done.stderr
    assert "doctor: tiny_dapo, quick checks: " in done.stdout + done.stderr
    assert "verl.trainer.main_ppo" not in (tmp_path / "rl" / "log.txt").read_text()


# --from --------------------------------------------------------------------------------------------------------------


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


def test_from_takes_data_and_sft_and_runs_rl_with_settings_of_its_own(source, make_run, called, tmp_path, capsys):
    out = tmp_path / "second"
    out.mkdir()
    run = make_run(out=out, seed=3, rl=["b=2"], source=find_source(source))
    run_pipeline(run, list(pipeline.STAGES))
    assert called == ["rl", "merge_rl", "eval_before", "eval_after", "report"]
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"stages.json"}
    assert files == {
        *("data/rl_train.parquet", "data/eval.parquet", "model/config.json", "sft/metrics-1.jsonl"),
        *("sft/merged/model.safetensors", "sft/merged/config.json", "sft/merged/tokenizer.json"),
    }
    printed = capsys.readouterr().out
    assert f"[from] {source}: data and SFT of seed 7, data ['--rl=64'], sft ['optim.lr=1']" in printed
    assert "sft/merged/model.safetensors (merged SFT model), SHA-256 " in printed
    assert f"[sft] taken from {source}" in printed
    entries = {entry["stage"]: entry for entry in json.loads((out / "stages.json").read_text())}
    assert (entries["sft"]["from"], entries["sft"]["wall_s"]) == (str(source), None)
    assert entries["sft"]["settings"]["seed"] == 7 and entries["rl"]["settings"]["seed"] == 3
    assert entries["rl"]["settings"]["rl"] == ["b=2"]

    called.clear()
    run_pipeline(run, list(pipeline.STAGES))
    assert called == ["report"]


def test_another_sft_in_the_folder_that_from_names_is_not_mixed_in(source, make_run, called, tmp_path):
    out = tmp_path / "second"
    out.mkdir()
    run_pipeline(make_run(out=out, source=find_source(source)), ["rl"])
    (source / "sft" / "merged" / "model.safetensors").write_text("trained again")
    with pytest.raises(SystemExit, match="holds a run with other settings"):
        run_pipeline(make_run(out=out, source=find_source(source)), ["rl"])


@pytest.mark.parametrize("gone", ["sft/merged/model.safetensors", "data/eval.parquet", "merge_sft"])
def test_from_names_what_its_folder_lacks(source, gone):
    if "/" in gone:
        (source / gone).unlink()
    else:
        journal = Journal(source / "stages.json")
        journal.add(stage=gone, status="broken", wall_s=1.0, settings={})
    with pytest.raises(NoSource, match=f"--from {source}: .*{gone}.*bash scripts/quickstart.sh --out"):
        find_source(source)


def test_each_from_gets_a_folder_of_its_own_and_the_same_command_its_own_again(source, make_run, called):
    def start(rl):
        run = make_run(out=Path(), rl=rl, source=find_source(source))
        run.out = pipeline.next_folder(run)
        run.out.mkdir(exist_ok=True)
        run_pipeline(run, ["rl"])
        return run.out.name

    assert [start(["a=1"]), start(["b=2"]), start(["a=1"])] == ["first-2", "first-3", "first-2"]


# Arguments before the install ----------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """The scripts with an install that leaves a trace and fails."""
    for name in ("scripts/quickstart.sh", "scripts/test.sh", "verl_ext/quickstart/options.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pipeline.REPO / name, tmp_path / name)
    (tmp_path / "scripts" / "setup_env.sh").write_text("touch installed; exit 9\n")

    def call(script, *arguments):
        (tmp_path / "installed").unlink(missing_ok=True)
        command = ["bash", str(tmp_path / "scripts" / script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done, (tmp_path / "installed").exists()

    return call


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stge", "rl"], "unrecognized arguments: --stge"),
        (["--stage", "train"], "invalid choice: 'train'"),
        (["--seed", "one"], "invalid int value"),
        (["--rl", "trainer.save_freq"], "expected a Hydra override of the form KEY=VALUE"),
        (["--from", "/nowhere"], "--from /nowhere: no quickstart is there"),
        (["outputs/quickstart"], "unrecognized arguments: outputs/quickstart"),
    ],
)
def test_a_wrong_argument_is_told_before_the_install(checkout, arguments, said):
    done, installed = checkout("quickstart.sh", *arguments)
    assert (done.returncode, installed) == (2, False)
    assert said in done.stderr


def test_help_and_the_wrong_part_of_the_tests_install_nothing(checkout):
    for script, *arguments in (["quickstart.sh", "--stage", "rl", "--help"], ["test.sh", "unit", "--help"]):
        done, installed = checkout(script, *arguments)
        assert (done.returncode, installed) == (0, False) and "Usage:" in done.stdout
    done, installed = checkout("test.sh", "uint")
    assert (done.returncode, installed) == (2, False) and "'uint' is no part (unit, slow, all)" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("quickstart.sh", ["--rl=~trainer.x", "--sta", "rl", "--out", "x"]),  # as argparse has it: --stage
        ("test.sh", ["slow", "-k", "lock"]),
        ("test.sh", ["-k", "lock"]),
        ("test.sh", ["unit", "scripts/test.sh::name"]),
    ],
)
def test_right_arguments_come_to_the_install(checkout, script, arguments):
    done, installed = checkout(script, *arguments)
    assert (done.returncode, installed) == (9, True), done.stderr


def test_from_goes_with_neither_data_nor_sft_nor_its_own_folder(source, capsys):
    for arguments, said in (
        (["--data=--rl=64"], "takes the data and the SFT as they are"),
        (["--sft", "a=1"], "takes the data and the SFT as they are"),
        (["--out", str(source)], "are the same folder"),
        (["--out", str(source.parent)], "holds the folder of --from"),
    ):
        with pytest.raises(SystemExit):
            parse_options(["--from", str(source), *arguments])
        assert said in capsys.readouterr().err


# A full disk ---------------------------------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_written_does_not_hide_what_broke_a_step(make_run, called, monkeypatch):
    def breaks(run):
        raise CommandFailed("the reason")

    monkeypatch.setattr(pipeline, "STEPS", [("data", "data", "", breaks, ())])
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(CommandFailed, match="the reason"):
        run_pipeline(make_run(), ["data"])


def test_a_full_disk_that_the_pipeline_meets_itself_is_named(monkeypatch, tmp_path):
    def fails(run, stages):
        raise OSError(28, "No space left on device", str(tmp_path / "new" / "stages.part"))

    monkeypatch.setattr(pipeline, "run_pipeline", fails)
    monkeypatch.setattr(pipeline, "Supervisor", lambda: __import__("contextlib").nullcontext(RecordingSupervisor()))
    monkeypatch.setattr(sys, "argv", ["pipeline", "--out", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        pipeline.main()
    message = str(ended.value)
    assert f"The disk is full: {tmp_path}/new (on " in message and " are free" in message
    assert "`du -xh --max-depth=2 " in message and "the same command goes on from here" in message


def test_main_passes_its_arguments_on_and_reports_a_failure_in_one_line(monkeypatch, tmp_path):
    seen = []

    def fails(run, stages):
        seen.append((run, stages))
        raise CommandFailed("the reason")

    monkeypatch.setattr(pipeline, "run_pipeline", fails)
    monkeypatch.setattr(pipeline, "Supervisor", lambda: __import__("contextlib").nullcontext(RecordingSupervisor()))
    arguments = f"--out {tmp_path}/new --seed 4 --stage sft --stage rl --sft a=1 --rl b=2 --data=--rl=64"
    monkeypatch.setattr(sys, "argv", ["pipeline", *arguments.split()])
    with pytest.raises(SystemExit, match="^quickstart: the reason$"):
        pipeline.main()
    [(run, stages)] = seen
    assert stages == ["sft", "rl"] and (tmp_path / "new").is_dir() and Path(run.python).name == "python"
    assert (run.out, run.seed, run.data_args, run.sft) == (tmp_path / "new", 4, ["--rl=64"], ["a=1"])
    assert run.rl == ["data.seed=4", "actor_rollout_ref.rollout.seed=4", "b=2"]


def test_fresh_deletes_a_run_but_not_a_folder_that_holds_none(tmp_path):
    run, empty, home = tmp_path / "run", tmp_path / "empty", tmp_path / "home"
    for folder in (run / "sft", empty, home / "thesis"):
        folder.mkdir(parents=True)
    (run / "stages.json").write_text("[]")

    for folder in (run, empty):
        pipeline.delete_run(folder)
        assert not folder.exists()
    with pytest.raises(SystemExit, match=f"would delete {home}, which holds no run"):
        pipeline.delete_run(home)
    assert (home / "thesis").exists()


def test_fresh_does_not_delete_the_folder_above_other_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "REPO", tmp_path)  # below outputs/ a folder without stages.json may be deleted
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "stages.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"holds other runs \(quickstart, quickstart-2\). Name the run's own folder"):
        pipeline.delete_run(tmp_path / "outputs")
    assert len(list((tmp_path / "outputs").iterdir())) == 2


def test_two_pipelines_do_not_write_into_one_folder(monkeypatch, tmp_path):
    (tmp_path / "stages.json").write_text("[]")
    for arguments in ([], ["--fresh"]):
        monkeypatch.setattr(sys, "argv", ["pipeline", "--out", str(tmp_path), *arguments])
        with pipeline.lock_folder(tmp_path), pytest.raises(SystemExit, match=f"Another run writes into {tmp_path}"):
            pipeline.main()
        assert (tmp_path / "stages.json").exists()
