"""Options of the quickstart: checked before the install, and listed by `--help`."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from verl_ext.quickstart import pipeline


def test_help_names_every_option_even_if_nothing_is_installed(monkeypatch, capsys):
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
    for model, settings in (("small", {"model": "small"}), ("tiny", {})):
        (tmp_path / "tests" / f"of_{model}").mkdir(parents=True)
        journal = json.dumps([{"stage": "sft", "settings": settings}])
        (tmp_path / "tests" / f"of_{model}" / "stages.json").write_text(journal)
    (tmp_path / "scripts" / "setup_env.sh").write_text('touch installed; echo "for ${RETOOL_HARDWARE-}."; exit 9\n')

    def call(script, *arguments, stack=None, **environment):
        (tmp_path / "installed").unlink(missing_ok=True)
        if stack:  # that .venv has
            (tmp_path / ".venv").mkdir(exist_ok=True)
            (tmp_path / ".venv" / "retool-env.txt").write_text(f"{stack}\n/checkout\n")
        command = ["bash", str(tmp_path / "scripts" / script), *arguments]
        bare = {name: value for name, value in os.environ.items() if name != "RETOOL_HARDWARE"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=bare | environment)
        return done, (tmp_path / "installed").exists()

    return call


SMALL = ["--model", "small"]


@pytest.mark.parametrize(
    ("script", "arguments", "stack", "given", "taken"),
    [
        ("quickstart.sh", [], None, "", "cpu"),  # whatever GPU is here
        ("quickstart.sh", [], "cpu", "", "cpu"),
        ("quickstart.sh", [], "gpu", "", None),
        ("quickstart.sh", [], None, "gpu", None),
        ("quickstart.sh", SMALL, None, "", ""),  # as nvidia-smi says
        ("quickstart.sh", SMALL, "cpu", "", "cpu"),
        ("quickstart.sh", ["--model=small"], "gpu", "", "gpu"),
        ("quickstart.sh", SMALL, "cpu", "gpu", "gpu"),
        ("quickstart.sh", ["--mod", "small"], "gpu", "", "gpu"),  # as argparse has it
        ("quickstart.sh", ["--from", "tests/of_small"], "gpu", "", "gpu"),
        ("quickstart.sh", ["--from", "tests/of_tiny"], "gpu", "", None),
        ("test.sh", ["unit"], None, "", "cpu"),
        ("test.sh", ["unit"], "gpu", "", "gpu"),
        ("test.sh", ["unit"], "gpu", "cpu", "cpu"),
    ],
)
def test_the_tiny_model_is_for_a_cpu_and_no_command_replaces_the_stack(
    checkout, script, arguments, stack, given, taken
):
    done, installed = checkout(script, *arguments, stack=stack, **({"RETOOL_HARDWARE": given} if given else {}))
    if taken is None:
        assert (done.returncode, installed) == (2, False) and "RETOOL_HARDWARE=cpu, or --model small" in done.stderr
    else:
        assert installed and f"for {taken}." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stge", "rl"], "unrecognized arguments: --stge"),
        (["--stage", "train"], "invalid choice: 'train'"),
        (["--seed", "one"], "invalid int value"),
        (["--rl", "trainer.save_freq"], "expected a Hydra override of the form KEY=VALUE"),
        (["--from", "/nowhere"], "--from /nowhere: expected the folder of a quickstart, but it has no stages.json"),
        (["outputs/quickstart"], "unrecognized arguments: outputs/quickstart"),
        (["--compare", "tool"], "invalid choice: 'tool'"),
        (["--compare", "text", "--from", "tests/of_tiny"], "--from starts from an SFT with the tool"),
    ],
)
def test_a_wrong_argument_is_reported_before_the_install(checkout, arguments, said):
    done, installed = checkout("quickstart.sh", *arguments)
    assert (done.returncode, installed) == (2, False)
    assert said in done.stderr


def test_help_and_the_wrong_part_of_the_tests_install_nothing(checkout):
    for script, *arguments in (["quickstart.sh", "--stage", "rl", "--help"], ["test.sh", "unit", "--help"]):
        done, installed = checkout(script, *arguments)
        assert (done.returncode, installed) == (0, False) and "Usage:" in done.stdout
    done, installed = checkout("test.sh", "uint")
    assert (done.returncode, installed) == (2, False) and "'uint' is neither a part (unit, nightly)" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("quickstart.sh", ["--rl=~trainer.x", "--sta", "rl", "--out", "x"]),  # as argparse has it: --stage
        ("test.sh", ["nightly", "-k", "lock"]),
        ("test.sh", ["-k", "lock"]),
        ("test.sh", ["unit", "scripts/test.sh::name"]),
    ],
)
def test_right_arguments_come_to_the_install(checkout, script, arguments):
    done, installed = checkout(script, *arguments)
    assert (done.returncode, installed) == (9, True), done.stderr


def test_each_model_has_its_own_folder():
    from verl_ext.quickstart.options import DEFAULT_OUT, parse_options
    from verl_ext.quickstart.rungs import RUNGS

    assert DEFAULT_OUT.keys() == RUNGS.keys()
    assert parse_options([]).out == pipeline.REPO / "outputs" / "quickstart"
    assert parse_options(["--model", "small"]).out == pipeline.REPO / "outputs" / "small"
