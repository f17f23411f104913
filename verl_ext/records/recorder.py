"""The one writer of a run's records: joins what agent-loop workers, trainer and actor processes tell it, in any order.

The trainer starts it as a Ray actor (`start`), the others find it by its name (`find`); nobody waits for it. A worker
tells a group when its last rollout has ended, the trainer what a step decided, and of a share of the responses the
tokens, the actor's processes what the loss had of these. Files of a step are written when the step has ended and its
groups are there, at the latest with its checkpoint or a step later. What is lost, or cannot be written, is counted and
warned of.
"""

import itertools
import logging
import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.outcome import PromptEnd
from verl_ext.records import store
from verl_ext.records.fates import why, why_left_out
from verl_ext.records.schema import CPU_KEY, LOST_KEY
from verl_ext.records.token_rows import TokenParts, token_table
from verl_ext.runs import parquet
from verl_ext.settings import RecorderSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

NAME = "retool_recorder"
REST_S = 1.0  # after a step without taking a message: a process of Ray that waits for one wakes 100 times a second
_MAX_OPEN_BYTES = 2 * 2**30  # of groups whose fate is open; beyond it the oldest are forgotten


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, all ended, as `pack` makes them."""

    uid: str
    step: int
    validate: bool
    packed: bytes  # their rows


@dataclass(frozen=True)
class Fates:
    """What a step decided, or a validation, which has `taken` and `fillers` empty.

    Attributes:
        ends: uid -> end, of the groups that have left the queue with this step; None in a validation.
        taken: `{uid}_{session}` of the rollouts that a batch took -> their advantage; None where their tokens differ.
        fillers: uids that a batch took for want of useful groups.
        left_out: `{uid}_{session}` of rollouts of these groups that are not in the loss -> why.
    """

    step: int
    ends: Mapping[str, PromptEnd | None]
    taken: Mapping[str, float | None]
    fillers: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    validate: bool = False


_failed: set[tuple[str, type]] = set()  # what has been warned of in this process


@contextmanager
def costs_nothing(what: str) -> Iterator[None]:
    """Where a run makes records: a bug in it is logged once and fails neither a rollout nor a step."""
    try:
        yield
    except Exception as error:  # whatever it is
        if (what, type(error)) not in _failed:
            _failed.add((what, type(error)))
            logger.exception("A record could not be %s, by an error of verl_ext; the run goes on without it.", what)


def pack(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """As bytes: the recorder has no work with a group until it is written, and knows what it takes of memory."""
    return pickle.dumps(list(rows), protocol=pickle.HIGHEST_PROTOCOL)


class Recorder:
    """See the module's docstring. Only the disk is its limit: whatever is told is accepted, and no call raises.

    Args:
        run: the run's folder.
        rest_s: see REST_S.
    """

    def __init__(self, run: Path, settings: RecorderSettings, rest_s: float = 0.0):
        self._run, self._settings, self._rest_s = run, settings, rest_s
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._bytes = 0
        self._ended: list[Fates] = []  # steps that are not written
        self._tokens: dict[int, TokenParts] = {}
        self._texts: dict[int, str] = {}  # token id -> text
        self._written = -1  # newest step
        self._late: set[int] = set()  # steps that were written before all of their losses came
        self._missed: set[str] = set()  # uids of groups that had not come, or were forgotten
        self._cpu_s = -time.process_time()  # with that of the senders, since the newest file of trajectories
        self.lost = self.unwritten = 0  # groups that never came or were forgotten; files
        self._failing: set[str] = set()  # what the disk did not take at the last try; the first was warned of
        self._sizes: dict[int, int] = {}  # step -> bytes of its files
        with self._guard("cleaned"):
            self._sizes = store.sizes(run)

    # What is told --------------------------------------------------------------------------------------------------

    def tell(self, calls: Sequence[tuple[str, tuple]]) -> None:
        """Several of the methods below, by name, in one message: Ray takes milliseconds for each."""
        for method, arguments in calls:
            getattr(self, method)(*arguments)

    def resume(self, step: int) -> None:
        """Forget what was recorded of later steps, which the run takes again. What waited at the step's checkpoint
        waits again; what rolls out once more replaces it."""
        with self._guard("restored"):
            if (removed := store.forget_after(self._run, step)) and step == 0:
                logger.warning(
                    "recorder: the run begins at step 0: %d files of an earlier start are removed from %s. To keep "
                    "those, give a new run a folder of its own.",
                    *(removed, self._run / store.FOLDER),
                )
        waiting, decided = (store.path_of(self._run, kind, step) for kind in ("waiting", "trajectories"))
        with self._guard("restored"):
            rows = store.read(waiting).to_pylist() if waiting.exists() else []
            for uid, own in itertools.groupby(rows, key=lambda row: row["uid"]):
                self.group(Group(uid, step, False, pack([*own])))
        with self._guard("restored"):
            if decided.exists():  # of a run that came to its end
                store.rewrite(decided, lambda rows: [row for row in rows if row["outcome"] != PromptEnd.OPEN])
                self._written = step  # where `close` puts them back if no further step comes
            self._sizes = store.sizes(self._run)

    def save(self, step: int) -> None:
        """A checkpoint of the step is whole: keep the groups whose fate is open for a run that goes on from it. Those
        whose fate is known are written first, as that run would take them for open."""
        self._write_ended(wait=False)
        rows = (row for group in self._groups.values() if not group.validate for row in pickle.loads(group.packed))
        self._put(step, "waiting", rows)

    def groups(self, groups: Sequence[Group], cpu_s: float) -> None:
        """`cpu_s`: that the sender took for them, as in all that follows."""
        self._cpu_s += cpu_s
        for group in groups:
            self.group(group)

    def group(self, group: Group) -> None:
        if group.uid in self._missed:  # counted as lost
            return
        if group.uid in self._groups:  # rolled out once more
            self._drop(group.uid)
        self._groups[group.uid] = group
        self._bytes += len(group.packed)
        while self._bytes > _MAX_OPEN_BYTES:
            self._missed.add(oldest := next(iter(self._groups)))
            self._drop(oldest)
            self._count_lost(1, f"more than {_MAX_OPEN_BYTES >> 30} GiB of rollouts waited for their fate")
        self._write_ended()

    def tokens(self, step: int, columns: Mapping[str, Any], texts: Mapping[int, str]) -> None:
        """Recorded responses of a batch as the trainer has them: see `TokenParts`. `texts`: of ids that are new."""
        self._texts.update(texts)
        self._tokens.setdefault(step, TokenParts()).batches.append(columns)

    def loss(self, step: int, columns: Mapping[str, Any], cpu_s: float) -> None:
        """Recorded responses of a micro-batch as the loss had them: see `TokenParts`."""
        self._cpu_s += cpu_s
        if step > self._written:
            self._tokens.setdefault(step, TokenParts()).losses.append(columns)
        elif step not in self._late:
            self._late.add(step)
            logger.warning(
                "recorder: step %d was written before all was there that the loss had of its tokens: log_prob, ratio "
                "and decision of the others are null.",
                step,
            )

    def times(self, step: int, intervals: Sequence[Mapping[str, Any]]) -> None:
        """The trainer's intervals of a step, which is over with its checkpoint and validation."""
        self._put(step, "timeline", ({"step": step, **each} for each in intervals))
        left_s = max((each["end_s"] or 0.0 for each in intervals), default=0.0) + self._rest_s - time.time()
        time.sleep(min(max(0.0, left_s), self._rest_s))

    def end_step(self, fates: Fates, cpu_s: float) -> None:
        """A step or a validation is over."""
        self._cpu_s += cpu_s
        self._ended.append(fates)
        self._write_ended()

    def close(self) -> None:
        """The run is over: write all that waits. Rollouts without a fate are added to the last step, as open."""
        self._write_ended(wait=False)
        ends = {uid: PromptEnd.OPEN for uid, group in self._groups.items() if not group.validate}
        if ends and self._written >= 0:
            path = store.path_of(self._run, "trajectories", self._written)
            with self._guard("written"):
                store.rewrite(path, lambda rows: [*rows, *self._rows(Fates(self._written, ends, {}))])
        if self.lost or self.unwritten:
            logger.warning("recorder: %d groups were lost, %d files not written.", self.lost, self.unwritten)

    # What is written -----------------------------------------------------------------------------------------------

    def _write_ended(self, wait: bool = True) -> None:
        while self._ended:
            fates = self._ended[0]
            missing = fates.ends.keys() - self._groups.keys() - self._missed
            if missing and wait and len(self._ended) == 1:
                return
            del self._ended[0]
            if missing:
                self._missed |= missing
                self._count_lost(len(missing), f"their rollouts had not come when step {fates.step} was written")
            self._write(fates)

    def _write(self, fates: Fates) -> None:
        step, lost = fates.step, len(fates.ends.keys() - self._groups.keys())
        if fates.validate:  # also problems of which nothing is stored, as all their rollouts raised
            of_it = [uid for uid, group in self._groups.items() if group.validate and group.step <= step]
            fates = Fates(step, dict.fromkeys(of_it), {}, validate=True)
        else:
            self._written = step
            with self._guard("written"):
                for each in [each for each in self._tokens if each <= step]:
                    self._put(each, "tokens", token_table(each, self._tokens.pop(each), self._texts))
        self._cpu_s += (now := time.process_time())
        cpu_s, self._cpu_s = self._cpu_s, -now
        notes = {CPU_KEY: f"{cpu_s:.6f}", LOST_KEY: str(lost)}
        self._put(step, "trajectories", self._rows(fates), fates.validate, notes)
        for uid in fates.ends.keys() & self._groups.keys():  # of a file that could not be written
            self._drop(uid)
        with self._guard("cleaned"):
            store.keep(self._run, self._sizes, self._settings)

    def _rows(self, fates: Fates) -> Iterator[dict[str, Any]]:
        """Rows of the groups of a step, which are taken."""
        for uid, end in fates.ends.items():
            if uid not in self._groups:
                continue
            rows = pickle.loads(self._drop(uid))
            if end is None:
                yield from rows
                continue
            because = why(end, rows, is_filler=uid in fates.fillers)
            is_taken = end is PromptEnd.TRAINED or uid in fates.fillers
            for row in rows:
                key = f"{uid}_{row['session']}"
                row |= {"outcome": str(end), "outcome_why": fates.left_out.get(key, because)}
                if key in fates.taken:
                    row |= {"trained_step": fates.step, "advantage": fates.taken[key]}
                elif is_taken and key not in fates.left_out:
                    row["outcome_why"] = why_left_out(row)
                yield row

    def _drop(self, uid: str) -> bytes:
        packed = self._groups.pop(uid).packed
        self._bytes -= len(packed)
        return packed

    def _put(
        self, step: int, kind: str, rows: parquet.Rows, validate: bool = False, notes: parquet.Notes = None
    ) -> None:
        path = store.path_of(self._run, kind, step, validate=validate)
        with self._guard("written", kind):
            size = store.write(path, kind, rows, notes)
            if kind != "waiting":
                self._sizes[step] = self._sizes.get(step, 0) + size

    @contextmanager
    def _guard(self, done: str, kind: str = "") -> Iterator[None]:
        """Whatever is wrong with a record or a disk, training goes on: a bug of ours is logged as one."""
        try:
            yield
            self._failing.discard(done + kind)
        except (OSError, parquet.Unreadable) as error:
            self.unwritten += done == "written"
            is_told = bool(self._failing)
            self._failing.add(done + kind)
            if not is_told:
                logger.warning(
                    "recorder: %s cannot be %s (%s); the run goes on, its records have gaps. Make room or make the "
                    "folder writable: the next step is tried again. Further ones are counted, and told at the end.",
                    *(self._run / store.FOLDER, done, error),
                )
        except Exception:
            self.unwritten += done == "written"
            logger.exception("recorder: a record could not be %s, by an error of verl_ext; the run goes on.", done)

    def _count_lost(self, number: int, reason: str) -> None:
        self.lost += number
        logger.warning("recorder: %d groups are not in the records: %s; %d so far.", number, reason, self.lost)


# As an actor ------------------------------------------------------------------------------------------------------


def start(run: Path, settings: RecorderSettings) -> Any:
    """The handle of a new recorder on this machine, where the run's folder is.

    If its process dies, Ray starts another one, and the groups that it had are lost.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Recorder).options(
        name=NAME,
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=here,
        enable_task_events=False,  # a tenth of a message
        runtime_env={"env_vars": {"RAY_event_stats": "0"}},  # a tenth of this process's CPU time
    )
    return actor.remote(run, settings, REST_S)


def find() -> Any:
    """The handle of the run's recorder; None, with a warning, where there is none."""
    import ray

    try:
        return ray.get_actor(NAME)
    except ValueError as error:
        logger.warning("retool.recorder.enable is true, but no recorder was found (%s): nothing is recorded.", error)
        return None


def close(actor: Any) -> None:
    """The run is over: wait until the last files are written, a minute at the most. What is wrong is a warning."""
    import ray

    try:
        ray.get(actor.close.remote(), timeout=60)
    except ray.exceptions.RayError as error:
        logger.warning("recorder: rollouts of the last steps may be missing, as it could not be closed (%s).", error)
