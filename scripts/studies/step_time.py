"""Estimate how long a step would take in another mode: `python -m scripts.studies.step_time [RUN ...]`.

Prints the simulation's error on the published run and on each RUN, a folder of an RL run in mode sync, then the time of
a step of the published run in each mode. For its assumptions and what it was fitted to see docs/evidence/async.md
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from scripts.studies.calibration import (
    PUBLISHED_SLOTS,
    Compared,
    Run,
    compare,
    fit,
    own_run,
    published_run,
)
from scripts.studies.drawing import write_picture
from scripts.studies.schedules import Machine, Step, asynchronous, coarser, partial, sync
from scripts.studies.shared import command_line
from scripts.studies.workload import Shape, shape_of
from verl_ext.pages.charts import Chart, Series

STALENESS = range(1, 9)
APART, WITHOUT = "asynchronous", "icepop_onpolicy"  # the second has no pass for old log-probs
COARSE = 8  # modes are compared with responses fewer, and a server smaller, by this factor


class Variant(NamedTuple):
    """A line of the table. `staleness` is that of asynchronous ones, for the chart."""

    name: str
    step: Step
    staleness: int | None = None


def variants(machine: Machine, shape: Shape, *, useful: float, rollout_gpus: int, steps: int) -> Iterator[Variant]:
    """Yield a step in each mode.

    Args:
        useful: share of groups whose rewards differ.
        rollout_gpus: GPUs of the servers if they have separate ones.
        steps: number of steps over which `partial` and `asynchronous` take means.
    """
    more = replace(machine, workers=4 * machine.workers)
    yield Variant("sync", sync(machine, shape, useful=useful))
    yield Variant("sync, 4 x the sandbox workers", sync(more, shape, useful=useful))
    yield Variant("sync, active sampling", sync(machine, shape, useful=useful, active=True))
    yield Variant(f"sync, {WITHOUT}", sync(machine, shape, useful=useful, log_probs=False))
    yield Variant("partial", partial(machine, shape, useful=useful, steps=steps))
    apart = {"rollout_gpus": rollout_gpus, "useful": useful, "steps": steps}
    for mode, log_probs in ((APART, True), (f"{APART}, {WITHOUT}", False)):
        for staleness in STALENESS:
            step = asynchronous(machine, shape, staleness=staleness, log_probs=log_probs, **apart)
            yield Variant(f"{mode}, staleness {staleness}", step, staleness)


def error_table(run: Run, compared: Sequence[Compared]) -> str:
    """Return logged and simulated times of each step, their differences, and means of these over steps not fitted."""
    speed = run.machine.speed
    lines = [
        f"{run.name}: {speed.slots} turns at once, {1e3 * speed.iteration_s:.3g} ms per iteration plus "
        f"{1e9 * speed.context_s:.3g} ns per token of context; fitted to steps "
        f"{', '.join(map(str, run.fitted))} (marked *)",
        f"{'step':>6} {'rollouts, s':>12} {'simulated':>10} {'error':>7} {'response, s':>12} {'simulated':>10} "
        f"{'error':>7} {'step, s':>9} {'simulated':>10} {'error':>7}",
    ]
    for each in compared:
        mean = "" if each.generate_s is None else _pair(each.generate_s, each.simulated.generate_s)
        lines.append(
            f"{'*' * each.is_fitted:>1}{each.number:>5} {_pair(each.rollout_s, each.simulated.rollout_s)} "
            f"{mean:>31} {_pair(each.step_s, each.simulated.step_s)[3:]}"
        )
    predicted = [each for each in compared if not each.is_fitted] or compared
    rollouts, whole = (
        fmean(abs(simulated / seen - 1) for seen, simulated in pairs)
        for pairs in (
            [(each.rollout_s, each.simulated.rollout_s) for each in predicted],
            [(each.step_s, each.simulated.step_s) for each in predicted],
        )
    )
    total = sum(each.simulated.step_s for each in predicted) / sum(each.step_s for each in predicted) - 1
    lines.append(
        f"Steps not fitted: mean error {rollouts:.1%} of the rollouts, {whole:.1%} of a step, {total:+.1%} of their sum"
    )
    return "\n".join(lines)


def _pair(seen: float, simulated: float) -> str:
    return f"{seen:>12.4g} {simulated:>10.4g} {simulated / seen - 1:>+7.1%}"


def variant_table(found: Sequence[Variant]) -> str:
    first = found[0].step
    rows = [
        f"{'':<46}{'step, s':>9}{'waits':>8}{'trains':>8}{'useful groups':>15}{'of them an hour':>17}{'x sync':>8}"
        f"{'oldest':>8}"
    ]
    for name, step, _ in found:
        useful = step.useful * COARSE
        rate = useful / step.step_s
        speed = rate * first.step_s / (first.useful * COARSE)
        rows.append(
            f"{name:<46}{step.step_s:>9.0f}{step.rollout_s:>8.0f}{step.train_s:>8.0f}{useful:>15.0f}"
            f"{3600 * rate:>17.0f}{speed:>8.2f}{step.oldest:>8}"
        )
    return "\n".join(rows)


def draw_charts(compared: Sequence[Compared], found: Sequence[Variant], out: Path) -> None:
    """Draw the published steps next to simulated ones, and a step's time over staleness."""
    numbers = [each.number for each in compared]
    steps = Chart(
        "The published run",
        [
            Series("published step", numbers, [each.step_s for each in compared], points=True),
            Series("simulated step", numbers, [each.simulated.step_s for each in compared]),
            Series("published rollouts", numbers, [each.rollout_s for each in compared], points=True),
            Series("simulated rollouts", numbers, [each.simulated.rollout_s for each in compared]),
        ],
        "seconds",
        "step of the published run",
        include=[0],
    )
    ends = [STALENESS[0], STALENESS[-1]]
    flat = [each for each in found if each.name in ("sync", f"sync, {WITHOUT}", "partial")]
    lines = [Series(each.name, ends, [each.step.step_s] * 2) for each in flat]
    for name in (APART, f"{APART}, {WITHOUT}"):
        points = [each for each in found if each.name == f"{name}, staleness {each.staleness}"]
        lines.append(Series(name, [each.staleness for each in points], [each.step.step_s for each in points]))
    modes = Chart(
        "A step in each mode",
        [line for line in lines if line.x],
        "seconds of a step",
        "staleness, versions",
    )
    write_picture([steps, modes], out, columns=2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="also print the error on these runs' steps")
    parser.add_argument("--step", type=int, default=1, help="step of the published run to simulate (default: 1)")
    parser.add_argument("--useful", type=float, default=0.7, help="assumed share of useful groups (default: 0.7)")
    parser.add_argument("--tool-s", type=float, help="seconds per call, instead of the published run's")
    parser.add_argument("--workers", type=int, help="sandbox workers, instead of the published run's 128")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs, a multiple of 4 (default: 8)")
    parser.add_argument("--rollout-gpus", type=int, help="GPUs of the servers in asynchronous modes (default: half)")
    parser.add_argument("--steps", type=int, default=8, help="steps to average over in each mode (default: 8)")
    parser.add_argument("--fit", action="store_true", help="fit the published run's speeds again (takes minutes)")
    picture = "outputs/step_time.svg"
    parser.add_argument("--out", type=Path, default=Path(picture), help=f"file of the picture (default: {picture})")
    args = parser.parse_args(argv)
    published = published_run()
    if args.step not in published.steps or not 0 < args.useful <= 1:
        parser.error(f"--step {args.step} --useful {args.useful:g}: expected a step of 1 to 10, and a share above 0")
    try:
        if args.fit:
            published = replace(published, machine=fit(published, PUBLISHED_SLOTS))
        compared = compare(published)
        print(error_table(published, compared))
        for run in map(own_run, args.runs):
            print(f"\n{error_table(run, compare(run))}")
        shape = shape_of(published.metrics.steps[args.step], prompts=published.prompts, n=published.n)
        shape = replace(shape, tool_s=shape.tool_s if args.tool_s is None else args.tool_s)
        machine = _scaled(published.machine, args.gpus, args.workers)
        print(
            f"\nA step like step {args.step} of the published run on {machine.gpus} GPUs, with {shape.tool_s:.3g} s "
            f"per call, {machine.workers} sandbox workers and an assumed share of useful groups of {args.useful:g}"
        )
        gpus = args.rollout_gpus or max(4, args.gpus // 8 * 4)
        machine, shape = coarser(machine, shape, COARSE)
        found = list(variants(machine, shape, useful=args.useful, rollout_gpus=gpus, steps=args.steps))
        print(variant_table(found))
        draw_charts(compared, found, args.out)
    except KeyError as error:
        sys.exit(f"step_time: a run has no {error} in its metrics or config. Expected an RL run of these configs")
    except (OSError, ValueError) as error:
        sys.exit(f"step_time: {error}")
    print(f"\nPicture: {args.out}")


def _scaled(machine: Machine, gpus: int, workers: int | None) -> Machine:
    """Return the machine with another number of GPUs; the trainer's speed is proportional to it."""
    if gpus < 2 * machine.gpus_per_server or gpus % machine.gpus_per_server:
        raise ValueError(f"--gpus {gpus}: expected a multiple of {machine.gpus_per_server}, two or more of them.")
    factor = machine.gpus / gpus
    return replace(
        machine,
        gpus=gpus,
        workers=workers or machine.workers,
        log_prob_s=machine.log_prob_s * factor,
        update_s=machine.update_s * factor,
    )


if __name__ == "__main__":
    main()
