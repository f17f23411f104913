"""Simulate the trainer's modes over simulated rollouts: `sync`, `partial` (verl's colocate_async), `asynchronous`.

A step trains `prompts` groups. The modes differ in this:
- sync: issues them, waits for the last response, trains. With active sampling a group whose rewards are equal is
  replaced at once, until the step has as many useful groups as it trains.
- partial: keeps two steps' groups in flight (verl's num_warmup_batches: 1). As soon as one step's are there, servers
  stop, the trainer takes the GPUs, and unfinished responses continue afterwards from where they were.
- asynchronous: servers and trainer have separate GPUs. At most `staleness + 1` steps' groups more than were trained
  are issued (AReaL's rule).
If more groups have ended than a step trains, it takes those that were issued first, as the sampler does
(trainer/sampler.py).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from scripts.studies.events import Simulation, Speed
from scripts.studies.workload import Group, Response, Shape, draw

STOCK_LASTS = 8  # steps, at most, for which a batch of the first ones is waiting for the trainer


@dataclass(frozen=True)
class Machine:
    """A machine's size and speeds.

    Attributes:
        gpus: number of all GPUs.
        gpus_per_server: GPUs of one inference server (tensor parallelism).
        speed: that of one server.
        log_prob_s: seconds per token, prompt included, of the pass for old log-probs on all GPUs.
        update_s: the same for the update.
        switch_s: seconds of a step's rollouts besides the slowest response: servers wake up and take weights.
        other_s: seconds of a step besides all these.
        workers: number of sandbox workers.
    """

    gpus: int
    gpus_per_server: int
    speed: Speed
    log_prob_s: float
    update_s: float
    switch_s: float
    other_s: float
    workers: int


@dataclass(frozen=True)
class Step:
    """What a step took, in seconds: means over the simulated steps.

    Attributes:
        step_s: from one step's end to the next one's.
        rollout_s: time for which the trainer waited for rollouts.
        train_s: log-probs, update and the rest.
        useful: groups with a gradient that it trained.
        tokens: those that it trained, prompts included.
        generate_s: mean over its responses, from request to answer, over all turns.
        oldest: most versions between issue and training of any group.
    """

    step_s: float
    rollout_s: float
    train_s: float
    useful: float
    tokens: float
    generate_s: float = 0.0
    oldest: int = 0


def coarser(machine: Machine, shape: Shape, factor: int) -> tuple[Machine, Shape]:
    """Return the step with 1/`factor` of its groups, slots and workers, each token and context costing `factor` times.

    Raises:
        ValueError: slots, workers or groups are not divisible.
    """
    sizes = (machine.speed.slots, machine.workers, shape.prompts)
    if any(size % factor for size in sizes):
        raise ValueError(f"{sizes} turns, sandbox workers and groups; expected multiples of {factor}.")
    slots, workers, prompts = (size // factor for size in sizes)
    speed = replace(machine.speed, slots=slots, context_s=machine.speed.context_s * factor)
    costs = {"log_prob_s": machine.log_prob_s * factor, "update_s": machine.update_s * factor}
    return replace(machine, speed=speed, workers=workers, **costs), replace(shape, prompts=prompts)


def sync(
    machine: Machine,
    shape: Shape,
    *,
    train: int | None = None,
    useful: float = 1.0,
    active: bool = False,
    log_probs: bool = True,
    seed: int = 0,
) -> Step:
    """Simulate one step.

    Args:
        train: groups that it trains; None: all that are generated.
        useful: share of groups whose rewards differ.
        active: replace groups whose rewards are equal, until there are enough, or `shape.prompts` were generated
            if that is more than `train`.
        log_probs: whether there is a pass for old log-probs.
    """
    rng = random.Random(seed)
    train = shape.prompts if train is None else train
    limit = shape.prompts if shape.prompts > train else None
    drawn = draw(shape, train, useful, rng)
    done: list[Group] = []
    issued = 0

    def issue_next() -> None:
        nonlocal issued
        if issued == len(drawn):
            drawn.extend(draw(shape, train, useful, rng))
        simulation.issue(drawn[issued])
        issued += 1

    def on_group(group: Group) -> None:
        done.append(group)
        if active and not group.useful and (limit is None or issued < limit):
            issue_next()

    simulation = _simulation(machine, machine.gpus, shape, on_group)
    for _ in range(train):
        issue_next()
    if active:
        simulation.run(lambda: sum(group.useful for group in done) >= train or len(done) == issued)
        done.sort(key=lambda group: not group.useful)
        done = done[:train]
    else:
        simulation.run(lambda: len(done) == issued)
    tokens = sum(group.tokens for group in done)
    rollout_s, train_s = simulation.now_s + machine.switch_s, _train_s(machine, tokens, machine.gpus, log_probs)
    generated = [response.generate_s for group in done for response in group.responses]
    return Step(rollout_s + train_s, rollout_s, train_s, sum(group.useful for group in done), tokens, fmean(generated))


def partial(
    machine: Machine, shape: Shape, *, useful: float = 1.0, log_probs: bool = True, steps: int = 6, seed: int = 0
) -> Step:
    """Return means over `steps` steps, after as many that are not counted. Arguments: as for `sync`."""
    player = _Player(machine, machine.gpus, shape, useful, seed)
    player.issue(2 * shape.prompts)
    played = []
    for number in range(2 * steps):
        begin = player.simulation.now_s
        player.simulation.run(lambda: player.ended >= shape.prompts)
        batch, oldest = player.take(number)
        player.simulation.pause(True)
        rollout_s = player.simulation.now_s - begin + machine.switch_s
        tokens = sum(group.tokens for group in batch)
        train_s = _train_s(machine, tokens, machine.gpus, log_probs)
        player.wait(machine.switch_s + train_s)
        player.simulation.pause(False)
        player.version = number + 1
        player.issue(shape.prompts)
        played.append(Step(rollout_s + train_s, rollout_s, train_s, *_sums(batch), oldest))
    return _mean(played[steps:])


def asynchronous(
    machine: Machine,
    shape: Shape,
    *,
    staleness: int,
    rollout_gpus: int,
    useful: float = 1.0,
    log_probs: bool = True,
    steps: int = 6,
    seed: int = 0,
) -> Step:
    """Return means over `steps` steps, after those that use up what was issued at the start.

    Raises:
        ValueError: servers or trainer would have no GPU.
    """
    if not 0 < rollout_gpus < machine.gpus or rollout_gpus % machine.gpus_per_server:
        raise ValueError(
            f"{rollout_gpus} of {machine.gpus} GPUs are for servers of {machine.gpus_per_server} GPUs each; expected "
            "a multiple of that number which leaves some for the trainer."
        )
    player = _Player(machine, rollout_gpus, shape, useful, seed)
    simulation = player.simulation
    player.issue((staleness + 1) * shape.prompts)
    played, skipped = [], steps + STOCK_LASTS * staleness
    for number in range(skipped + steps):
        begin = simulation.now_s
        simulation.run(lambda: player.ended >= shape.prompts)
        batch, oldest = player.take(number)
        rollout_s = simulation.now_s - begin
        train_s = _train_s(machine, sum(group.tokens for group in batch), machine.gpus - rollout_gpus, log_probs)
        player.wait(train_s)
        simulation.pause(True)  # while the servers take weights
        player.wait(machine.switch_s)
        simulation.pause(False)
        player.version = number + 1
        player.issue(shape.prompts)
        played.append(Step(simulation.now_s - begin, rollout_s, train_s + machine.switch_s, *_sums(batch), oldest))
    return _mean(played[skipped:])


class _Player:
    """Rollouts that never end: issues groups, and keeps them until they are trained."""

    def __init__(self, machine: Machine, gpus: int, shape: Shape, useful: float, seed: int):
        self.version = 0
        self.ended = 0  # groups that wait for the trainer
        self._groups: list[Group] = []  # in the order of their issue, until they are trained
        self._shape, self._useful, self._rng = shape, useful, random.Random(seed)
        self.simulation = _simulation(machine, gpus, shape, self._on_group)

    def issue(self, groups: int) -> None:
        for group in draw(self._shape, groups, self._useful, self._rng):
            group.version = self.version
            self._groups.append(group)
            self.simulation.issue(group)

    def _on_group(self, _: Group) -> None:
        self.ended += 1

    def take(self, version: int) -> tuple[list[Group], int]:
        """Return a step's groups, the ended ones that were issued first, and how many versions the oldest is behind."""
        places = [place for place, group in enumerate(self._groups) if not group.open][: self._shape.prompts]
        batch = [self._groups[place] for place in places]
        for place in reversed(places):
            del self._groups[place]
        self.ended -= len(batch)
        return batch, max(version - group.version for group in batch)

    def wait(self, seconds: float) -> None:
        over: list[bool] = []
        self.simulation.after(seconds, lambda: over.append(True))
        self.simulation.run(lambda: bool(over))


def _simulation(machine: Machine, gpus: int, shape: Shape, on_group: Callable[[Group], None]) -> Simulation:
    servers = gpus // machine.gpus_per_server
    return Simulation(servers, machine.speed, workers=machine.workers, tool_s=shape.tool_s, on_group=on_group)


def _train_s(machine: Machine, tokens: float, gpus: int, log_probs: bool) -> float:
    """Return the trainer's seconds: its speed is proportional to its GPUs."""
    per_token = machine.update_s + (machine.log_prob_s if log_probs else 0.0)
    return tokens * per_token * machine.gpus / gpus + machine.other_s


def _sums(batch: list[Group]) -> tuple[int, float, float]:
    responses: list[Response] = [response for group in batch for response in group.responses]
    useful = sum(group.useful for group in batch)
    return useful, sum(group.tokens for group in batch), fmean(response.generate_s for response in responses)


def _mean(steps: list[Step]) -> Step:
    means = [
        fmean(getattr(step, name) for step in steps)
        for name in ("step_s", "rollout_s", "train_s", "useful", "tokens", "generate_s")
    ]
    return Step(*means, oldest=max(step.oldest for step in steps))
