"""Run the tiny task under each of ten faults, and say what became of the run. See docs/evidence/faults.md.

    python -m scripts.bench.chaos --quick             # five faults, at most 35 minutes on two cores
    python -m scripts.bench.chaos --only "disk full"  # one; a full disk is a small tmpfs, which needs root
    python -m scripts.bench.chaos --side verl         # verl 0.9.1 as it is: its own agent loop, sampler and checkpoints
    python -m scripts.bench.chaos --side trl          # TRL's GRPOTrainer

All sides use our sandbox, and the same SFT model (a quickstart's, made if it is missing), sizes, seed and faults. A
fault strikes when a run has logged its second step. A run that fails is started again with the same command, as its
user would do, when the fault is over. Prints a table. The result of a fault is a line of --results, and is not measured
again; an interrupted measurement starts over. The machine should do nothing else meanwhile.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from scripts.bench import chaos_others as others
from scripts.bench.chaos_faults import FAULTS, QUICK, Fault, Judge, Missed, Sandbox, Scene, small_disk
from scripts.bench.chaos_measure import figures
from scripts.bench.vs_trl import TRL_PYTHON, TRL_SIDE, install_trl, sizes
from scripts.studies.shared import (
    Published,
    add_places,
    command_line,
    empty,
    made_with,
    make_sft,
    markdown,
    rl_command,
    rl_environment,
)
from scripts.studies.slow_sandbox import proxied
from verl_ext.cpu.warm_python import ENVIRONMENT
from verl_ext.datasets.peek import count_rows
from verl_ext.quickstart.source import find_source
from verl_ext.quickstart.supervise import CommandFailed, Supervisor
from verl_ext.runs import durable
from verl_ext.runs.lock import lock_folder
from verl_ext.settings import compose_run

FAULT_STEP = 2  # after this step a fault strikes
IN_STEP_S = 0.5  # and this much later, when requests are under way
MOST_STARTS = 3
LIMIT_S = 400.0  # for a run, with all its starts: five runs fit in 35 minutes
OVERRIDES = ("trainer.save_freq=2", "retool.recorder.token_share=0")


class Injection(threading.Thread):
    """A thread that waits for the moment of a fault, and injects it.

    Attributes:
        log_bytes: size of the log when the fault came; None before.
        missed: why the fault hit nothing; "" if it hit.
    """

    def __init__(self, fault: Fault, scene: Scene):
        super().__init__(daemon=True)
        self._fault, self._scene, self._cancelled = fault, scene, threading.Event()
        self.log_bytes: int | None = None
        self.missed, self.seconds = "", 0.0

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        while not has_step(self._scene, FAULT_STEP):
            if self._cancelled.wait(0.05):
                return
        time.sleep(IN_STEP_S)
        self.log_bytes, began = self._scene.log.stat().st_size, time.monotonic()
        try:
            self._fault.inject(self._scene)
        except Exception as error:  # any error means that the fault did not hit the run as described
            self.missed = str(error) if isinstance(error, Missed) else repr(error)
        self.seconds = time.monotonic() - began


def has_step(scene: Scene, step: int) -> bool:
    """Return whether a run has logged a step: ours in its folder, another side's in the folder of its notes."""
    files = (path for folder in (scene.run, scene.notes) for path in folder.glob("metrics*.jsonl"))
    texts = (path.read_text(errors="replace") for path in files)
    return any(re.search(rf'"step": ?{step}\b', text) for text in texts)


def run_to_its_end(
    start: Callable[[Callable[[], None]], None], scene: Scene, injection: Injection, limit_s: float = LIMIT_S
) -> dict:
    """Start a run, and start it again if it fails.

    Args:
        start: runs it to its end, and meanwhile calls the function that it is given.
    Raises:
        CommandFailed: it failed before the fault came.
    """
    began, starts = time.monotonic(), 0

    def watch() -> None:
        if time.monotonic() - began > limit_s:
            raise TimeoutError

    while True:
        starts += 1
        scene.ended.clear()
        try:
            start(watch)
            ends = "yes" if starts == 1 else f"yes, started {starts - 1} time{'s' * (starts > 2)} more"
        except TimeoutError:
            ends = f"no: not within {limit_s:g} s"
        except CommandFailed:
            if injection.log_bytes is None:
                raise
            ends = f"no: failed {starts} times" if starts == MOST_STARTS else ""
        finally:
            scene.ended.set()
        if ends:
            return {"ends": ends, "seconds": round(time.monotonic() - began)}
        injection.join()
        time.sleep(1.1)  # files of metrics are named by the second


