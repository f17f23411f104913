"""Measure what asynchrony gains if tools are slow, and what it costs in accuracy: the tiny task in every mode.

    python -m scripts.studies.compare_modes               # five modes x .5 s, 2 s x 3 seeds
    python -m scripts.studies.compare_modes --max-runs 1  # the next run that is missing
    python -m scripts.studies.compare_modes --show RUN    # what a run took at each step, next to what it drew

`separate_async_keep` is `separate_async` with updates under running requests. `separate_async_actor` has agent loops in
a separate actor and a watched server, as in `hardware=cpu_separate`: every turn is a message between processes.
All others have loops within the server. All share the objective of configs/tiny_dapo.yaml, whose old log-probs are the
rollout's, as `keep` needs them. Each tool call is delayed by a log-normal time (slow_sandbox.py). Modes take turns, so
that a machine that gets slower is slower for all. Prints a table. Ratios of speed and differences of accuracy compare
two runs with the same seed; they are means over seeds with 95% intervals by Student's t.

An interrupted run continues from its checkpoint; a run that fails is reported, and the next call tries it again. The
result of a finished run is a line of --results, and that run is not repeated. The machine should do nothing else
meanwhile, and must be the same for all runs of a file.
"""

import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.studies.shared import (
    Published,
    add_places,
    begin,
    command_line,
    has_begun,
    interval,
    made_with,
    markdown,
    metrics_of,
    rl_command,
    rl_environment,
    spread,
)
from scripts.studies.slow_sandbox import slow_sandbox
from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints.manifest import NotWhole
from verl_ext.fleet.modes import IN_SERVER
from verl_ext.ledger.prompts import FILE
from verl_ext.outcome import PromptEnd
from verl_ext.quickstart.source import find_source
from verl_ext.quickstart.supervise import CommandFailed, Supervisor
from verl_ext.records import store
from verl_ext.runs import durable, jsonl
from verl_ext.runs.folder import step_of, training_folder
from verl_ext.runs.lock import lock_folder
from verl_ext.sandbox.launch import running_server

ACCURACY = "val-core/tiny_tools/acc/mean@4"
SLOW = (
    "retool.sandbox.max_concurrency=1024",  # the sandbox of others is slow, not full
    "retool.sandbox.queue_timeout_s=600",  # nor is a slow call a lost one
)
OVERRIDES = ("trainer.save_freq=10", "actor_rollout_ref.rollout.val_kwargs.n=4", *SLOW)
SEPARATE = (
    "hardware=cpu_separate",
    f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={IN_SERVER}",
    "retool.fleet.health.enable=false",  # loops within a server end with it
    "retool.fleet.routing=verl",
)
ACTOR, KEEP = "separate_async_actor", "separate_async_keep"
MODES = {
    "sync": (),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "separate_async": SEPARATE,
    ACTOR: ("hardware=cpu_separate",),
    KEEP: (*SEPARATE, "retool.fleet.weight_update=keep"),
}
# The mode that a mode is compared with
PARTNERS = {
    "sync": (),
    "colocate_async": ("sync",),
    "separate_async": ("sync",),
    ACTOR: ("sync",),
    KEEP: ("separate_async", ACTOR),
}
MEANS = (0.5, 2.0)  # latencies in s
TARGETS = {  # mode, partner, mean latency -> ratio to the partner's trained tokens/s that it must reach
    ("separate_async", "sync", 0.5): 1.3,
    ("separate_async", "sync", 2.0): 2.0,
    (KEEP, ACTOR, 2.0): 1.25,
}
ALLOWED_LOSS = 0.05  # of accuracy, against the partner
VALIDATE = ("trainer.val_only=True", "trainer.val_before_train=True")
WIDTH = 5  # steps in a row of `--show`


class Cell(NamedTuple):
    """One run."""

    mode: str
    mean_s: float  # mean latency of a call
    repeat: int

    def __str__(self) -> str:
        return f"{self.mode}_{self.mean_s:g}s_{self.repeat}"


class Group(NamedTuple):
    """A prompt group, from its trajectories: means over rollouts, except the latency.

    Attributes:
        latency_s: of its slowest rollout, for generation and tools.
        model_tokens: sampled tokens of a rollout.
        calls: runs of code of a rollout.
        tokens: sampled tokens of all rollouts together.
    """

    latency_s: float
    model_tokens: float
    calls: float
    acc: float
    tokens: float


def cells_of(means: Sequence[float], modes: Sequence[str], repeats: int) -> Iterator[Cell]:
    """Yield the runs in order: modes take turns within a latency, latencies within a repeat."""
    return (Cell(mode, mean, n) for n, mean, mode in itertools.product(range(repeats), means, modes))


def command_of(cell: Cell, steps: int, extra: Sequence[str]) -> list[str]:
    overrides = [*MODES[cell.mode], *OVERRIDES, f"trainer.test_freq={steps}", *extra]
    return rl_command(overrides, steps=steps, seed=cell.repeat)


