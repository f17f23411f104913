"""Measure what each speed-up of the tiny RL run is worth: the launcher with and without it, alternating on one machine.

    python -m scripts.bench.speedups [--run outputs/quickstart] [--rounds 3] [--steps 14]

Starts from the SFT model of a quickstart, and makes it if it is missing. Dynamic sampling is off, because it would make
the number of prompts differ between the runs: every step generates 16 prompts. Prints a table of medians over the
rounds, with the lowest and the highest; the figures of each run are in a new folder below --out. A round takes about
eight minutes.
"""

import json
import shutil
import statistics
import sys
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from scripts.bench.vs_trl import new_folder, run_ours
from scripts.studies.shared import REPO, command_line, make_sft, markdown
from verl_ext.quickstart.pipeline import SANDBOX_OPTIONS
from verl_ext.quickstart.supervise import Supervisor
from verl_ext.sandbox.launch import running_server

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


class Variant(NamedTuple):
    overrides: tuple[str, ...] = ()
    shell: str = ":"  # before a Python of the launcher starts
    without: str = ""  # a copy of verl_ext/cpu/patches.py lacks the lines that hold this text


VARIANTS = {
    "as shipped": Variant(),
    # The launcher starts `python -m verl_ext.cpu.warm_python -m verl.trainer.main_ppo ...`.
    "imports in every process (no cpu/warm_python.py)": Variant(
        shell='if [ "$2" = verl_ext.cpu.warm_python ]; then shift 2; fi'
    ),
    "loops in a separate actor (LeanAgentLoopManager)": Variant(
        (f"{MANAGER}=verl_ext.rollout.workers.LeanAgentLoopManager",)
    ),
    "verl's own agent-loop manager, which records nothing": Variant(
        (f"{MANAGER}=null", "retool.recorder.enable=false")
    ),
    "no records (`retool.recorder.enable=false`)": Variant(("retool.recorder.enable=false",)),
    "verl's log-probs, token by token (no `_vectorise_log_probs`)": Variant(
        without="register_post_import_hook(_vectorise_log_probs"
    ),
    "one thread in the actor (no `set_num_threads`)": Variant(without="torch.set_num_threads("),
}
# Stands in for the launcher's Python.
PYTHON = """#!/bin/sh
export PYTHONPATH={repo}
{shell}
exec {python} "$@"
"""


def copy_without(text: str, folder: Path) -> Path:
    """Copy the code to `folder`, without the one line of verl_ext/cpu/patches.py that holds `text`."""
    for part in ("recipe", "configs", "verl_ext", "data"):
        shutil.copytree(REPO / part, folder / part)
    patches = folder / "verl_ext/cpu/patches.py"
    lines = patches.read_text().splitlines(keepends=True)
    kept = [line for line in lines if text not in line]
    if len(kept) != len(lines) - 1:
        raise SystemExit(f"verl_ext/cpu/patches.py has {len(lines) - len(kept)} lines with {text!r}, not one")
    patches.write_text("".join(kept))
    return folder


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--run", type=Path, default=Path("outputs/quickstart"), help="a quickstart's folder")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_speedups"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--only", default="", metavar="TEXT", help="as shipped, and variants with this in the name")
    args = parser.parse_args()
    make_sft(args.run)
    folder = new_folder(args.out).resolve()
    python = folder / "python"
    chosen = {name: each for name, each in VARIANTS.items() if args.only in name or name == "as shipped"}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for number in range(args.rounds):
        for index, (name, variant) in enumerate(chosen.items()):
            out = folder / f"{number}-{index}"
            repo = copy_without(variant.without, out / "code") if variant.without else REPO
            python.write_text(PYTHON.format(repo=quote(str(repo)), shell=variant.shell, python=quote(sys.executable)))
            python.chmod(0o755)
            overrides = (*variant.overrides, "algorithm.filter_groups.enable=false")
            with running_server(options=SANDBOX_OPTIONS) as sandbox, Supervisor() as supervisor:
                figures = run_ours(supervisor, args.run, sandbox, args.steps, out, overrides, str(python), repo)
            found[name].append(figures)
            print(f"round {number + 1}: {name}: {figures}", flush=True)
            (folder / "summary.json").write_text(json.dumps(found, indent=2))  # if a later run fails
    heads = ("first step after, s", "a later step, s", "its update, s", "CPU of its records, s")
    rows = []
    for name, rounds in found.items():
        cells = []
        for key in ("first_step_s", "step_s", "update_s", "records_cpu_s"):
            values = [figures[key] for figures in rounds]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        rows.append([name, *cells])
    print(f"\n{markdown([f'{args.rounds} rounds of {args.steps} steps', *heads], rows)}")


if __name__ == "__main__":
    main()
