"""Run the tiny task under each of ten faults, and say what became of the run. See docs/evidence/faults.md.

    bash scripts/chaos.sh --quick              # five faults
    bash scripts/chaos.sh --only "disk full"   # one
    bash scripts/chaos.sh --side verl          # verl 0.9.1 as it is: its own agent loop, sampler and checkpoints
    bash scripts/chaos.sh --side trl

A fault strikes when a run has logged its second step. A run that fails is started again with the same command, as its
user would do, when the fault is over. Prints a table. The result of a fault is a line of --results, and is not measured
again; an interrupted measurement starts over. The machine should do nothing else meanwhile.
"""

import argparse
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

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "scripts"))

import chaos_others as others  # noqa: E402
from bench_vs_trl import sizes  # noqa: E402
from chaos_faults import FAULTS, QUICK, Fault, Judge, Missed, Sandbox, Scene, small_disk  # noqa: E402
from chaos_measure import figures  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from published import Published, empty  # noqa: E402
from slow_sandbox import proxied  # noqa: E402

from verl_ext.cpu.warm_python import ENVIRONMENT  # noqa: E402
from verl_ext.datasets.peek import count_rows  # noqa: E402
from verl_ext.quickstart.rungs import RUNGS  # noqa: E402
from verl_ext.quickstart.source import find_source  # noqa: E402
from verl_ext.quickstart.supervise import CommandFailed, Supervisor  # noqa: E402
from verl_ext.runs import durable  # noqa: E402
from verl_ext.runs.lock import lock_folder  # noqa: E402
from verl_ext.runs.machine import environment  # noqa: E402
from verl_ext.settings import compose_run  # noqa: E402

FAULT_STEP = 2  # after this step a fault strikes
IN_STEP_S = 0.5  # and this much later, when requests are under way
MOST_STARTS = 3
TRL = REPO / "outputs" / "bench_vs_trl" / "venv" / "bin" / "python"  # scripts/bench_vs_trl.sh makes it
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
        env |= {"PYTHON": sys.executable, "SANDBOX_URL": proxy if fault.by_proxy else sandbox.url}

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


def overrides_of(fault: Fault, scene: Scene) -> list[str]:
    seeds = [f"data.seed={scene.seed}", f"actor_rollout_ref.rollout.seed={scene.seed}"]
    own = [each.format(judge=scene.judge.url) for each in fault.overrides]
    return [*OVERRIDES, *own, *seeds, f"trainer.total_training_steps={fault.steps}"]


class Side(NamedTuple):
    """The framework that a run belongs to.

    Attributes:
        start: its command and environment, without Python and sandbox.
        figures: of a finished run, from the sandbox's address and the log's size in bytes when the fault came.
    """

    start: Callable[[Fault, Scene, Path], tuple[list[str], dict[str, str]]]
    figures: Callable[[Scene, Path, str, int], dict[str, Any]]


def our_command(fault: Fault, scene: Scene, source: Path) -> tuple[list[str], dict[str, str]]:
    command = ["bash", str(REPO / "recipe" / "retool" / "run_tiny_dapo.sh"), *overrides_of(fault, scene)]
    env = {"DOCTOR": "0", "DATA_DIR": str(source / "data"), "OUTPUT_DIR": str(scene.run)}
    return command, env | {"MODEL_PATH": str(source / "sft" / "merged")}


def our_figures(scene: Scene, source: Path, sandbox: str, fault_at: int) -> dict[str, Any]:
    problems = count_rows([source / "data" / "rl_train.parquet"])
    return figures(scene.run, sandbox, scene.log, fault_at, problems)


def stock_command(fault: Fault, scene: Scene, source: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a stock run, and write its config next to the run."""
    folder = scene.run.parent
    scene.notes.mkdir()
    config = others.stock_config(overrides_of(fault, scene), source, scene.run, scene.notes)
    OmegaConf.save(config, folder / "stock.yaml")
    env = ENVIRONMENT | ({"JUDGE_URL": scene.judge.url} if fault.judged else {})
    return ["bash", str(others.FOLDER / "run_verl.sh"), str(folder), str(scene.notes)], env


def stock_figures(scene: Scene, source: Path, sandbox: str, fault_at: int) -> dict[str, Any]:
    own = others.verl_sizes(OmegaConf.load(scene.run.parent / "stock.yaml"))
    return others.figures(scene.notes, sandbox, scene.log, fault_at, own)


def trl_command(fault: Fault, scene: Scene, source: Path) -> tuple[list[str], dict[str, str]]:
    if fault.overrides and not fault.judged:
        raise Missed("TRL generates in the learner's process: there is no engine")
    script = str(REPO / "scripts" / "bench_trl_side.py")
    command = [str(TRL), script, "--run", str(scene.run), "--notes", str(scene.notes)]
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
    lines = [[*head, "kept out of training", "stall", "what the user is told"]]
    lines.append(["---"] * len(lines[0]))
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
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"five faults: {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--side", choices=SIDES, default="ours", help="whose run to test (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="source", type=Path, default=Path("outputs/quickstart"), help="a quickstart")
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "chaos", help="of the runs")
    parser.add_argument("--results", type=Path, help="default: results.jsonl in --out")
    args = parser.parse_args(argv)
    if args.side == "trl" and not TRL.is_file():
        parser.error(f"{TRL} does not exist. Install TRL with `bash scripts/bench_vs_trl.sh --steps 1 --rounds 1`.")
    names = args.only or (QUICK if args.quick else tuple(FAULTS))
    source, out, missed = args.source.resolve(), args.out.resolve(), {}
    platform = environment()["platform"]
    os.environ.setdefault("VERL_LOGGING_LEVEL", "INFO")
    try:
        made = {"from": dict(find_source(source).digests), "task": RUNGS["tiny"].task_digest()}
        made |= {"seed": args.seed, "cpu": platform["cpu"], "cores": platform["cores"]}
        results = Published(args.results or out / "results.jsonl")
        for name in names:
            fault = FAULTS[name]
            settings = made | {"overrides": [*OVERRIDES, *fault.overrides], "steps": fault.steps}
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
    main()