def launch(command: Sequence[str], source: Path, out: Path, mean_s: float, seed: int, timeout_s: float) -> None:
    """Run a launcher of recipe/ with the data and the SFT of a quickstart, behind a slow sandbox.

    Raises:
        SystemExit: another process writes there, perhaps a run whose script was killed.
        CommandFailed: it failed.
        TimeoutError: it took too long, and was ended.
    """
    began = time.monotonic()

    def watch() -> None:
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"{out} was not finished within {timeout_s:g} s. Run the same command again.")

    durable.make_folder(out)
    with (
        lock_folder(out) as lock,
        running_server() as url,
        slow_sandbox(url, mean_s, seed) as slow,
        Supervisor(lock) as supervisor,
    ):
        supervisor.run(list(command), log=out / "log.txt", env=rl_environment(source, out, slow), watch=watch)


def run_cell(cell: Cell, source: Path, out: Path, steps: int, extra: Sequence[str], timeout_s: float) -> None:
    """Start or continue a run; if its last step is trained, only the validation is left to do.

    Raises:
        CommandFailed, TimeoutError: see `launch`.
        NotWhole: none of its checkpoints is.
    """
    command = command_of(cell, steps, extra)
    if step_of(checkpoints.resume_point(out)) == steps:
        command += VALIDATE
    launch(command, source, out, cell.mean_s, cell.repeat, timeout_s)


def is_done(run: Path, steps: int) -> bool:
    return ACCURACY in metrics_of(run).steps.get(steps, {})


