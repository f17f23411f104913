"""Every command that takes a RUN takes a run's folder, and the quickstart's folder above it, for the same files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.studies.compare_with_published import main as compare_with_published
from tests.unit.evaluation.rows import row, write
from tests.unit.evaluation.test_checkpoint import make_step, note
from verl_ext.checkpoints.__main__ import main as checkpoints
from verl_ext.checkpoints.manifest import vouch
from verl_ext.evaluation.__main__ import main as evaluate
from verl_ext.records.problem import problem_of
from verl_ext.report.__main__ import main as report

REPO = Path(__file__).parents[2]

# Stands in for the Python of merge_and_eval.sh: looks for the checkpoint as `retool evaluate` would.
FIND = """
import sys
from pathlib import Path
from verl_ext.evaluation.checkpoint import find_checkpoint
assert sys.argv[1:-1] == ["-m", "verl_ext.evaluation", "--checkpoint"]
print(find_checkpoint(Path(sys.argv[-1])).shards)
"""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Both runs of a quickstart, with what verl and verl_ext leave in them."""
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "stages.json").write_text("[]")
    for name, step, data in (("sft", 3, {"train/loss": 0.5}), ("rl", 5, {"train/acc": 0.5, "actor/entropy": 0.25})):
        actor = make_step(folder / name, step, ranks=1, actor=name == "rl")
        vouch(actor.parent if name == "rl" else actor)
        note(folder / name, step)
        (folder / name / "metrics-1.jsonl").write_text(json.dumps({"step": step, "data": data}) + "\n")
        (folder / name / "hydra").mkdir()
        config = {"actor_rollout_ref": {}} if name == "rl" else {"model": {}}
        (folder / name / "hydra" / "config.yaml").write_text(json.dumps(config))
    name = problem_of({"raw_prompt": [{"role": "user", "content": "a"}], "extra_info": {"index": 0}})
    for step, acc in ((0, 0), (5, 1)):
        write(folder / "rl", [row("a", 0, acc, problem=name)], step=step)
    return folder


def run_report(run, tools):
    report(["--run", str(run)])
    return f"RL step {json.loads((run / 'summary.json').read_text())['rl']['steps']}"


def run_checkpoints(run, tools):
    checkpoints([str(run)])
    return next(line for line in tools.printed().splitlines() if line.startswith("step      5"))


def run_samples(run, tools):
    evaluate(["--samples", str(run), "--draws", "10"])
    return tools.printed()


def run_compare(run, tools):
    other = write(tools.tmp / "other", [row("a", 0, 0, problem=None)])  # paired by the prompt
    evaluate(["--samples", str(other), "--compare", str(run), "--draws", "10"])
    return tools.printed()


def run_merge_and_eval(run, tools):
    python = tools.tmp / "python"
    (tools.tmp / "find.py").write_text(FIND)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tools.tmp}/find.py "$@"\n')
    python.chmod(0o755)
    command = ["bash", str(REPO / "scripts" / "merge_and_eval.sh"), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHON": str(python)})
    return done.stdout or done.stderr


def run_compare_metrics(run, tools):
    assert tools.script("compare_metrics", str(run), str(run)) == 0
    return tools.printed()


def run_compare_with_published(run, tools):
    page = tools.tmp / "page.html"
    compare_with_published(["--no-published", "--run", str(run), "--out", str(page)])
    return tools.printed()


def run_filter_by_pass_rate(run, tools):
    import pandas as pd

    data, out = tools.tmp / "data.parquet", tools.tmp / "out.parquet"
    problem = {"prompt": [{"role": "user", "content": "a"}], "extra_info": {"index": 0}}
    pd.DataFrame([problem]).to_parquet(data)
    tools.script("filter_by_pass_rate", "--data", str(data), "--out", str(out), "--runs", str(run))
    return tools.printed()


COMMANDS = {  # command -> what it says of the RL run
    run_report: "RL step 5",
    run_checkpoints: "GB  complete",
    run_samples: "# {rl}/records/trajectories/val_000005.parquet",
    run_compare: "## Compared with {rl}/records/trajectories/val_000005.parquet",
    run_merge_and_eval: "{rl}/global_step_5/actor",
    run_compare_metrics: "equal: 1 steps, 2 values",
    run_compare_with_published: "0.25",
    run_filter_by_pass_rate: "2 samples of {rl}/records/trajectories (2 files)",
}


@pytest.fixture
def tools(tmp_path, load_script, monkeypatch, capsys):
    class Tools:
        tmp = tmp_path

        @staticmethod
        def printed() -> str:
            return capsys.readouterr().out

        @staticmethod
        def script(name, *arguments):
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
            return load_script(name).main()

    return Tools


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__.removeprefix("run_"))
def test_a_command_takes_a_run_and_the_quickstarts_folder_above_it(command, quickstart, tools):
    rl = quickstart / "rl"
    of_run, of_quickstart = command(rl, tools), command(quickstart, tools)
    assert of_run == of_quickstart and COMMANDS[command].format(rl=rl) in of_run


def test_where_there_is_no_rl_run_the_sft_run_is_taken(tmp_path, quickstart, tools):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "sft").symlink_to(quickstart / "sft")
    run = tmp_path / "quickstart"
    assert run_compare_metrics(run, tools) == "equal: 1 steps, 1 values\n"
    assert run_merge_and_eval(run, tools) == f"{run}/sft/global_step_3\n"
