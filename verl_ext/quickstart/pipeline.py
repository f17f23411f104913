"""The quickstart: data, SFT, merge, RL, merge, evaluation and report, as one resumable pipeline of the real commands.

    retool quickstart [--stage STAGE] [--fresh] [--out DIR] ...

scripts/quickstart.sh sets up the environment and calls this. Each stage is a launcher of recipe/ or a command that
README names; this file only orders them, shows their progress, and makes sure that nothing they started outlives them
(verl_ext/quickstart/supervise.py).
"""

import contextlib
import itertools
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.cpu.warm_python import EXECUTABLE_VARIABLE, warm_python
from verl_ext.evaluation.checkpoint import merge_command, put_merged
from verl_ext.quickstart import disk
from verl_ext.quickstart.fresh import delete_run
from verl_ext.quickstart.options import JOURNAL, STAGES, parse_options
from verl_ext.quickstart.own import Own, read_rewards
from verl_ext.quickstart.rungs import RUNGS, Rung
from verl_ext.quickstart.source import STEPS as TAKEN_STEPS
from verl_ext.quickstart.source import NoSource, Source, find_source
from verl_ext.quickstart.supervise import (
    CommandFailed,
    DiskFull,
    Supervisor,
    Watch,
    show_notes,
    show_rl_progress,
    show_sft_progress,
)
from verl_ext.runs import durable
from verl_ext.runs.folder import judged_files
from verl_ext.runs.lock import lock_folder
from verl_ext.sandbox.launch import SandboxNotReady, running_server
from verl_ext.settings import REPO
from verl_ext.settings.overrides import quoted

LICENCE_FILES = ("LICENSE", "NOTICE")
EVALUATION_SAMPLES = 2  # responses per held-out problem
ShowProgress = Callable[[Path], Watch]
AFTERWARDS = " Then the same command continues from here. --out DIR writes to another disk."
NO_TOOL = {"data_args": "--no-tool", "sft": "+tool=none_sft", "rl": "+tool=none"}  # field -> what it adds for text RL
SANDBOX_OPTIONS = ("--preload=",)  # the tasks' programs import nothing, and a smaller fork is cheaper


@dataclass
class Quickstart:
    """One quickstart: where it writes, and the overrides its stages get."""

    out: Path
    seed: int
    data_args: list[str]  # of the rung's prepare.py
    sft: list[str]
    rl: list[str]
    supervisor: Supervisor = field(default_factory=Supervisor)  # entered while it runs
    source: Source | None = None  # the quickstart whose data and SFT this one uses
    rung: Rung = RUNGS["tiny"]
    model_path: str = ""  # an existing model, a folder or a name on the hub; "": the rung's own is built
    own: Own = Own()
    beside: Path | None = None  # the quickstart that it is compared with
    python: str = ""  # of warm_python, for all stages; "": each has its own

    def launch(
        self, launcher: str, overrides: list[str], out: Path, log: Path, show: ShowProgress | None = None, **env: str
    ) -> None:
        """Run a launcher of recipe/retool to its end; `show` prints how it progresses."""
        env |= {"PYTHON": sys.executable, EXECUTABLE_VARIABLE: self.python}
        env |= {"DATA_DIR": str(self.out / "data"), "OUTPUT_DIR": str(out)}
        command = ["bash", str(REPO / "recipe" / "retool" / launcher), *overrides]
        watches = [show_notes(log), show(out)] if show else []
        self.supervisor.run(command, log=log, env=env, watch=lambda: [watch() for watch in watches])

    def sandbox(self) -> AbstractContextManager[str]:
        """Start a sandbox for a launcher and give its address; "" for text RL, which needs none."""
        if NO_TOOL["rl"] in self.rl:
            return nullcontext("")
        return running_server() if self.own.data else running_server(options=SANDBOX_OPTIONS)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Return the steps that are left out: an existing model without traces goes straight to RL on own problems."""
        return ("sft", "merge_sft") if self.own.data and self.model_path and not self.own.traces else ()

    @property
    def policy(self) -> Path | str:
        """Return the model that RL starts from."""
        return self.model_path if self.skipped else self.out / "sft" / "merged"

    @property
    def rl_overrides(self) -> list[str]:
        return [*self.own.rl_overrides(self.out / "data"), *self.rl]

    def settings(self, step: str) -> dict[str, object]:
        """Return the settings that the result of a step depends on."""
        if self.source and step in TAKEN_STEPS:
            return {**self.source.settings[step], "from": self.source.digests}
        task, own = self.rung.task_digest(), {"own": found} if (found := self.own.digests()) else {}
        if self.source:
            return {"seed": self.seed, "task": task, "from": self.source.digests, "rl": self.rl, **own}
        model = {"model": self.rung.name, "model_path": self.model_path, **own}
        settings: dict[str, object] = {"seed": self.seed, "task": task, "data": self.data_args, **model}
        if step != "data":
            settings["sft"] = self.sft
        if step not in ("data", "sft", "merge_sft"):
            settings["rl"] = self.rl
        return settings


def make_data(run: Quickstart) -> None:
    """Make word problems or take the user's, and make tokenizer and initial model unless they exist."""
    prepare, build = (str(run.rung.tools / name) for name in ("prepare.py", "build_model.py"))
    seed, own, data, model = ["--seed", str(run.seed)], run.own, run.out / "data", run.out / "model"
    commands = []
    if not own.data or not (own.traces or run.skipped):  # also for own problems, the SFT of an untaught model
        commands.append([sys.executable, prepare, "--out", str(data), *seed, *run.data_args])
    if own.data:
        commands.append(own.prepare_command(data))
    if own.data and run.rung is RUNGS["tiny"]:
        commands.append(own.build_command(data, model, run.seed))
    elif not run.model_path:
        commands.append([sys.executable, build, "--out", str(model), *(seed if run.rung.model_seed else [])])
    if own.data:
        configs = (run.rung.config("rl"), run.rung.config("sft"))
        commands.append(own.lengths_command(data, run.model_path or str(model), *configs))
    for command in commands:
        run.supervisor.run(command, log=run.out / "data.log")


