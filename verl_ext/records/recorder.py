"""The one writer of a run's records: joins what agent-loop workers, trainer and actor processes report, in any order.

The trainer starts it as a Ray actor (rollout/recorder_actor.py), and nobody waits for it. A
worker reports a group when its last rollout has ended. The trainer reports what a step decided, and the tokens of a
share of the responses; the actor's processes report what the loss had of those tokens. The files of a step are written
when the step has ended and its groups have arrived, at the latest with its checkpoint or a step later. Anything lost or
impossible to write is counted and logged as a warning.
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

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import PromptEnd
from verl_ext.records import store
from verl_ext.records.fates import why, why_left_out
from verl_ext.records.schema import CPU_KEY, LOST_KEY
from verl_ext.records.token_rows import TokenParts, token_table
from verl_ext.runs import parquet
from verl_ext.runs.folder import file_of
from verl_ext.settings import RecorderSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

REST_S = 1.0  # pause after a step without taking a message: a Ray process that waits for one wakes 100 times a second
MAX_OPEN_BYTES = 2 * 2**30  # of groups whose fate is open; beyond it the oldest are dropped


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, all ended, packed by `pack`."""

    uid: str
    step: int
    validate: bool
    packed: bytes  # their rows


@dataclass(frozen=True)
class Fates:
    """What a step or a validation decided; a validation leaves `taken` and `fillers` empty.

    Attributes:
        ends: uid -> end, of the groups that left the queue with this step; None in a validation.
        taken: rollout that a batch took -> its advantage; None if its tokens differ.
        fillers: uids that a batch took because it lacked useful groups.
        left_out: rollout of these groups that is not in the loss -> why.
        light: the validation is a light one.
    """

    step: int
    ends: Mapping[str, PromptEnd | None]
    taken: Mapping[EpisodeKey, float | None]
    fillers: frozenset[str] = frozenset()
    left_out: Mapping[EpisodeKey, str] = field(default_factory=dict)
    validate: bool = False
    light: bool = False


_failed: set[tuple[str, type]] = set()  # failures that this process has already logged


@contextmanager
def costs_nothing(what: str) -> Iterator[None]:
    """Guard code that makes records: a bug in it is logged once and fails neither a rollout nor a step."""
    try:
        yield
    except Exception as error:
        if (what, type(error)) not in _failed:
            _failed.add((what, type(error)))
            logger.exception("A record could not be %s, due to a bug in verl_ext. The run continues without it.", what)


