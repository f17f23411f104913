"""What studies and benchmarks share: results that are kept, the commands of runs, the command line, tables.

A study runs only what is missing, and keeps each result as a line of a JSON-lines file. A comparison that takes many
hours can therefore be made in parts, and on several machines that share nothing except this file. Each result records
the settings it was made with, and so does the folder of a run that has no result yet.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil

from verl_ext.evaluation.estimators import half_width
from verl_ext.quickstart.rungs import RUNGS
from verl_ext.runs import durable, jsonl
from verl_ext.runs.lock import LOCK
from verl_ext.runs.machine import environment
from verl_ext.runs.metrics import Metrics, read_metrics

REPO = Path(__file__).resolve().parents[2]
BEGUN = "comparison.json"  # in a run's folder: the settings that it began with


def begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings that a run begins with. `settings` holds plain JSON."""
    durable.make_folder(folder)
    durable.write_text(folder / BEGUN, json.dumps(settings))


def has_begun(folder: Path, settings: Mapping[str, Any], writes: str) -> bool:
    """Return whether a run was begun in a folder.

    Args:
        writes: a glob of files that every run writes there.
    Raises:
        ValueError: it began with other settings, or without `begin`.
    """
    advice = f"Delete it, or write elsewhere with --out.\n  now:   {dict(settings)}"
    if not (folder / BEGUN).is_file():
        if any(folder.glob(writes)):
            raise ValueError(f"{folder} was not started by this script. {advice}")
        return False
    if (there := json.loads((folder / BEGUN).read_text())) != settings:
        raise ValueError(f"{folder} was started with other settings. {advice}\n  there: {there}")
    return True


def empty(folder: Path) -> None:
    """Delete a folder's content except its lock. The caller holds it, as a killed script's run may still be there."""
    for path in set(folder.iterdir()) - {folder / LOCK}:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


class Published:
    """The results in a file.

    Attributes:
        rows: name of a run -> its result.
    Raises:
        ValueError: a line of the file is not a result.
    """

    def __init__(self, path: Path):
        self._path = path
        expected = "an object with `run`, the name of the run (delete the line to repeat the run)"
        lines = jsonl.read(path, lambda row: (str(row["run"]), row), expected) if path.exists() else ()
        self.rows: dict[str, dict[str, Any]] = dict(lines)

    def has(self, run: str, settings: Mapping[str, Any]) -> bool:
        """Return whether there is a result of a run.

        Raises:
            ValueError: there is one, made with other settings.
        """
        if run not in self.rows:
            return False
        if (there := self.rows[run].get("settings")) != settings:
            raise ValueError(
                f"{self._path}: {run} was made with other settings.\n  there: {there}\n  now:   {dict(settings)}\n"
                "Name another file with --results, or delete the line to repeat the run."
            )
        return True

    def add(self, run: str, result: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Write a result to the disk. `settings` holds plain JSON."""
        durable.make_folder(self._path.parent)
        jsonl.cut_half_line(self._path)
        self.rows[run] = {"run": run, "settings": dict(settings), **result}
        durable.append_line(self._path, jsonl.dumps(self.rows[run]))


def made_with(digests: Mapping[str, str], *, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of an RL run of the tiny task: the SFT that --from names, the values of the task, and the
    machine, which its speed depends on."""
    platform = environment()["platform"]
    made = {"from": dict(digests), "task": RUNGS["tiny"].task_digest(), "steps": steps, "overrides": list(overrides)}
    return made | {name: platform[name] for name in ("cpu", "cores")}


def metrics_of(run: Path) -> Metrics:
    return read_metrics(list(run.glob("metrics*.jsonl")))


def quickstart(out: Path, *arguments: str) -> None:
    """Run the quickstart into `out`, or the part of it that is missing. An interrupt first ends it in order.

    Raises:
        CalledProcessError: it failed.
    """
    print(f"== {out}", flush=True)
    command = [sys.executable, "-m", "verl_ext.quickstart", "--out", str(out), *arguments]
    # A separate session: Ctrl-C reaches only this process.
    process = subprocess.Popen(command, cwd=REPO, start_new_session=True)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()  # the quickstart also takes this as an interrupt
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def obey_signals() -> None:
    """SIGTERM and a closed terminal interrupt this process like Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)


def make_sft(source: Path, model: str = "tiny") -> None:
    """Make the data and the SFT model of a quickstart, unless they are there."""
    if not (source / "sft" / "merged").is_dir():
        quickstart(source, "--model", model, "--stage", "data", "--stage", "sft", "--stage", "merge")


def rl_command(overrides: Iterable[str], *, steps: int, seed: int) -> list[str]:
    """Return the command of an RL run of the tiny task."""
    seeds = (f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}")
    launcher = REPO / "recipe" / "retool" / RUNGS["tiny"].rl_launcher
    return ["bash", str(launcher), f"trainer.total_training_steps={steps}", *seeds, *overrides]


def rl_environment(source: Path, out: Path, sandbox: str) -> dict[str, str]:
    """Return the variables of a launcher that trains from the data and the SFT model of a quickstart."""
    return {
        "PYTHON": sys.executable,
        "DOCTOR": "0",
        "DATA_DIR": str(source / "data"),
        "MODEL_PATH": str(source / "sft" / "merged"),
        "OUTPUT_DIR": str(out),
        "SANDBOX_URL": sandbox,
    }


def whole_cpu() -> dict[str, str]:
    """Return this process's variables, plus those that recipe/retool/run_smollm2_dapo.sh adds on a CPU if unset."""
    command = "set -euo pipefail; source recipe/retool/common.sh; all_cores; env -0"
    told = subprocess.run(["bash", "-c", command], cwd=REPO, check=True, capture_output=True, text=True).stdout
    return {"VLLM_CPU_KVCACHE_SPACE": "1"} | dict(line.split("=", 1) for line in told.split("\0") if line)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process, of all below it, and of those that these have waited for."""
    return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))


def command_line(spec: ModuleSpec, doc: str) -> argparse.ArgumentParser:
    """Make the parser of a module that is run as `python -m MODULE`, with its docstring as help."""
    return argparse.ArgumentParser(
        prog=f"python -m {spec.name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_places(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options --from, --out (a folder in outputs/ by default) and --results."""
    parser.add_argument("--from", dest="source", type=Path, default=Path("outputs/quickstart"), help="a quickstart")
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / out, help="of the runs")
    parser.add_argument("--results", type=Path, help="default: results.jsonl in --out")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def spread(values: Sequence[float], digits: int) -> str:
    """Format the mean and the standard deviation over runs."""
    return f"{fmean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def interval(values: Sequence[float], form: str) -> str:
    """Format a mean, with half the width of its 95% interval if there are two or more values."""
    width = half_width(values)
    return f"{fmean(values):{form}}" + ("" if width is None else f" ± {width:{form.lstrip('+')}}")