def train_sft(run: Quickstart) -> None:
    out = run.out / "sft"
    model = run.model_path or str(run.out / "model")
    overrides = [*run.own.sft_overrides(run.out / "data"), *run.sft]
    run.launch(run.rung.sft_launcher, overrides, out, out / "log.txt", show_sft_progress, MODEL_PATH=model)


def train_rl(run: Quickstart) -> None:
    out = run.out / "rl"
    with run.sandbox() as url:
        environment = {"MODEL_PATH": str(run.policy), "SANDBOX_URL": url}
        run.launch(run.rung.rl_launcher, run.rl_overrides, out, out / "log.txt", show_rl_progress, **environment)


def merge(run: Quickstart, name: str) -> None:
    """Merge the last checkpoint of "sft" or "rl" into a Hugging Face folder, as the tutorials do by hand.

    The licence of the model that training began with, and the notice of what was changed, are copied with it.
    """
    if (step := checkpoints.tracked_step(run.out / name)) is None:
        raise CommandFailed(f"There is no checkpoint in {run.out / name}. Run `--stage {name}` first.")
    shards = checkpoints.path_of(run.out / name, step) / ("actor" if name == "rl" else "")
    target = run.out / name / "merged"
    command = merge_command(shards, Path(f"{target}.part"))
    run.supervisor.run(
        [run.python or command[0], *command[1:]],
        log=run.out / name / "merge.log",
        env={"VERL_USE_EXTERNAL_MODULES": "verl_ext"},
    )
    for licence in LICENCE_FILES:
        if (file := Path(run.model_path or run.out / "model") / licence).is_file():  # a folder; not so on the hub
            shutil.copy(file, f"{target}.part")
    put_merged(Path(f"{target}.part"), target)


def evaluate(run: Quickstart, when: str) -> None:
    """Roll out the evaluation problems with the merged model of "before" (SFT) or "after" (RL), tools on."""
    model = run.policy if when == "before" else run.out / "rl" / "merged"
    target = run.out / "eval" / when
    problems = ",".join([quoted(str(run.out / "data" / "eval.parquet"))] * EVALUATION_SAMPLES)
    overrides = [
        *run.rl_overrides,
        *("trainer.val_only=True", "trainer.val_before_train=True", "trainer.resume_mode=disable"),
        *(f"data.val_files=[{problems}]", "retool.recorder.enable=true"),
        *("trainer.save_freq=-1", f"trainer.experiment_name={run.rung.name}_eval"),
    ]
    shutil.rmtree(target, ignore_errors=True)
    with run.sandbox() as url:
        # No doctor: the settings are those of the RL run, and every input comes from earlier stages.
        where = (target, target.with_suffix(".log"))
        run.launch(run.rung.rl_launcher, overrides, *where, MODEL_PATH=str(model), SANDBOX_URL=url, DOCTOR="0")
    if not judged_files(target):
        raise CommandFailed(f"The evaluation wrote no records into {target}. See {target}.log.")
    shortcuts = run.out / "data" / "shortcuts.txt"  # of the small task's problems
    if shortcuts.is_file() and not run.own.data:
        print(textwrap.indent(shortcuts.read_text().rstrip(), "  "), flush=True)