def measure(
    side: "Side", fault: Fault, folder: Path, source: Path, seed: int, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Run the tiny task under a fault.

    Args:
        folder: for the run and its log; emptied first.
        limit_s: for the run, with all its starts.

    Raises:
        CommandFailed: the run failed before the fault came.
        Missed: the fault did not come, or hit nothing.
        SystemExit: another process writes there, perhaps a run whose script was killed.
    """
    run, log = folder / "run", folder / "log.txt"
    durable.make_folder(folder)
    with lock_folder(folder) as lock, ExitStack() as stack:
        if run.is_mount():  # of a script that was killed
            subprocess.run(["umount", str(run)], check=True)
        empty(folder)
        run.mkdir()
        if fault.small_disk:
            stack.enter_context(small_disk(run))
        sandbox, judge = Sandbox(), Judge()
        stack.callback(sandbox.stop)
        stack.callback(judge.stop)
        scene = Scene(run, log, sandbox, judge, seed)
        proxy = stack.enter_context(proxied(sandbox.url, lambda program: scene.before(program)))
        injection = Injection(fault, scene)
        stack.callback(injection.cancel)
        supervisor = stack.enter_context(Supervisor(lock))
        command, env = side.start(fault, scene, source)
        env["SANDBOX_URL"] = proxy if fault.by_proxy else sandbox.url

        def start(watch: Callable[[], None]) -> None:
            supervisor.run(command, log=log, env=env, watch=watch)

        injection.start()
        result = run_to_its_end(start, scene, injection, limit_s)
        if injection.log_bytes is None:
            raise Missed(f"the run ended before step {FAULT_STEP}; see {log}")
        injection.join()
        if injection.missed:
            raise Missed(injection.missed)
        result |= {"fault_s": round(injection.seconds, 1), "fault_at_bytes": injection.log_bytes}
        return result | side.figures(scene, source, sandbox.url, injection.log_bytes)


def tiny_run(fault: Fault, scene: Scene) -> list[str]:
    """Return the command of our run: `bash`, the launcher, its overrides."""
    own = [each.format(judge=scene.judge.url) for each in fault.overrides]
    return rl_command([*OVERRIDES, *own], steps=fault.steps, seed=scene.seed)


class Side(NamedTuple):
    """The framework that a run belongs to.

    Attributes:
        start: its command, and its environment without the sandbox.
        figures: of a finished run, from the sandbox's address and the log's size in bytes when the fault came.
    """

    start: Callable[[Fault, Scene, Path], tuple[list[str], dict[str, str]]]
    figures: Callable[[Scene, Path, str, int], dict[str, Any]]


def our_command(fault: Fault, scene: Scene, source: Path) -> tuple[list[str], dict[str, str]]:
    return tiny_run(fault, scene), rl_environment(source, scene.run, sandbox="")


def our_figures(scene: Scene, source: Path, sandbox: str, fault_at: int) -> dict[str, Any]:
    problems = count_rows([source / "data" / "rl_train.parquet"])
    return figures(scene.run, sandbox, scene.log, fault_at, problems)


def stock_command(fault: Fault, scene: Scene, source: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a stock run, and write its config next to the run."""
    folder = scene.run.parent
    scene.notes.mkdir()
    config = others.stock_config(tiny_run(fault, scene)[2:], source, scene.run, scene.notes)
    OmegaConf.save(config, folder / "stock.yaml")
    env = ENVIRONMENT | {"PYTHON": sys.executable} | ({"JUDGE_URL": scene.judge.url} if fault.judged else {})
    return ["bash", str(others.FOLDER / "run_verl.sh"), str(folder), str(scene.notes)], env


def stock_figures(scene: Scene, source: Path, sandbox: str, fault_at: int) -> dict[str, Any]:
    own = others.verl_sizes(OmegaConf.load(scene.run.parent / "stock.yaml"))
    return others.figures(scene.notes, sandbox, scene.log, fault_at, own)


def trl_command(fault: Fault, scene: Scene, source: Path) -> tuple[list[str], dict[str, str]]:
    if fault.overrides and not fault.judged:
        raise Missed("TRL generates in the learner's process: there is no engine")
    command = [str(TRL_PYTHON), "-m", TRL_SIDE, "--run", str(scene.run), "--notes", str(scene.notes)]
    command += ["--steps", str(fault.steps), "--seed", str(scene.seed)]
    command += ["--model", str(source / "sft" / "merged"), "--data", str(source / "data" / "rl_train.parquet")]
    command += ["--sizes", json.dumps(sizes(compose_run("tiny_dapo"))), "--out", str(scene.notes / "figures.json")]
    return command, {"HF_HUB_OFFLINE": "1"} | ({"JUDGE_URL": scene.judge.url} if fault.judged else {})


def trl_figures(scene: Scene, source: Path, sandbox: str, fault_at: int) -> dict[str, Any]:
    own = others.trl_sizes(source / "sft" / "merged", scene.notes, sizes(compose_run("tiny_dapo")))
    return others.figures(scene.notes, sandbox, scene.log, fault_at, own)


SIDES = {
    "ours": Side(our_command, our_figures),
    "verl": Side(stock_command, stock_figures),  # 0.9.1 as it is
    "trl": Side(trl_command, trl_figures),
}


def table(names: Sequence[str], rows: Mapping[str, Mapping[str, Any]], missed: Mapping[str, str]) -> str:
    """Format the results in Markdown.

    Args:
        rows: fault -> result.
        missed: fault -> why there is none.
    """
    head = ["fault", "the run ends", "trained rollouts, of these wrong", "prompts lost, doubled"]
    head += ["kept out of training", "stall", "what the user is told"]
    lines = []
    for name in names:
        if row := rows.get(name):
            ends = row["excluded"]  # None: not known
            kept_out = "not known" if ends is None else ", ".join(f"{n} {end}" for end, n in ends.items()) or "none"
            lasted = f" of {row['fault_s']:g} s" if row["fault_s"] >= 1 else ""
            counts = f"{row['trained']}, {row['wrong']}", f"{row['lost']}, {row['doubled']}"
            said = "<br>".join(f"`{line.replace('`', '').replace('|', '/')}`" for line in row["told"]) or "nothing"
            stall = f"{row['stall_s']:g} s (a step: {row['step_s']:g} s)"
            lines.append([f"{name}{lasted}", row["ends"], *counts, kept_out, stall, said])
        else:
            lines.append([name, f"not run: {missed[name]}" if name in missed else "not run", *["-"] * 5])
    return markdown(head, lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--quick", action="store_true", help=f"five faults: {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--side", choices=SIDES, default="ours", help="whose run to test (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_places(parser, "chaos")
    args = parser.parse_args(argv)
    make_sft(args.source)
    if args.side == "trl":
        install_trl()
    names = args.only or (QUICK if args.quick else tuple(FAULTS))
    source, out, missed = args.source.resolve(), args.out.resolve(), {}
    os.environ.setdefault("VERL_LOGGING_LEVEL", "INFO")
    try:
        digests = find_source(source).digests
        results = Published(args.results or out / "results.jsonl")
        for name in names:
            fault = FAULTS[name]
            settings = made_with(digests, steps=fault.steps, overrides=[*OVERRIDES, *fault.overrides])
            settings["seed"] = args.seed
            if results.has(f"{args.side}: {name}", settings):
                continue
            print(f"== {args.side}: {name}", flush=True)
            try:
                folder = out / f"{args.side}_{name.replace(' ', '_')}"
                result = measure(SIDES[args.side], fault, folder, source, args.seed)
                results.add(f"{args.side}: {name}", result, settings)
            except Missed as error:
                missed[name] = str(error)
    except (CommandFailed, ValueError) as error:
        sys.exit(f"chaos.py: {error}")
    rows = {name: row for name in names if (row := results.rows.get(f"{args.side}: {name}"))}
    print(f"\n{table(names, rows, missed)}")
    if missed:
        sys.exit("chaos.py: not measured, and the next call tries them again: " + ", ".join(missed))


if __name__ == "__main__":
    os.environ.setdefault("RETOOL_HARDWARE", "cpu")  # the tiny model runs on a CPU
    main()
