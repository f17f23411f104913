"""Find a machine's speeds from a run's metrics, and how far simulated steps are from logged ones.

Speeds of the trainer are medians over the fitted steps. Those of a server (seconds of an iteration, seconds per token
of context and, if unknown, turns at once) are found by search: the least sum of squared relative errors of the
rollouts' time and, if a run logs it, of the mean time of a response. All other steps are predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import yaml

from scripts.studies.events import Speed
from scripts.studies.schedules import Machine, Step, sync
from scripts.studies.shared import REPO
from scripts.studies.workload import shape_of
from verl_ext.runs.metrics import Metrics, read_metrics

GENERATE = "timing_s/agent_loop/generate_sequences/"  # only in the published run: verl 0.9.1 does not log it
PUBLISHED = REPO / "data" / "published" / "rl.jsonl"
PUBLISHED_FITTED = (1, 5)
# Found by `fit`; 320 to 384 turns fit nearly as well. data/published/README.md shows that there were 8 GPUs, and the
# script of that run has servers of 4 and 8 x 16 calls at once.
PUBLISHED_SPEED = Speed(slots=352, iteration_s=0.028, context_s=4.0e-8)
PUBLISHED_SLOTS = (320, 352, 384, 416)


@dataclass(frozen=True)
class Run:
    """A run in mode `sync`, in the form that the simulation takes.

    Attributes:
        name: printed in tables.
        metrics: those of its steps.
        prompts, n: groups that a step trains, responses of each.
        machine: without the speeds that are fitted.
        fitted: steps that speeds are fitted to.
        active: groups of equal rewards are replaced.
    """

    name: str
    metrics: Metrics
    prompts: int
    n: int
    machine: Machine
    fitted: tuple[int, ...]
    active: bool = False

    @property
    def steps(self) -> list[int]:
        """Return the steps that are simulated: a process's first ones are left out if there are others."""
        timed = self.metrics.curve("timing_s/gen")[0]
        return [step for step in timed if step not in self.metrics.cold] or timed


@dataclass(frozen=True)
class Compared:
    """A logged step next to a simulated one; times in seconds. `generate_s` is None if a run does not log it."""

    number: int
    is_fitted: bool
    rollout_s: float
    generate_s: float | None
    step_s: float
    simulated: Step


def published_run() -> Run:
    """Return the published run with the speeds that were found for it."""
    metrics = read_metrics([PUBLISHED])
    metrics = metrics._replace(cold=set())  # nothing was compiled in its first steps: they are no slower
    machine = Machine(8, 4, PUBLISHED_SPEED, 0, 0, 0, 0, workers=128)
    run = Run("published run", metrics, 512, 16, machine, PUBLISHED_FITTED)
    return replace(run, machine=trainer_speeds(run))