def report(run: Quickstart) -> None:
    command = [sys.executable, "-m", "verl_ext.report", "--run"]
    run.supervisor.run([*command, str(run.out)], log=None)
    if run.beside:
        run.supervisor.run([*command, str(run.beside), str(run.out), "--out", str(run.beside)], log=None)
    retool = Path(sys.executable).with_name("retool")
    print(f"Every rollout, in the browser: {retool} view {run.out}", flush=True)


def without_tool(run: Quickstart) -> Quickstart:
    """Return the same quickstart for text RL: the same problems and samples, and an SFT without calls."""
    out = run.out.with_name(f"{run.out.name}-text")
    return replace(
        run, out=out, beside=run.out, **{name: [*getattr(run, name), added] for name, added in NO_TOOL.items()}
    )


# name, its stage, what it does, how, the steps that must be done before it
STEPS: list[tuple[str, str, str, Callable[[Quickstart], None], tuple[str, ...]]] = [
    ("data", "data", "data and model", make_data, ()),
    ("sft", "sft", "multi-turn SFT", train_sft, ("data",)),
    ("merge_sft", "merge", "FSDP shards -> Hugging Face folder", lambda run: merge(run, "sft"), ("sft",)),
    ("rl", "rl", "DAPO RL with the code sandbox", train_rl, ("merge_sft",)),
    ("merge_rl", "merge", "FSDP shards -> Hugging Face folder", lambda run: merge(run, "rl"), ("rl",)),
    ("eval_before", "eval", "held-out problems, before RL", lambda run: evaluate(run, "before"), ("merge_sft",)),
    ("eval_after", "eval", "held-out problems, after RL", lambda run: evaluate(run, "after"), ("merge_rl",)),
]