def pack(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the rows as bytes: the recorder then does no work on a group until it is written, and knows its size."""
    return pickle.dumps(list(rows), protocol=pickle.HIGHEST_PROTOCOL)


class Recorder:
    """The recorder; see the module's docstring. Only the disk limits it: it accepts every report, and no call raises.

    Args:
        run: the run's folder.
        rest_s: see REST_S.
    """

    def __init__(self, run: Path, settings: RecorderSettings, rest_s: float = 0.0):
        self._run, self._settings, self._rest_s = run, settings, rest_s
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._bytes = 0
        self._ended: list[Fates] = []  # steps that are not written yet
        self._tokens: dict[int, TokenParts] = {}
        self._texts: dict[int, str] = {}  # token id -> text
        self._written = -1  # newest step
        self._late: set[int] = set()  # steps that were written before all of their losses arrived
        self._missed: set[str] = set()  # uids of groups that had not arrived, or were dropped
        self._cpu_s = -time.process_time()  # including the senders', since the newest file of trajectories
        self.lost = self.unwritten = 0  # groups that never arrived or were dropped; files
        self._failing: set[str] = set()  # what the disk refused at the last try; only the first gets a warning
        self._sizes: dict[int, int] = {}  # as `store.sizes`
        with self._guard("cleaned"):
            self._sizes = store.sizes(run)

    # Reports -------------------------------------------------------------------------------------------------------

    def tell(self, calls: Sequence[tuple[str, tuple]]) -> None:
        """Call several of the methods below by name, in one message: each message costs Ray milliseconds."""
        for method, arguments in calls:
            getattr(self, method)(*arguments)

    def resume(self, step: int) -> None:
        """Forget the records of later steps, which the run repeats. Groups that waited at the step's checkpoint wait
        again; a group that is rolled out again replaces its record."""
        with self._guard("restored"):
            if (removed := store.forget_after(self._run, step)) and step == 0:
                logger.warning(
                    "recorder: the run begins at step 0, so %d files of an earlier start were removed from %s. To keep "
                    "such files, give each new run a separate folder.",
                    *(removed, self._run / store.FOLDER),
                )
        waiting, decided = (store.path_of(self._run, kind, step) for kind in ("waiting", "trajectories"))
        with self._guard("restored"):
            rows = store.read(waiting).to_pylist() if waiting.exists() else []
            for uid, own in itertools.groupby(rows, key=lambda row: row["uid"]):
                self.group(Group(uid, step, False, pack([*own])))
        with self._guard("restored"):
            if decided.exists():  # of a run that finished
                store.rewrite(decided, lambda rows: [row for row in rows if row["outcome"] != PromptEnd.OPEN])
                self._written = step  # `close` puts them back there if no further step comes
            self._sizes = store.sizes(self._run)

    def save(self, step: int) -> None:
        """Keep the groups whose fate is open, for a run that resumes from the step's checkpoint, which is complete.
        Groups whose fate is known are written first, because that run would take them for open."""
        self._write_ended(wait=False)
        rows = (row for group in self._groups.values() if not group.validate for row in pickle.loads(group.packed))
        self._put(store.path_of(self._run, "waiting", step), rows)

    def groups(self, groups: Sequence[Group], cpu_s: float) -> None:
        """Take in several groups. `cpu_s`, here and below: CPU seconds that the sender spent on the report."""
        self._cpu_s += cpu_s
        for group in groups:
            self.group(group)

    def group(self, group: Group) -> None:
        if group.uid in self._missed:  # counted as lost
            return
        if group.uid in self._groups:  # rolled out again
            self._drop(group.uid)
        self._groups[group.uid] = group
        self._bytes += len(group.packed)
        while self._bytes > MAX_OPEN_BYTES:
            self._missed.add(oldest := next(iter(self._groups)))
            self._drop(oldest)
            self._count_lost(1, f"more than {MAX_OPEN_BYTES >> 30} GiB of rollouts waited for their fate")
        self._write_ended()

    def tokens(self, step: int, columns: Mapping[str, Any], texts: Mapping[int, str]) -> None:
        """Take in a batch's recorded responses as the trainer has them; see `TokenParts`. `texts`: of new token ids."""
        self._texts.update(texts)
        self._tokens.setdefault(step, TokenParts()).batches.append(columns)

    def loss(self, step: int, columns: Mapping[str, Any], cpu_s: float) -> None:
        """Take in a micro-batch's recorded responses as the loss had them; see `TokenParts`."""
        self._cpu_s += cpu_s
        if step > self._written:
            self._tokens.setdefault(step, TokenParts()).losses.append(columns)
        elif step not in self._late:
            self._late.add(step)
            logger.warning(
                "recorder: step %d was written before the loss had reported all of its tokens. log_prob, ratio and "
                "decision of the others are null.",
                step,
            )

    def times(self, step: int, intervals: Sequence[Mapping[str, Any]]) -> None:
        """Write the trainer's intervals of a step, whose checkpoint and validation are done."""
        self._put(store.path_of(self._run, "timeline", step), ({"step": step, **each} for each in intervals))
        left_s = max((each["end_s"] or 0.0 for each in intervals), default=0.0) + self._rest_s - time.time()
        time.sleep(min(max(0.0, left_s), self._rest_s))

    def end_step(self, fates: Fates, cpu_s: float) -> None:
        """Take in the fates that a finished step or validation decided."""
        self._cpu_s += cpu_s
        self._ended.append(fates)
        self._write_ended()

    def close(self) -> None:
        """Write all that waits, at the end of the run. Rollouts without a fate are added to the last step, as open."""
        self._write_ended(wait=False)
        ends = {uid: PromptEnd.OPEN for uid, group in self._groups.items() if not group.validate}
        if ends and self._written >= 0:
            path = store.path_of(self._run, "trajectories", self._written)
            with self._guard("written"):
                store.rewrite(path, lambda rows: [*rows, *self._rows(Fates(self._written, ends, {}))])
        if self.lost or self.unwritten:
            logger.warning("recorder: %d groups were lost and %d files were not written.", self.lost, self.unwritten)

    # Writing -------------------------------------------------------------------------------------------------------

    def _write_ended(self, wait: bool = True) -> None:
        while self._ended:
            fates = self._ended[0]
            missing = fates.ends.keys() - self._groups.keys() - self._missed
            if missing and wait and len(self._ended) == 1:
                return
            del self._ended[0]
            if missing:
                self._missed |= missing
                self._count_lost(len(missing), f"their rollouts had not arrived when step {fates.step} was written")
            self._write(fates)

    def _write(self, fates: Fates) -> None:
        step, lost = fates.step, len(fates.ends.keys() - self._groups.keys())
        if fates.validate:  # also problems of which nothing is stored, because all their rollouts raised
            of_it = [uid for uid, group in self._groups.items() if group.validate and group.step <= step]
            fates = Fates(step, dict.fromkeys(of_it), {}, validate=True, light=fates.light)
        else:
            self._written = step
            with self._guard("written"):
                for each in [each for each in self._tokens if each <= step]:
                    table = token_table(each, self._tokens.pop(each), self._texts)
                    self._put(store.path_of(self._run, "tokens", each), table)
        self._cpu_s += (now := time.process_time())
        cpu_s, self._cpu_s = self._cpu_s, -now
        notes = {CPU_KEY: f"{cpu_s:.6f}", LOST_KEY: str(lost)}
        path = store.path_of(self._run, "trajectories", step, validate=fates.validate, light=fates.light)
        self._put(path, self._rows(fates), notes)
        for uid in fates.ends.keys() & self._groups.keys():  # left if the file could not be written
            self._drop(uid)
        with self._guard("cleaned"):
            store.keep(self._run, self._sizes, self._settings)

    def _rows(self, fates: Fates) -> Iterator[dict[str, Any]]:
        """Yield the rows of a step's groups, and drop those groups."""
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
                key = EpisodeKey(uid, row["session"])
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

    def _put(self, path: Path, rows: parquet.Rows, notes: parquet.Notes = None) -> None:
        kind = path.parent.name
        with self._guard("written", kind):
            size = store.write(path, kind, rows, notes)
            if kind != "waiting" and (file := file_of(path)) and not file.validate:
                self._sizes[file.step] = self._sizes.get(file.step, 0) + size

    @contextmanager
    def _guard(self, done: str, kind: str = "") -> Iterator[None]:
        """Keep training going whatever is wrong with a record or a disk; a bug of ours is logged with its traceback."""
        try:
            yield
            self._failing.discard(done + kind)
        except (OSError, parquet.Unreadable) as error:
            self.unwritten += done == "written"
            is_told = bool(self._failing)
            self._failing.add(done + kind)
            if not is_told:
                logger.warning(
                    "recorder: %s cannot be %s (%s). The run continues with gaps in its records. Free some disk space "
                    "or make the folder writable; the next step tries again. Further failures are only counted.",
                    *(self._run / store.FOLDER, done, error),
                )
        except Exception:
            self.unwritten += done == "written"
            logger.exception("recorder: a record could not be %s, due to a bug in verl_ext. The run continues.", done)

    def _count_lost(self, number: int, reason: str) -> None:
        self.lost += number
        logger.warning("recorder: %d groups are not in the records: %s; %d so far.", number, reason, self.lost)
