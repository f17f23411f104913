"""Map how much staleness and engine noise each objective bears: many small runs on the tiny task, and heat maps.

    python -m scripts.studies.stability_map         # all of the 270 runs that are missing, then the maps
    python -m scripts.studies.stability_map --cell icepop 4 bf16 0
    python -m scripts.studies.stability_map --maps  # only the maps; absent runs are shown as missing

A run is a plain fp32 PyTorch loop (scripts/studies/cell.py) that starts from the quickstart's SFT model and calls the
objectives' own files. Each run is a line of docs/evidence/objectives/stability.jsonl, written when it ended. The same
command continues a stopped one, and `--out` makes a separate map. docs/evidence/objectives.md says what the maps show.
"""

import ast
import functools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from data.tiny_tools.task import interpreter_output
from scripts.studies.cell import Cell, Problem, Task, run_cell
from scripts.studies.preset import RUN
from scripts.studies.shared import REPO, command_line
from scripts.studies.stability import in_short, read_runs, table, write_maps
from scripts.studies.tiny_model import load_model
from verl_ext.quickstart.rungs import SHARED, digest
from verl_ext.quickstart.source import find_source
from verl_ext.runs import durable, jsonl, parquet
from verl_ext.runs.processes import end_with_parent
from verl_ext.settings import compose_run

OBJECTIVES = (
    *("dapo", "grpo", "dr_grpo", "olmorl", "maxrl"),
    *("icepop", "icepop_onpolicy", "glm5_async", "mis_token", "mis_seq"),
    *("gspo", "gmpo", "sapo", "cispo", "dppo_tv"),
)
CONDITIONS = ((0, False), (1, False), (4, False), (16, False), (0, True), (4, True))  # staleness, bf16
SEEDS = (0, 1, 2)
HELD_OUT = 256  # problems
RUNS = "stability.jsonl"
SFT = "sft/merged/model.safetensors"  # of a quickstart; other CPUs compute other floats

_ALLOWED = (ast.Module, ast.Expr, ast.Call, ast.Name, ast.Load, ast.Store, ast.Assign, ast.Constant, ast.BinOp, ast.Add)
_ALLOWED += (ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div, ast.UnaryOp, ast.USub)


def cells() -> list[Cell]:
    """Return all cells of the map, seed by seed, so that the first results cover all objectives."""
    return [
        Cell(name, staleness, bf16, seed) for seed in SEEDS for staleness, bf16 in CONDITIONS for name in OBJECTIVES
    ]


def interpret(code: str) -> str:
    """Return the interpreter's output for a model's code. Only short arithmetic on small integers runs, in-process.

    Any other code gets an error, whose text is not the real one.
    """
    if len(code) >= 80:
        return "MemoryError"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return _interpret(code)


def _interpret(code: str) -> str:
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return interpreter_output(code)  # compiling it also fails
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant)]
    is_arithmetic = all(isinstance(node, _ALLOWED) for node in nodes) and all(
        type(number) is int and number < 10**7 for number in numbers
    )
    if is_arithmetic and {node.id for node in nodes if isinstance(node, ast.Name)} <= {"print", "prin", "x"}:
        return interpreter_output(code)
    return "NameError: name is not defined"