def read_ledger(run: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return uid -> step at which each prompt was drawn, and at which each trained prompt was taken."""
    drawn: dict[str, int] = {}
    trained: dict[str, int] = {}

    def add(record: Mapping[str, Any]) -> None:
        drawn.update(dict.fromkeys(record["drawn"], record["step"]))
        ends = record["ends"].items()
        trained.update({uid: record["step"] for uid, end in ends if end == PromptEnd.TRAINED.value})

    for _ in jsonl.read(run / FILE, add, "an object with `step`, `drawn` and `ends`"):
        pass
    return drawn, trained


def read_groups(run: Path) -> dict[str, Group]:
    """Return uid -> training group, made of its rollouts that are recorded and did not raise."""
    rollouts = defaultdict(list)
    for row in store.rows(run, columns=["uid", "validate", "timings", "model_tokens", "calls", "acc"]):
        if not row["validate"] and row["model_tokens"] is not None:
            rollouts[row["uid"]].append(row)
    return {
        uid: Group(
            latency_s=max(row["timings"]["generate_s"] + row["timings"]["tool_s"] for row in rows),
            model_tokens=fmean(row["model_tokens"] for row in rows),
            calls=fmean(sum(call["status"] != "not_run" for call in row["calls"]) for row in rows),
            acc=fmean([row["acc"] for row in rows if row["acc"] is not None] or [math.nan]),
            tokens=sum(row["model_tokens"] for row in rows),
        )
        for uid, rows in rollouts.items()
    }


def tokens_per_s(run: Path) -> float:
    """Return the sampled tokens of trained groups, without fillers, per second of the steps, without start-up.

    The first two steps of each process are left out as well: they fill caches and the pipeline.

    Raises:
        ValueError: the records lack groups that were trained on.
    """
    metrics = metrics_of(run)
    seconds = {
        step: data["timing_s/step"]
        for step, data in metrics.steps.items()
        if step not in metrics.cold and "timing_s/step" in data
    }
    _, trained = read_ledger(run)
    groups, timed = read_groups(run), [uid for uid, step in trained.items() if step in seconds]
    if lost := [uid for uid in timed if uid not in groups]:
        raise ValueError(
            f"{run}: the records lack {len(lost)} of {len(timed)} groups that were trained on, first {lost[0]} of step "
            f"{trained[lost[0]]}, so tokens cannot be counted. Delete the folder to repeat the run."
        )
    return sum(groups[uid].tokens for uid in timed) / sum(seconds.values())


def taken_table(run: Path) -> str:
    """Format in Markdown, for every few steps, the means of the groups that were drawn and of those trained on."""
    drawn, trained = read_ledger(run)
    groups = read_groups(run)
    if not (groups and trained):
        what = "trained on no group" if groups else "has no records of training rollouts (see retool.recorder)"
        raise ValueError(f"{run} {what}.")
    head = ["steps", *(f"{name}: drawn, taken" for name in ("latency (s)", "tokens", "calls", "acc")), "age (steps)"]
    lines = []
    for first in range(1, max(trained.values()) + 1, WIDTH):
        steps = range(first, first + WIDTH)
        both = [[groups[u] for u, s in which.items() if s in steps and u in groups] for which in (drawn, trained)]
        fields = ("latency_s", "model_tokens", "calls", "acc")
        cells = [", ".join(_mean([getattr(g, name) for g in side]) for side in both) for name in fields]
        age = _mean([step - drawn[uid] for uid, step in trained.items() if step in steps])
        lines.append([f"{first}-{steps[-1]}", *cells, age])
    return markdown(head, lines)


def _mean(values: Sequence[float]) -> str:
    """Format a mean; a dash if there are no values: retention removed the records, or only fillers were taken."""
    return f"{fmean(values):.2f}" if values else "-"


def mode_table(found: Mapping[Cell, tuple[float, float]], means: Sequence[float]) -> str:
    """Format the results in Markdown: a row per latency, mode, and mode that it is compared with.

    Args:
        found: run -> trained tokens per second, and accuracy at its end.
    """
    head = ["latency", "mode", "runs", "trained tokens/s", "accuracy", "compared with", "speed", "difference", "target"]
    lines = []
    both = [(mode, partner) for mode, partners in PARTNERS.items() for partner in partners or ("-",)]
    for mean, (mode, partner) in itertools.product(means, both):
        own = {cell.repeat: run for cell, run in found.items() if (cell.mode, cell.mean_s) == (mode, mean)}
        if not own:
            continue
        speeds, accs = zip(*own.values(), strict=True)
        pairs = [(run, found[Cell(partner, mean, n)]) for n, run in own.items() if Cell(partner, mean, n) in found]
        compared = ["-", "-", "-"]
        if pairs:
            ratios = [run[0] / other[0] for run, other in pairs]
            losses = [run[1] - other[1] for run, other in pairs]
            compared = [f"x{interval(ratios, '.2f')}", interval(losses, "+.3f"), "-"]
            if target := TARGETS.get((mode, partner, mean)):
                held = fmean(ratios) >= target, fmean(losses) >= -ALLOWED_LOSS
                compared[2] = f"x{target:g}: {_yes(held[0])}; accuracy: {_yes(held[1])}"
        lines.append([f"{mean:g} s", mode, str(len(own)), spread(speeds, 0), spread(accs, 3), partner, *compared])
    return markdown(head, lines)


def _yes(held: bool) -> str:
    return "yes" if held else "no"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--show", type=Path, metavar="RUN", help="only print the table of this RL run")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="only these modes (default: all)")
    parser.add_argument("--means", type=float, nargs="+", default=list(MEANS), help="mean latencies, s (default: .5 2)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-runs", type=int, help="end after this many runs")
    parser.add_argument("--timeout-s", type=float, default=1800, help="stop a run that takes longer (default: 1800)")
    add_places(parser, "modes")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every run")
    args = parser.parse_args(argv)
    if args.show:
        try:
            print(taken_table(training_folder(args.show, "rl")))
        except (FileNotFoundError, ValueError) as error:
            sys.exit(f"compare_modes.py: {error}")
        return
    source, out = args.source.resolve(), args.out.resolve()
    cells = list(cells_of(args.means, args.mode, args.repeats))
    failed: dict[Cell, str] = {}
    try:
        digests = find_source(source).digests
        overrides = {cell: [*MODES[cell.mode], *OVERRIDES, *args.overrides] for cell in cells}
        settings = {cell: made_with(digests, steps=args.steps, overrides=overrides[cell]) for cell in cells}
        results = Published(args.results or out / "results.jsonl")
        missing = [cell for cell in cells if not results.has(str(cell), settings[cell])]
        for cell in missing:
            has_begun(out / str(cell), settings[cell], "metrics*.jsonl")
    except (OSError, ValueError) as error:
        sys.exit(f"compare_modes.py: {error}")
    for cell in missing[: args.max_runs]:
        print(f"== {cell}", flush=True)
        run = out / str(cell)
        try:
            if not is_done(run, args.steps):
                begin(run, settings[cell])
                run_cell(cell, source, run, args.steps, args.overrides, args.timeout_s)
            if not is_done(run, args.steps):
                raise ValueError(f"{run} ended without {ACCURACY} of step {args.steps}; see its log.txt.")
            figures = {
                "tokens_per_s": round(tokens_per_s(run), 1),
                "accuracy": metrics_of(run).steps[args.steps][ACCURACY],
            }
        except (CommandFailed, NotWhole, TimeoutError, ValueError) as error:
            print(f"{cell} failed: {error}", flush=True)
            failed[cell] = str(error)
            continue
        results.add(str(cell), figures, settings[cell])
    rows = {cell: results.rows[str(cell)] for cell in cells if str(cell) in results.rows}
    if rows:
        found = {cell: (row["tokens_per_s"], row["accuracy"]) for cell, row in rows.items()}
        print(f"\n{mode_table(found, args.means)}")
    if failed:
        told = "\n".join(f"{cell}: {why}" for cell, why in failed.items())
        sys.exit(f"compare_modes.py: these runs failed; the next call tries them again:\n{told}")


if __name__ == "__main__":
    main()
