"""Does every objective train, and in every mode? Runs of the real stack on the tiny task, from one quickstart's SFT.

    .venv/bin/python scripts/compare_objectives.py               # six objectives, three seeds, 30 steps, evaluated
    .venv/bin/python scripts/compare_objectives.py --every-mode  # every preset in every mode, three steps

Prints a table, and with the first command draws the curves. Each run is a quickstart in its own folder
(scripts/seeds.py), with the data and the SFT of the one that --from names. A finished run is not run again. One that
fails is tried once more, from its last checkpoint; then the end of its log is shown, and the next call tries it again.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "scripts"))

from seeds import COLUMNS, accuracy, estimate, quickstart, summary_of  # noqa: E402

from verl_ext.analysis.stability import half_width  # noqa: E402
from verl_ext.quickstart.options import JOURNAL  # noqa: E402
from verl_ext.quickstart.source import NoSource, find_source  # noqa: E402
from verl_ext.records.run_record import read_metrics  # noqa: E402
from verl_ext.report.charts import Series, line_chart  # noqa: E402
from verl_ext.report.picture import write_picture  # noqa: E402

OBJECTIVES = sorted(path.stem for path in (REPO / "configs" / "objective").glob("*.yaml"))
COMPARED = ("dapo", "olmorl", "icepop", "glm5_async", "cispo", "dr_grpo")
MODES = {  # mode -> overrides of configs/tiny_dapo.yaml
    "sync": (),
    "colocate_async": (
        "trainer.v1.trainer_mode=colocate_async",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_ext.rollout.workers.LeanAgentLoopManager",
    ),
    "separate_async": ("hardware=cpu_separate",),
}
SHORT = ("trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
ENOUGH = 0.30  # accuracy above SFT's that an objective is expected to reach
LOG_LINES = 12
SOURCE = COLUMNS["tiny"][0][2]  # the data source that the model was trained for

Start = Callable[..., None]  # as `quickstart`


class Cell(NamedTuple):
    """One run."""

    objective: str
    mode: str
    seed: int

    def __str__(self) -> str:
        return f"{self.objective}_{self.mode}_{self.seed}"


def arguments(cell: Cell, source: Path, *, short: bool) -> list[str]:
    """Options of the quickstart. A short run ends after RL."""
    overrides = [f"objective={cell.objective}", *MODES[cell.mode], *(SHORT if short else ())]
    rl = [word for override in overrides for word in ("--rl", override)]
    return ["--from", str(source), "--seed", str(cell.seed), *(("--stage", "rl") if short else ()), *rl]


def is_done(out: Path, *, digests: Mapping[str, str], short: bool) -> bool:
    """Whether a run is whole.

    Raises:
        ValueError: it began from another SFT.
    """
    if not (out / JOURNAL).is_file():
        return False
    entries = {entry["stage"]: entry for entry in json.loads((out / JOURNAL).read_text())}
    if "rl" in entries and entries["rl"]["settings"]["from"] != digests:
        raise ValueError(f"{out} began from another SFT than --from has. Delete it, or write elsewhere with --out.")
    last = entries.get("rl" if short else "eval_after", {})
    return last.get("status") == "done" and (short or (out / "summary.json").is_file())


def run_missing(
    cells: Sequence[Cell],
    out: Path,
    source: Path,
    digests: Mapping[str, str],
    *,
    short: bool,
    start: Start = quickstart,
) -> dict[Cell, str]:
    """Run what is not done, each at the most twice; returns the end of the log of each that failed both times."""
    failed = {}
    for cell in cells:
        folder = out / str(cell)
        for is_last in (False, True):
            if is_done(folder, digests=digests, short=short):
                break
            try:
                start(folder, *arguments(cell, source, short=short))
            except subprocess.CalledProcessError as error:
                print(f"{cell}: {error}", flush=True)
                if is_last:
                    failed[cell] = end_of_log(folder)
            else:
                break
    return failed


def end_of_log(folder: Path) -> str:
    """The last lines of the log that was written last."""
    logs = [*folder.glob("*.log"), *folder.glob("*/log.txt"), *folder.glob("*/*.log")]
    if not logs:
        return f"no log in {folder}"
    log = max(logs, key=lambda path: path.stat().st_mtime)
    return "\n".join([f"{log}:", *log.read_text(errors="replace").splitlines()[-LOG_LINES:]])


def rl_seconds(folder: Path) -> float:
    """That RL took, its start and its checkpoints included."""
    return next(e["wall_s"] for e in json.loads((folder / JOURNAL).read_text()) if e["stage"] == "rl")


def mode_table(objectives: Sequence[str], modes: Sequence[str], seconds: Mapping, failed: Mapping) -> str:
    """In Markdown: a row per objective, a column per mode.

    Args:
        seconds: (objective, mode) -> what its RL took, of those that are done.
        failed: has the (objective, mode) of those that failed.
    """

    def text(cell: tuple[str, str]) -> str:
        return f"ok, {seconds[cell]:.0f} s" if cell in seconds else "failed" if cell in failed else "not run"

    lines = [["objective", *modes], ["---"] * (1 + len(modes))]
    lines += [[name, *(text((name, mode)) for mode in modes)] for name in objectives]
    times = [[took for (_, each), took in seconds.items() if each == mode] for mode in modes]
    lines.append(["mean of those that are ok", *(f"{fmean(took):.0f} s" if took else "-" for took in times)])
    return _markdown(lines)


def gains_of(summaries: Sequence[Mapping]) -> list[float]:
    """Accuracy after RL less that of SFT, of each seed."""
    return [estimate(each, "after", SOURCE)["value"] - estimate(each, "before", SOURCE)["value"] for each in summaries]


def gain_table(objectives: Sequence[str], seeds: Sequence[int], found: Mapping[tuple[str, int], Mapping]) -> str:
    """In Markdown: accuracy of each seed after RL, the gain over SFT, and whether it is enough.

    Args:
        found: (objective, seed) -> summary of its run, of those that are done.
    """
    head = ["objective", *(f"seed {seed}: SFT -> after RL" for seed in seeds), "gain over SFT", "least gain"]
    lines = [[*head, f"at least +{ENOUGH:.2f}"], ["---"] * (len(head) + 1)]
    for name in objectives:
        runs = [found[name, seed] for seed in seeds if (name, seed) in found]
        cells = [
            f"{accuracy(run, 'before', SOURCE)} -> {accuracy(run, 'after', SOURCE)}" if run else "not run"
            for run in (found.get((name, seed)) for seed in seeds)
        ]
        gains = gains_of(runs)
        width = half_width(gains)
        mean = f"{fmean(gains):+.3f}" + ("" if width is None else f" ± {width:.3f}") if gains else "-"
        enough = "open" if len(runs) < len(seeds) else "yes" if fmean(gains) >= ENOUGH else "no"
        lines.append([name, *cells, mean, f"{min(gains):+.3f}" if gains else "-", enough])
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


def draw(
    objectives: Sequence[str],
    found: Mapping[tuple[str, int], Mapping],
    folders: Mapping[tuple[str, int], Path],
    out: Path,
) -> None:
    """Accuracy in training, a mean over seeds; and gains over SFT with 95% intervals, of two seeds or more."""
    curves, gains = [], []
    for number, name in enumerate(objectives, 1):
        keys = [key for key in found if key[0] == name]
        if not keys:
            continue
        runs = [dict(zip(*_accuracy_curve(folders[key]), strict=True)) for key in keys]
        steps = sorted(set.intersection(*map(set, runs)))
        curves.append(Series(name, steps, [fmean(run[step] for run in runs) for step in steps]))
        own = gains_of([found[key] for key in keys])
        mean, width = fmean(own), half_width(own)
        spread = () if width is None else [(mean - width, mean + width)]
        gains.append(Series(name, [number], [mean], points=True, spread=spread))
    accuracies = line_chart(curves, x_label="RL step", y_label="share of rollouts", title="Accuracy in training")
    reached = line_chart(gains, x_label="objective", y_label="accuracy", title="Gain over SFT", include=[0, ENOUGH])
    charts = [("Accuracy in training", accuracies), ("Gain over SFT", reached)]
    write_picture(charts, out, columns=2)


def _accuracy_curve(folder: Path) -> tuple[list[int], list[float]]:
    return read_metrics(list((folder / "rl").glob("metrics-*.jsonl"))).curve("train/acc")


def cells_of(objectives: Sequence[str], modes: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """Seed by seed, so that what is there first covers all objectives."""
    return (Cell(name, mode, seed) for seed, mode, name in itertools.product(seeds, modes, objectives))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every-mode", action="store_true", help="every preset, in every mode, three steps, seed 0")
    parser.add_argument("--only", nargs="+", choices=OBJECTIVES, metavar="NAME", help="these objectives")
    parser.add_argument("--mode", choices=MODES, help="this mode (default: sync, with --every-mode all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the comparison (default: 0 1 2)")
    parser.add_argument("--from", dest="source", type=Path, default=Path("outputs/quickstart"), help="a quickstart")
    parser.add_argument("--out", type=Path, help="default: outputs/objectives, or outputs/objective_modes")
    args = parser.parse_args(argv)
    short = args.every_mode
    objectives = args.only or (OBJECTIVES if short else COMPARED)
    modes = [args.mode] if args.mode else list(MODES) if short else ["sync"]
    seeds = [0] if short else args.seeds
    default = REPO / "outputs" / ("objective_modes" if short else "objectives")
    source, out = args.source.resolve(), (args.out or default).resolve()
    cells = list(cells_of(objectives, modes, seeds))
    try:
        digests = find_source(source).digests
        failed = run_missing(cells, out, source, digests, short=short)
        done = [cell for cell in cells if is_done(out / str(cell), digests=digests, short=short)]
    except (NoSource, OSError, ValueError) as error:
        sys.exit(f"compare_objectives.py: {error}")
    if short:
        seconds = {(cell.objective, cell.mode): rl_seconds(out / str(cell)) for cell in done}
        text = mode_table(objectives, modes, seconds, {(cell.objective, cell.mode) for cell in failed})
    else:
        found = {(cell.objective, cell.seed): summary_of(out / str(cell)) for cell in done}
        text = gain_table(objectives, seeds, found)
        if found:
            picture = out / "compare_objectives.svg"
            draw(objectives, found, {key: out / str(Cell(key[0], modes[0], key[1])) for key in found}, picture)
            text += f"\n\nPicture: {picture}"
    print(f"\n{text}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    if failed:
        sys.exit("\n\n".join(["", *(f"{cell} failed twice. {end}" for cell, end in failed.items())]))


if __name__ == "__main__":
    main()