def own_run(folder: Path) -> Run:
    """Return the run of a folder, with speeds found from the first third of its steps.

    Raises:
        ValueError: there are no metrics or no config, or the run's mode is not sync.
    """
    files, config = list(folder.glob("metrics*.jsonl")), folder / "hydra" / "config.yaml"
    if not files or not config.is_file():
        raise ValueError(f"{folder} has no metrics*.jsonl or no hydra/config.yaml. Expected the folder of an RL run.")
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    mode = settings["trainer"]["v1"]["trainer_mode"]
    if mode != "sync":
        raise ValueError(f"{folder} ran in mode {mode}. Speeds can be fitted only to runs in mode sync.")
    rollout, trainer = settings["actor_rollout_ref"]["rollout"], settings["trainer"]
    gpus = trainer["nnodes"] * trainer["n_gpus_per_node"]
    workers = settings["retool"]["sandbox"]["max_concurrency"] * rollout["agent"]["num_workers"]
    speed = Speed(rollout["max_num_seqs"], 0.01, 1e-7)
    machine = Machine(gpus, rollout["tensor_model_parallel_size"], speed, 0, 0, 0, 0, workers)
    prompts, active = settings["data"]["train_batch_size"], bool(settings["algorithm"]["filter_groups"]["enable"])
    run = Run(str(folder), read_metrics(files), prompts, rollout["n"], machine, (), active)
    if len(run.steps) < 3:
        raise ValueError(f"{folder} has {len(run.steps)} steps with timing_s/gen; expected at least 3.")
    run = replace(run, fitted=tuple(run.steps[: max(2, len(run.steps) // 3)]))
    run = replace(run, machine=trainer_speeds(run))
    return replace(run, machine=fit(run, (speed.slots,)))


def trainer_speeds(run: Run) -> Machine:
    """Return the run's machine with the trainer's times, from the fitted steps."""
    rows = [run.metrics.steps[step] for step in run.fitted]
    parts = ("gen", "old_log_prob", "update_actor")
    return replace(
        run.machine,
        log_prob_s=median(row.get("timing_s/old_log_prob", 0.0) / row["perf/total_num_tokens"] for row in rows),
        update_s=median(row["timing_s/update_actor"] / row["perf/total_num_tokens"] for row in rows),
        switch_s=median(row["timing_s/gen"] - row.get(f"{GENERATE}max", row["timing_s/gen"]) for row in rows),
        other_s=median(row["timing_s/step"] - sum(row.get(f"timing_s/{part}", 0.0) for part in parts) for row in rows),
    )


def simulate(run: Run, number: int, machine: Machine) -> Step:
    """Simulate a logged step on `machine`."""
    metrics = run.metrics.steps[number]
    shape = shape_of(metrics, prompts=run.prompts, n=run.n)
    useful = metrics.get("filter_groups/keep_rate", 1.0) if run.active else 1.0
    return sync(machine, shape, train=run.prompts, useful=useful, active=run.active, seed=number)


def compare(run: Run) -> list[Compared]:
    """Return all steps of a run, logged and simulated."""
    compared = []
    for number in run.steps:
        row = run.metrics.steps[number]
        times = (row["timing_s/gen"], row.get(f"{GENERATE}mean"), row["timing_s/step"])
        compared.append(Compared(number, number in run.fitted, *times, simulate(run, number, run.machine)))
    return compared


def fit(run: Run, slots: Sequence[int], rounds: int = 7) -> Machine:
    """Return the run's machine with the server speed that fits its fitted steps best.

    Args:
        slots: numbers of turns at once to try.
        rounds: of the search; the last has a step of 2^(2 - rounds), as a logarithm to base 2.
    """
    begin, best = run.machine.speed, (float("inf"), run.machine)
    for number in slots:
        machine = replace(run.machine, speed=replace(begin, slots=number))
        best = min(best, _search(run, machine, rounds), key=lambda found: found[0])
    return best[1]


def _search(run: Run, machine: Machine, rounds: int) -> tuple[float, Machine]:
    """Run a pattern search over the logarithms of both speeds, singly and in opposition; return (error, machine)."""
    error = _error(run, machine)
    for step in (2.0 ** (2 - number) for number in range(1, rounds + 1)):
        moves = [(step, 0.0), (-step, 0.0), (0.0, step), (0.0, -step), (step / 4, -step), (-step / 4, step)]
        improved = True
        while improved:
            improved = False
            for iteration, context in moves:
                speed = machine.speed
                speed = Speed(speed.slots, speed.iteration_s * 2**iteration, speed.context_s * 2**context)
                candidate = replace(machine, speed=speed)
                found = _error(run, candidate)
                if found < error:
                    error, machine, improved = found, candidate, True
    return error, machine


def _error(run: Run, machine: Machine) -> float:
    total = 0.0
    for number in run.fitted:
        row, step = run.metrics.steps[number], simulate(run, number, machine)
        total += (step.rollout_s / row["timing_s/gen"] - 1) ** 2
        if f"{GENERATE}mean" in row:
            total += (step.generate_s / row[f"{GENERATE}mean"] - 1) ** 2
    return total
