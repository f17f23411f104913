"""Check that every objective trains, in every mode: runs of the real stack on the tiny task, from a quickstart's SFT.

    python -m scripts.studies.compare_objectives               # every preset, 30 steps, evaluated
    python -m scripts.studies.compare_objectives --every-mode  # every preset in every mode, three steps

Prints a table, and with the first command draws the curves. Each run is a quickstart in its own folder,
with the data and the SFT of the one that --from names. A run that fails is retried once from its last checkpoint; then
the end of its log is shown, and the next call tries it again. The result of a finished run is a line of a file in
--results, and that run is not repeated: another machine can continue with that folder.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.studies.drawing import write_picture
from scripts.studies.seeds import COLUMNS, accuracy, estimate, figures_of
from scripts.studies.shared import (
    REPO,
    Published,
    begin,
    command_line,
    has_begun,
    interval,
    markdown,
    obey_signals,
    quickstart,
)
from verl_ext.evaluation.estimators import half_width
from verl_ext.pages.charts import Chart, Series
from verl_ext.quickstart.options import JOURNAL
from verl_ext.quickstart.rungs import RUNGS, digest
from verl_ext.quickstart.source import NoSource, find_source
from verl_ext.runs import durable
from verl_ext.runs.lock import lock_folder

OBJECTIVES = sorted(path.stem for path in (REPO / "configs" / "objective").glob("*.yaml"))
COMPARED = ("dapo", "olmorl", "icepop", "glm5_async", "cispo", "dr_grpo")  # with three seeds
SEEDS = {name: (0, 1, 2) if name in COMPARED else (0,) for name in (*COMPARED, *OBJECTIVES)}
MODES = {  # mode -> overrides of configs/tiny_dapo.yaml
    "sync": (),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "separate_async": ("hardware=cpu_separate",),
}
SHORT = ("trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
ENOUGH = 0.30  # accuracy above SFT's that an objective is expected to reach
IN_A_ROW = 7  # objectives per chart: the drawing has eight colours
LOG_LINES = 12
SOURCE = COLUMNS["tiny"][0][2]  # the data source that the model was trained for

Start = Callable[..., None]  # like `quickstart`


class Cell(NamedTuple):
    """One run."""

    objective: str
    mode: str
    seed: int

    def __str__(self) -> str:
        return f"{self.objective}_{self.mode}_{self.seed}"


_OF_TRAINER = ("run_updates", "objective", "advantages", "sampler", "group_rules", "queue")
CODE = ("verl_ext/objectives/*.py", *(f"verl_ext/trainer/{name}.py" for name in _OF_TRAINER))  # behind a result


def overrides_of(cell: Cell, *, short: bool) -> list[str]:
    return [f"objective={cell.objective}", *MODES[cell.mode], *(SHORT if short else ())]


def settings_of(cell: Cell, digests: Mapping[str, str], *, short: bool) -> dict[str, Any]:
    """Return what a result was made with: the SFT that --from names, the overrides, the values of preset and task."""
    preset = digest(f"configs/objective/{cell.objective}.yaml", "configs/neutral/objective.yaml")
    own = {"preset": preset, "task": RUNGS["tiny"].task_digest()}
    own["code"] = digest(*CODE)
    return {"from": dict(digests), "rl": overrides_of(cell, short=short), **own}


def arguments(cell: Cell, source: Path, *, short: bool) -> list[str]:
    """Return the options of the quickstart. A short run ends after RL."""
    rl = [word for override in overrides_of(cell, short=short) for word in ("--rl", override)]
    return ["--from", str(source), "--seed", str(cell.seed), *(("--stage", "rl") if short else ()), *rl]


def is_done(out: Path, *, settings: Mapping[str, Any], short: bool) -> bool:
    """Return whether a run is whole.

    Args:
        settings: of `settings_of`.
    Raises:
        ValueError: it began with other settings, or not by `run_missing`.
    """
    if not has_begun(out, settings, JOURNAL) or not (out / JOURNAL).is_file():
        return False
    entries = {entry["stage"]: entry for entry in json.loads((out / JOURNAL).read_text())}
    last = entries.get("rl" if short else "eval_after", {})
    return last.get("status") == "done" and (short or (out / "summary.json").is_file())


def run_missing(
    cells: Sequence[Cell],
    out: Path,
    source: Path,
    digests: Mapping[str, str],
    results: Published,
    *,
    short: bool,
    start: Start = quickstart,
) -> dict[Cell, str]:
    """Run what is not published, each at most twice, and publish it.

    Returns:
        The end of the log of each run that failed both times.
    Raises:
        ValueError: a run that is published, or whose folder exists, has other settings; raised before the first run.
        SystemExit: another process writes into the folder of a run, perhaps one whose script was killed.
    """
    failed: dict[Cell, str] = {}
    settings = {cell: settings_of(cell, digests, short=short) for cell in cells}
    missing = [cell for cell in cells if not results.has(str(cell), settings[cell])]
    for cell in missing:
        is_done(out / str(cell), settings=settings[cell], short=short)
    for cell in missing:
        folder = out / str(cell)
        own = {"settings": settings[cell], "short": short}
        for is_last in (False, True):
            if is_done(folder, **own):
                break
            durable.make_folder(folder)
            lock_folder(folder).close()
            begin(folder, settings[cell])
            try:
                start(folder, *arguments(cell, source, short=short))
            except subprocess.CalledProcessError as error:
                print(f"{cell}: {error}", flush=True)
                if is_last:
                    failed[cell] = end_of_log(folder)
        if is_done(folder, **own):
            results.add(str(cell), result_of(folder, short=short), settings[cell])
    return failed


def result_of(folder: Path, *, short: bool) -> dict[str, Any]:
    """Return what is published of a finished run: seconds of its RL, and accuracy before, during and after training."""
    result: dict[str, Any] = {"seconds": round(rl_seconds(folder), 1)}
    return result if short else result | figures_of(folder)


def end_of_log(folder: Path) -> str:
    """Return the last lines of the log that was written last."""
    logs = [*folder.glob("*.log"), *folder.glob("*/log.txt"), *folder.glob("*/*.log")]
    if not logs:
        return f"no log in {folder}"
    log = max(logs, key=lambda path: path.stat().st_mtime)
    return "\n".join([f"{log}:", *log.read_text(errors="replace").splitlines()[-LOG_LINES:]])


def rl_seconds(folder: Path) -> float:
    """Return the seconds that RL took, its start and its checkpoints included."""
    return next(e["wall_s"] for e in json.loads((folder / JOURNAL).read_text()) if e["stage"] == "rl")


def mode_table(objectives: Sequence[str], modes: Sequence[str], seconds: Mapping, failed: Mapping) -> str:
    """Format the seconds in Markdown: a row per objective, a column per mode.

    Args:
        seconds: (objective, mode) -> duration of its RL, for runs that are done.
        failed: has the (objective, mode) of the runs that failed.
    """

    def text(cell: tuple[str, str]) -> str:
        return f"ok, {seconds[cell]:.0f} s" if cell in seconds else "failed" if cell in failed else "not run"

    lines = [[name, *(text((name, mode)) for mode in modes)] for name in objectives]
    times = [[took for (_, each), took in seconds.items() if each == mode] for mode in modes]
    lines.append(["mean of the runs that are ok", *(f"{fmean(took):.0f} s" if took else "-" for took in times)])
    return markdown(["objective", *modes], lines)


def gains_of(results: Sequence[Mapping]) -> list[float]:
    """Return accuracy after RL minus that of SFT, for each seed."""
    return [estimate(each, "after", SOURCE)["value"] - estimate(each, "before", SOURCE)["value"] for each in results]


def gain_table(wanted: Mapping[str, Sequence[int]], found: Mapping[tuple[str, int], Mapping]) -> str:
    """Format in Markdown the accuracy of each seed after RL, the gain over SFT, and whether it is enough.

    Args:
        wanted: objective -> its seeds.
        found: (objective, seed) -> result of its run, for runs that are done.
    """
    seeds = sorted(set().union(*wanted.values()))
    head = ["objective", *(f"seed {seed}: SFT -> after RL" for seed in seeds), "gain over SFT", "least gain"]
    lines = []

    def text(name: str, seed: int) -> str:
        if run := found.get((name, seed)):
            return f"{accuracy(run, 'before', SOURCE)} -> {accuracy(run, 'after', SOURCE)}"
        return "not run" if seed in wanted[name] else "-"

    for name, own in wanted.items():
        runs = [found[name, seed] for seed in own if (name, seed) in found]
        cells = [text(name, seed) for seed in seeds]
        gains = gains_of(runs)
        mean = interval(gains, "+.3f") if gains else "-"
        enough = "open" if len(runs) < len(own) else "yes" if fmean(gains) >= ENOUGH else "no"
        lines.append([name, *cells, mean, f"{min(gains):+.3f}" if gains else "-", enough])
    return markdown([*head, f"at least +{ENOUGH:.2f}"], lines)


def draw(objectives: Sequence[str], found: Mapping[tuple[str, int], Mapping], out: Path) -> None:
    """Draw two charts for every IN_A_ROW objectives: accuracy in training, as a mean over seeds; and gains over SFT,
    with 95% intervals for two seeds or more."""
    there = [name for name in objectives if any(name == each for each, _ in found)]
    rows = [there[start : start + IN_A_ROW] for start in range(0, len(there), IN_A_ROW)]
    write_picture([chart for row in rows for chart in charts(row, found)], out, columns=2)


def charts(objectives: Sequence[str], found: Mapping[tuple[str, int], Mapping]) -> tuple[Chart, Chart]:
    """Make the charts of the curves and of the gains, for objectives that have a result."""
    curves, gains = [], []
    for number, name in enumerate(objectives, 1):
        runs = [result for key, result in found.items() if key[0] == name]
        own_curves = [dict(zip(*run["curves"]["train/acc"], strict=True)) for run in runs]
        steps = sorted(set.intersection(*map(set, own_curves)))
        curves.append(Series(name, steps, [fmean(curve[step] for curve in own_curves) for step in steps]))
        own = gains_of(runs)
        mean, width = fmean(own), half_width(own)
        spread = () if width is None else [(mean - width, mean + width)]
        gains.append(Series(name, [number], [mean], points=True, spread=spread))
    return (
        Chart("Accuracy in training", curves, "share of rollouts", "RL step"),
        Chart("Gain over SFT", gains, "accuracy", "objective", include=[0, ENOUGH]),
    )


def cells_of(wanted: Mapping[str, Sequence[int]], modes: Sequence[str]) -> Iterator[Cell]:
    """Yield the runs seed by seed, so that the first results cover all objectives."""
    seeds = sorted(set().union(*wanted.values()))
    for seed, mode, name in itertools.product(seeds, modes, wanted):
        if seed in wanted[name]:
            yield Cell(name, mode, seed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--every-mode", action="store_true", help="run every preset in every mode, three steps, seed 0")
    parser.add_argument("--only", nargs="+", choices=OBJECTIVES, metavar="NAME", help="these objectives")
    parser.add_argument("--mode", choices=MODES, help="run only this mode (default: sync; with --every-mode: all)")
    seeds = f"seeds of each objective (default: 0 1 2 for {' '.join(COMPARED)}, 0 for the others)"
    parser.add_argument("--seeds", type=int, nargs="+", help=seeds)
    parser.add_argument("--from", dest="source", type=Path, default=Path("outputs/quickstart"), help="a quickstart")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: outputs/objectives or objective_modes)")
    parser.add_argument("--results", type=Path, help="folder of the results and the picture (default: --out)")
    args = parser.parse_args(argv)
    short = args.every_mode
    wanted = {name: (0,) if short else args.seeds or SEEDS[name] for name in args.only or SEEDS}
    modes = [args.mode] if args.mode else list(MODES) if short else ["sync"]
    default = REPO / "outputs" / ("objective_modes" if short else "objectives")
    source, out = args.source.resolve(), (args.out or default).resolve()
    results_in, cells = args.results or out, list(cells_of(wanted, modes))
    try:
        results = Published(results_in / ("modes.jsonl" if short else "gains.jsonl"))
        failed = run_missing(cells, out, source, find_source(source).digests, results, short=short)
    except (NoSource, OSError, ValueError) as error:
        sys.exit(f"compare_objectives.py: {error}")
    done = {cell: results.rows[str(cell)] for cell in cells if str(cell) in results.rows}
    if short:
        seconds = {(cell.objective, cell.mode): row["seconds"] for cell, row in done.items()}
        text = mode_table(list(wanted), modes, seconds, {(cell.objective, cell.mode) for cell in failed})
    else:
        found = {(cell.objective, cell.seed): row for cell, row in done.items()}
        text = gain_table(wanted, found)
        if found:
            picture = results_in / "gains.svg"
            draw(list(wanted), found, picture)
            text += f"\n\nPicture: {picture}"
    print(f"\n{text}")
    if failed:
        sys.exit("\n\n".join(["", *(f"{cell} failed twice. {end}" for cell, end in failed.items())]))


if __name__ == "__main__":
    obey_signals()
    main()
