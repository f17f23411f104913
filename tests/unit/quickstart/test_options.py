"""Options of the quickstart: told before the install, and by `--help`."""

import re
import shutil
import subprocess
import sys

import pytest

from verl_ext.quickstart import pipeline


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


def test_each_model_has_a_folder_of_its_own():
    from verl_ext.quickstart.options import DEFAULT_OUT, parse_options
    from verl_ext.quickstart.rungs import RUNGS

    assert DEFAULT_OUT.keys() == RUNGS.keys()
    assert parse_options([]).out == pipeline.REPO / "outputs" / "quickstart"
    assert parse_options(["--model", "small"]).out == pipeline.REPO / "outputs" / "small"