@functools.cache
def read_task(folder: Path) -> Task:
    """Read the quickstart's problems, tokenised as its SFT model reads them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "sft" / "merged")

    def problems(name: str) -> Iterator[Problem]:
        rows = parquet.read(folder / "data" / f"{name}.parquet", ["prompt", "reward_model", "data_source"])
        for row in rows.to_pylist():
            if row["data_source"] == "tiny_tools":
                text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
                truth = row["reward_model"]["ground_truth"]
                yield Problem(tokenizer.encode(text, add_special_tokens=False), truth)

    return Task(compose_run(RUN), tokenizer, list(problems("rl_train")), list(problems("eval"))[:HELD_OUT], interpret)


CODE = (
    *("verl_ext/objectives/*.py", "verl_ext/trainer/objective.py", "verl_ext/trainer/advantages.py"),
    *(f"scripts/studies/{name}.py" for name in ("cell", "preset", "tiny_model")),
    *("verl_ext/protocols/*.py", "data/tiny_tools/task.py"),
)


_digest = functools.cache(digest)  # without a cache, the digests of all cells would take minutes


def settings_of(cell: Cell, digests: Mapping[str, str], steps: int) -> dict[str, Any]:
    """Return what a run of the map was made with: data and SFT, the values of its preset, its number of steps."""
    preset = _digest(f"configs/objective/{cell.objective}.yaml", f"configs/{RUN}.yaml", SHARED)
    return {"from": dict(digests), "preset": preset, "steps": steps, "code": _digest(*CODE)}


def run(cell: Cell, quickstart: Path, steps: int) -> dict:
    """Run a cell on one thread: several in parallel share the cores better than one on all."""
    torch.set_num_threads(1)
    began = time.process_time()
    config, weights = load_model(quickstart / "sft" / "merged")
    result = in_short(run_cell(cell, config, weights, read_task(quickstart), steps=steps))
    return result | {"cpu_s_per_step": round((time.process_time() - began) / steps, 2)}


@contextmanager
def _processes(number: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool that ends its cells if its user stops by an error or Ctrl-C; by itself, a pool runs all of them."""
    with ProcessPoolExecutor(number, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            processes = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise


def run_missing(
    missing: Mapping[Cell, Mapping[str, Any]], file: Path, quickstart: Path, steps: int, processes: int
) -> dict[Cell, str]:
    """Add a line for each cell as it ends; the others continue if one raises, or its process is killed.

    Args:
        missing: cell -> its settings.
    Returns:
        The traceback of each cell that raised, or whose process was killed.
    """
    durable.make_folder(file.parent)
    jsonl.cut_half_line(file)
    left, failed, is_alone = list(missing), {}, False
    while left:
        before, most = len(left), 1 if is_alone else processes
        with _processes(most) as pool:
            cells = {pool.submit(run, cell, quickstart, steps): cell for cell in left[: 1 if is_alone else None]}
            for future in as_completed(cells):
                cell, error = cells[future], future.exception()
                if isinstance(error, BrokenProcessPool) and not is_alone:
                    continue  # one of those that were under way had its process killed
                left.remove(cell)
                place = f"{len(missing) - len(left)}/{len(missing)} {cell.name}"
                if error:
                    failed[cell] = "".join(traceback.format_exception(error))
                    print(f"{place}: failed, {error!r}", flush=True)
                    continue
                result = future.result() | {"settings": missing[cell]}
                durable.append_line(file, jsonl.dumps(result))
                print(
                    f"{place}: accuracy {result['before']:.3f} -> {result['after']:.3f}, "
                    f"{result['cpu_s_per_step']:.2f} CPU-s per step",
                    flush=True,
                )
        if left and not is_alone:
            under_way = ", ".join(cell.name for cell in left[:most])  # the pool takes them in order
            print(f"A process was killed, perhaps for lack of memory; trying again: {under_way}", flush=True)
        is_alone = len(left) == before  # the culprit shows when the next cell runs alone
    return failed


def _but_sft(made: Mapping[str, Any]) -> dict[str, Any]:
    return dict(made) | {"from": {name: digest for name, digest in made["from"].items() if name != SFT}}


def check_settings(file: Path, settings: Mapping[Cell, Mapping[str, Any]], wanted: Collection[Cell]) -> None:
    """Check the settings of existing runs before hours of new ones. All runs of a seed must begin from the same SFT;
    those of another seed may begin from another machine's.

    Args:
        settings: of each cell of the map, as it would be made now.
        wanted: cells that are to be there.
    Raises:
        ValueError: a run of the file was made with other settings, has another number of steps, or began from another
            SFT than the others of its seed.
    """
    done, steps = read_runs(file), {made["steps"] for made in settings.values()}
    sft_of = {cell.seed: settings[cell]["from"].get(SFT) for cell in wanted if cell not in done}
    for cell, result in done.items():
        there = result.get("settings", {"from": {}})
        sft = there["from"].get(SFT)
        if sft != sft_of.setdefault(cell.seed, sft):
            raise ValueError(
                f"{file}: {cell.name} started from the SFT {sft}, but the other runs of seed {cell.seed}, finished "
                f"or not, from {sft_of[cell.seed]}. Name the quickstart of the former with --quickstart or another "
                f"folder with --out, or delete all lines of seed {cell.seed} to repeat its runs."
            )
        now = settings.get(cell)
        if now is None or _but_sft(there) != _but_sft(now) or {result["steps"]} != steps:
            raise ValueError(
                f"{file}: {cell.name} was made with other settings.\n  there: {there}\n  now:   "
                f"{now}\nName another folder with --out, or delete the line to repeat the run."
            )


def chosen(words: Sequence[str]) -> Cell:
    """Return the cell of `--cell OBJECTIVE STALENESS fp32|bf16 SEED`.

    Raises:
        ValueError: no such cell in the map.
    """
    name, staleness, precision, seed = words
    found = [cell for cell in cells() if cell.name == f"{name}_s{staleness}_{precision}_{seed}"]
    if not found:
        conditions = ", ".join(f"{each} {'bf16' if bf16 else 'fp32'}" for each, bf16 in CONDITIONS)
        seeds = ", ".join(map(str, SEEDS))
        raise ValueError(
            f"--cell {' '.join(words)} is not in the map; expected one of {', '.join(OBJECTIVES)}; "
            f"one of {conditions}; a seed of {seeds}."
        )
    return found[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    names = ("OBJECTIVE", "STALENESS", "PRECISION", "SEED")
    parser.add_argument("--cell", nargs=4, metavar=names, help="make only this run")
    parser.add_argument("--maps", action="store_true", help="only draw the maps, without runs or checks")
    parser.add_argument("--steps", type=int, default=80, help="steps of a run (default: 80)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time (default: one per core)")
    parser.add_argument("--quickstart", type=Path, default=Path("outputs/quickstart"), help="with data/, sft/merged/")
    parser.add_argument(
        "--out", type=Path, default=REPO / "docs" / "evidence" / "objectives", help="folder of the runs and the maps"
    )
    args = parser.parse_args(argv)
    file, failed = args.out / RUNS, {}
    try:
        wanted = [chosen(args.cell)] if args.cell else [] if args.maps else cells()
        if wanted:
            digests = find_source(args.quickstart).digests
            settings = {cell: settings_of(cell, digests, args.steps) for cell in cells()}
            check_settings(file, settings, wanted)
            done = read_runs(file)
            missing = {cell: settings[cell] for cell in wanted if cell not in done}
            failed = run_missing(missing, file, args.quickstart, args.steps, args.processes)
        found = read_runs(file)
        print(table(OBJECTIVES, CONDITIONS, found, len(cells())))
        for path in write_maps(OBJECTIVES, CONDITIONS, found, args.out):
            print(path)
    except (OSError, ValueError) as error:
        sys.exit(f"stability_map.py: {error}")
    if failed:
        told = "\n".join(f"{cell.name}: {why}" for cell, why in failed.items())
        sys.exit(f"stability_map.py: these runs failed; the next call tries them again:\n{told}")


if __name__ == "__main__":
    main()