class Journal:
    """`stages.json`: which steps are done, when, and with which settings."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: list[dict] = json.loads(path.read_text()) if path.exists() else []

    def done(self, step: str) -> bool:
        return any(entry["stage"] == step and entry["status"] == "done" for entry in self.entries)

    def other_settings(self, run: Quickstart) -> dict | None:
        """Return the first existing step that was made with other settings; None if there is none."""
        return next((entry for entry in self.entries if entry["settings"] != run.settings(entry["stage"])), None)

    def add(self, **entry: object) -> None:
        self.entries = [old for old in self.entries if old["stage"] != entry["stage"]] + [dict(entry)]
        durable.write_text(self.path, json.dumps(self.entries, indent=2) + "\n")

    def wall_s(self, step: str) -> float:
        """Return the seconds that earlier, interrupted attempts at the step took."""
        return sum(entry["wall_s"] for entry in self.entries if entry["stage"] == step)


def run_pipeline(run: Quickstart, stages: Sequence[str]) -> None:
    """Run the steps of `stages` that are not done yet; the report always.

    Raises:
        CommandFailed: a command failed, or a step that `stages` leaves out was not run before.
        SystemExit: an existing step was made with other settings.
    """
    journal = Journal(run.out / JOURNAL)
    if entry := journal.other_settings(run):
        raise SystemExit(
            f"{run.out} holds a run with other settings ({entry['stage']}):\n"
            f"  there: {entry['settings']}\n  now:   {run.settings(entry['stage'])}\n"
            "Start over with --fresh, or write elsewhere with --out."
        )
    if run.source:
        take_source(run, run.source, journal)
    for step, stage, title, action, needs in STEPS:
        if stage not in stages or step in run.skipped:
            continue
        if journal.done(step):
            source = run.source if step in TAKEN_STEPS else None
            print(f"[{step}] {f'taken from {source.folder}' if source else 'done already'}", flush=True)
            continue
        needs = ("data" if need in run.skipped else need for need in needs)
        missing = [need for need in needs if not journal.done(need)]
        if missing:
            if step in ("merge_rl", "eval_after"):  # the stage has another step, which does not need RL
                print(f"[{step}] skipped: {missing[0]} was not run", flush=True)
                continue
            raise CommandFailed(f"[{step}] needs {missing[0]}, which was not run. Run the quickstart without --stage.")
        titles = ("your own problems", "multi-turn SFT") if run.own.data else run.rung.titles
        title = {"data": titles[0], "sft": titles[1]}.get(step, title)
        print(f"[{step}] {title}", flush=True)
        started, before = time.time(), journal.wall_s(step)
        entry = {"stage": step, "started": started, "settings": run.settings(step)}
        try:
            action(run)
        except BaseException:
            ended = {"finished": time.time(), "wall_s": before + time.time() - started, "status": "broken"}
            with contextlib.suppress(OSError):  # on a full disk: the error of the step matters more
                journal.add(**entry, **ended, peak_gb=run.supervisor.peak_gb())
            raise
        wall_s = before + time.time() - started
        journal.add(**entry, finished=time.time(), wall_s=wall_s, status="done", peak_gb=run.supervisor.peak_gb())
        print(f"[{step}] {wall_s:.0f} s", flush=True)
    if "report" in stages:
        report(run)


def take_source(run: Quickstart, source: Source, journal: Journal) -> None:
    """Take data and SFT from the quickstart that `--from` names, unless that was done, and print what is taken.

    Raises:
        NoSource: a file changed while it was copied.
    """
    print(source.describe(), flush=True)
    if all(journal.done(step) for step in TAKEN_STEPS):
        return
    source.copy_to(run.out)
    for step in TAKEN_STEPS:
        now, settings = time.time(), run.settings(step)
        entry = {"stage": step, "started": now, "settings": settings, "finished": now, "status": "done"}
        journal.add(**entry, wall_s=None, peak_gb=None, **{"from": str(source.folder)})


def next_folder(run: Quickstart, source: Path) -> Path:
    """Return the folder for another run from a quickstart's SFT: FOLDER-2, -3, ..., the first new one or this run's."""

    def is_free(out: Path) -> bool:
        return not out.exists() or ((out / JOURNAL).exists() and not Journal(out / JOURNAL).other_settings(run))

    return next(filter(is_free, (source.with_name(f"{source.name}-{number}") for number in itertools.count(2))))


def start(run: Quickstart, stages: Sequence[str], *, fresh: bool) -> None:
    """Run the stages in the run's folder, which nobody else uses meanwhile; if `fresh`, delete it first."""
    if fresh and run.out.exists():
        with lock_folder(run.out):
            delete_run(run.out)
    run.out.mkdir(parents=True, exist_ok=True)
    shared_python = warm_python() if run.rung.shares_python else nullcontext("")
    with lock_folder(run.out) as lock, shared_python as python, Supervisor(lock) as supervisor:
        run_pipeline(replace(run, supervisor=supervisor, python=python), stages)


def main() -> None:
    args = parse_options()
    seeds = [f"data.seed={args.seed}", f"actor_rollout_ref.rollout.seed={args.seed}"]
    out = args.out
    try:
        source = find_source(args.source) if args.source else None
        own = Own(args.data, args.traces, args.tools, read_rewards(args.reward))
        if source:
            source.check_tools(own.digests().get("tools"))
        settings = (args.seed, args.prepare, args.sft, seeds + args.rl)
        rung = RUNGS[source.settings["sft"].get("model", "tiny") if source else args.model]
        path = args.model_path or os.environ.get("MODEL_PATH", "")
        model = {"rung": rung, "model_path": "" if rung is RUNGS["tiny"] else path, "own": own}
        if source and out is None:
            out = next_folder(Quickstart(Path(), *settings, source=source, **model), source.folder)
            print(f"[from] the new run is in {out}", flush=True)
        run, stages = Quickstart(out, *settings, source=source, **model), args.stage or list(STAGES)
        for each in [run, without_tool(run)] if args.compare else [run]:
            out = each.out
            start(each, stages, fresh=args.fresh)
    except (CommandFailed, NoSource, SandboxNotReady) as error:
        raise SystemExit(f"quickstart: {error}{_advice(error, out)}") from None
    except OSError as error:
        if error.errno not in disk.FULL:
            raise
        full = disk.describe(Path(error.filename or out or REPO))
        raise SystemExit(f"quickstart: {error}. {full}{AFTERWARDS}") from None


def _advice(error: Exception, out: Path | None) -> str:
    """Return what to do about a full disk, whether the failed command reported it or only its folder shows it."""
    if isinstance(error, DiskFull):
        return AFTERWARDS
    return f"\n{disk.describe(out)}{AFTERWARDS}" if out and disk.is_full(out) else ""
