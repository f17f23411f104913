"""Query the records of a run: SQL over its Parquet files, by DuckDB. A file that cannot be read is named.

Columns: verl_ext/records/schema.py. The `key` of a file is its name without suffix, "step_000017", "val_000020", or
"light_000020" of a light validation.
"""

import functools
import glob
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

from verl_ext.outcome import RolloutEnd
from verl_ext.records import store
from verl_ext.records.schema import LOST_KEY, TRAJECTORIES
from verl_ext.runs import parquet
from verl_ext.runs.files import no_file
from verl_ext.runs.folder import NoRun, find_run, training_folder
from verl_ext.runs.metrics import Metrics, read_metrics

LIGHT = (  # all except the long texts
    "key, uid, session, index, problem, id, domain, score, acc, outcome, outcome_why,"
    " end_reason, exception, len(calls) AS num_calls, coalesce(verdict.normalised, verdict.extracted) AS answer"
)
FILES = (  # a sweep's folder `domain=math` is not a column
    "SELECT * EXCLUDE filename, parse_filename(filename, true) AS key"
    " FROM read_parquet($paths, filename=true, hive_partitioning=false, union_by_name=true)"
)
PAGE = 200  # groups on a page
MAX_TRIES = 3  # of a query that fails although none of its files makes it fail
REMOVE = "Remove it, or restore it."
# The database is in memory, has a bounded size, writes no file, and fetches nothing from anywhere.
DATABASE = {"memory_limit": "400MB", "threads": 2, "preserve_insertion_order": True, "temp_directory": ""}
_OPENING = threading.Lock()
DATABASE |= dict.fromkeys(("autoinstall_known_extensions", "autoload_known_extensions"), False)

_PARTS = {  # column -> names within
    name: [part.name for part in TRAJECTORIES.field(name).type.value_type]
    for name in ("turns", "calls", "version_spans")
}
State = tuple[Path, int, int]  # of a file: path, time of its last change (ns), bytes


def state_of(path: Path) -> State | None:
    """Return a file's state; None if it is gone, because retention and a resume may remove files meanwhile."""
    try:
        return path, (found := path.stat()).st_mtime_ns, found.st_size
    except OSError:
        return None


def without_holes(row: dict[str, Any]) -> dict[str, Any]:
    """Return a rollout in whose lists every turn, call and span is a struct, of nulls where the file has null or, as an
    older one, nothing; so is a column that the file lacks."""
    parts = {name: [dict.fromkeys(names) | (each or {}) for each in row[name] or []] for name, names in _PARTS.items()}
    return dict.fromkeys(TRAJECTORIES.names) | row | parts


def step_of(key: str) -> int:
    return int(key.partition("_")[2])


def is_validation(key: str) -> bool:
    return not key.startswith("step")


def label(key: str) -> str:
    """Return a page's name for a file of records: "Step 3", "Validation, step 3" or "Light validation, step 3"."""
    kinds = {"step": "Step", "val": "Validation, step", "light": "Light validation, step"}
    return f"{kinds[key.partition('_')[0]]} {step_of(key)}"


@functools.cache
def _connect() -> duckdb.DuckDBPyConnection:
    return duckdb.connect(config=DATABASE)


def database() -> duckdb.DuckDBPyConnection:
    """Return the one database of all runs and concurrent requests, which bounds the memory. A database that a damaged
    file has ended is replaced."""
    with _OPENING:
        try:
            _connect().cursor().execute("SELECT 1")
        except duckdb.Error:
            _connect.cache_clear()
        return _connect()


def _rows(
    database: duckdb.DuckDBPyConnection, sql: str, values: dict[str, Any], paths: Iterable[Path]
) -> list[dict[str, Any]]:
    cursor = database.cursor()
    escaped = [glob.escape(str(path)) for path in paths]
    cursor.execute(f"WITH records AS ({FILES}) {sql}", {"paths": escaped, **values})
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


class Run:
    """A run's folder: its metrics and its records.

    Attributes:
        is_evaluation: it has samples of one model, and no curves.

    Raises:
        NoRun: the folder holds no training run and no evaluation.
    """

    def __init__(self, folder: Path, name: str, number: int):
        self._named, self._folder = folder, training_folder(folder, "rl", "sft", "evaluation")
        self.is_evaluation = find_run(self._folder).kind == "evaluation"
        self.name, self.number = name, number
        self._broken: dict[State | None, str | None] = {}  # what is wrong with a file
        self._lost: dict[Path, int] = {}  # groups that a file notes as lost
        self._metrics: tuple[Any, Metrics, list[str]] = None, Metrics({}, set()), []  # set by `metrics`

    @property
    def folder(self) -> Path:
        """Return the folder to read; for a quickstart's SFT run, its RL run once it exists."""
        if self._folder == self._named / "sft":
            with suppress(NoRun, ValueError):  # a config that cannot be read: the next call tries again
                self._folder = training_folder(self._named, "rl")
        return self._folder

    def files(self, kind: str = "trajectories") -> dict[str, Path]:
        """Return key -> path of the undamaged files of a kind, by step."""
        paths = [file.path for file in store.files_of(self.folder, kind)]
        return {path.stem: path for path in paths if self._fault_of(path) is None}

    def broken(self) -> list[str]:
        """Return what is wrong with each file that cannot be read, and what the records lack."""
        faults = [fault for _, fault in self.faults("*")]
        self.metrics()
        return faults + self._metrics[2] + list(self._gaps())

    def _gaps(self) -> Iterator[str]:
        files = store.files_of(self.folder)
        if lost := sum(self._lost.get(file.path, 0) for file in files):
            yield f"{self.folder} has no records of {lost} groups, which the recorder lost. The run's log says why."
        recorded = {file.step for file in files if not file.validate}
        oldest = min(recorded, default=math.inf)  # retention removes older ones
        steps = self._metrics[1].curve("timing_s/step")[0][:-2]  # the newest may not have been written yet
        if gaps := [step for step in steps if oldest < step and step not in recorded]:
            what = f"{self.folder} has metrics but no records of {len(gaps)} steps from {gaps[0]} to {gaps[-1]}."
            yield f"{what} The run's log says why, unless the run was restarted and repeats these steps."

    def faults(self, kind: str = "trajectories") -> list[tuple[str, str]]:
        """Return (key, what is wrong) for each file of a kind that cannot be read."""
        paths = [file.path for file in store.files_of(self.folder, kind)]
        return [(path.stem, fault) for path in paths if (fault := self._fault_of(path))]

    def _fault_of(self, path: Path, columns: Sequence[str] | None = ()) -> str | None:
        """Return what is wrong with a file, "" if it is gone; by its footer, or, with `columns=None`, by all of it."""
        try:
            if what := no_file(path):
                return f"{path} is {what}, not a file of records."
        except OSError as error:
            return "" if isinstance(error, FileNotFoundError) else f"{path} cannot be read ({error})."
        state = state_of(path)
        if state is None or state not in self._broken or (columns is None and not self._broken.get(state)):
            try:
                self._lost[path] = int((store.read(path, columns).schema.metadata or {}).get(LOST_KEY, 0))
                fault = None
            except FileNotFoundError:
                return ""
            except parquet.Unreadable as error:
                fault = str(error)
            except OSError as error:  # it may pass: the next call tries again
                self._broken.pop(state, None)
                return f"{path} cannot be read ({error})."
            self._broken[state] = fault
        return self._broken.get(state)  # another request may have taken it out

    def ask(
        self, sql: str, values: dict[str, Any] | None = None, kind: str = "trajectories", keys: Any = None
    ) -> list[dict[str, Any]]:
        """Return the rows of a query FROM records, the files of `keys` (all by default); [] if there is no file.

        A column `key` names the file. A file that proves to be damaged is left out, and is in `broken` from then on.

        Args:
            values: of each `$name` in the query.
        Raises:
            duckdb.OutOfMemoryException: it needs more than DATABASE allows.
        """
        files, values = self.files(kind), values or {}
        files = {key: path for key, path in files.items() if keys is None or key in keys}
        tries = MAX_TRIES
        while files:
            try:
                return _rows(database(), sql, values, files.values())
            except duckdb.OutOfMemoryException:
                raise
            except (duckdb.Error, UnicodeDecodeError):
                left = {key: path for key, path in files.items() if self._fault_of(path, None) is None}
                if left == files:
                    left = {key: path for key, path in files.items() if self._is_answered(sql, values, path)}
                tries -= left == files  # a file of another request may have ended the database
                if not tries:
                    raise
                files = left
        return []

    def _is_answered(self, sql: str, values: dict[str, Any], path: Path) -> bool:
        """Return whether a query works on one file; it uses a separate database, because the file may end it."""
        try:
            with duckdb.connect(config=DATABASE) as database:
                _rows(database, sql, values, [path])
        except (duckdb.OutOfMemoryException, duckdb.BinderException, duckdb.ParserException):
            return True  # the query's fault
        except (duckdb.Error, UnicodeDecodeError) as error:
            why = str(error).partition("\n")[0]
            self._broken[state_of(path)] = (
                f"{path} cannot be read ({why}). It was changed after it was written. {REMOVE}"
            )
            return False
        return True

    def rows(self, key: str) -> Iterator[dict[str, Any]]:
        """Yield the rollouts of a file, with its `key`, a few in memory at a time; what follows damage is left out."""
        if (path := self.files().get(key)) is None:
            return
        try:
            for row in store.stream(path):
                yield without_holes(row) | {"key": key}
        except FileNotFoundError:  # removed by retention or a resume since it was listed
            return
        except parquet.Unreadable as error:
            self._broken[state_of(path)] = str(error)

    def metrics(self) -> Metrics:
        """Return the run's curves, as all commands read them; a line that is still being written is left for later."""
        states = {path: state_of(path) for path in sorted(self.folder.glob("metrics*.jsonl"))}
        if self._metrics[0] != states:
            faults: dict[Path, Exception] = {}
            try:
                found = read_metrics([*states])
            except (ValueError, OSError):
                faults = {path: error for path in states if (error := _metrics_fault(path))}
                found = read_metrics([path for path in states if path not in faults])
            passing = any(isinstance(error, OSError) for error in faults.values())
            said = [f"{path} is not shown: {error}" for path, error in faults.items()]
            self._metrics = None if passing else states, found, said
        return self._metrics[1]

    def state(self) -> list[Any]:
        """Return a value that changes if a file of the run appears or grows; an open page polls it."""
        paths = [*(self.folder / store.FOLDER).glob("*/"), *self.folder.glob("metrics*.jsonl")]
        return [str(state_of(path)) for path in paths]  # a folder's time changes with its files' names


def _metrics_fault(path: Path) -> Exception | None:
    try:
        read_metrics([path])
    except (ValueError, OSError) as error:
        return error


MARKS = {
    "wrong": ("wrong", "acc = 0"),
    "failed": ("with a failed call", "len(list_filter(calls, lambda c: c.fault IS NOT NULL)) > 0"),
    "out": ("left out of every batch", "NOT validate AND trained_step IS NULL AND outcome <> 'open'"),
    "cut": ("cut by the budget", f"end_reason = '{RolloutEnd.MAX_TOKENS}'"),
}  # name in a page's address -> description of a rollout, condition
FILTERS = {
    "outcome": "outcome = $outcome",
    "end": "end_reason = $end",
    "domain": "domain = $domain",
    # what ended the rollout, or what a program raised, by the last line of a traceback; "ok" is no exception
    "exception": "(contains(exception, $exception) OR"
    " len(list_filter(calls, lambda c: c.fault IS NOT NULL AND (contains(c.status, $exception) OR"
    " contains(regexp_extract(c.stderr, '([^\n]*)\\s*$', 1), $exception)))) > 0)",
    "text": "(contains(prompt, $text) OR len(list_filter(turns, lambda t: contains(t.text, $text))) > 0"
    " OR len(list_filter(calls, lambda c: contains(c.code, $text) OR contains(c.stdout, $text)"
    " OR contains(c.stderr, $text))) > 0)",  # JSON escapes the code of a call in the turn's text
    **{name: f"${name} <> '' AND {condition}" for name, (_, condition) in MARKS.items()},
}  # name in a page's address -> condition on a rollout
_SCORES = "score) FILTER (abs(score) < 1e100)"  # as in group.spread: the square of others is not finite
SORTS = {
    "": ("order of the data", "key, first, uid"),
    "low": ("lowest mean score first", f"avg({_SCORES} ASC NULLS LAST, key, first, uid"),
    "high": ("highest mean score first", f"avg({_SCORES} DESC NULLS LAST, key, first, uid"),
    "spread": ("largest spread first", f"stddev_samp({_SCORES} DESC NULLS LAST, key, first, uid"),
}  # value of `sort` in a page's address -> label, ORDER BY


def groups(run: Run, keys: list[str] | None, filters: dict[str, str], page: int = 0, sort: str = "") -> dict[str, Any]:
    """Return PAGE of the groups with a rollout that meets the filters, and how many rollouts and groups do.

    Args:
        sort: of SORTS, over all rollouts of a group.
    Returns:
        `rollouts`, `groups`: how many meet the filters; `total`: rollouts; `shown`: a list of {key, uid, prompt,
        rollouts}, where each rollout has the columns LIGHT and `hit`.
    """
    where = " AND ".join(f"({FILTERS[name]})" for name in filters) or "TRUE"
    of_each = f"SELECT key, uid, count(*) AS n, count(*) FILTER ({where}) AS hits, min(index) AS first FROM records"
    everything = run.ask(f"{of_each} GROUP BY key, uid ORDER BY {SORTS[sort][1]}", filters, keys=keys)
    found = [group for group in everything if group["hits"]]
    wanted = found[page * PAGE : (page + 1) * PAGE]
    rows = f"SELECT {LIGHT}, coalesce({where}, FALSE) AS hit FROM records WHERE uid IN (SELECT unnest($uids))"
    prompts = (
        "SELECT key, uid, any_value(prompt) AS prompt FROM records WHERE uid IN (SELECT unnest($uids)) GROUP BY ALL"
    )
    members = run.ask(
        f"SELECT key, uid, prompt, list(row ORDER BY session) AS rollouts FROM ({rows}) AS row"
        f" LEFT JOIN ({prompts}) USING (key, uid) GROUP BY ALL",
        filters | {"uids": [group["uid"] for group in wanted]},
        keys=sorted({group["key"] for group in wanted}),
    )
    by_name = {(group["key"], group["uid"]): group for group in members}
    return {
        "rollouts": sum(group["hits"] for group in found),
        "groups": len(found),
        "total": sum(group["n"] for group in everything),
        "shown": [by_name[name] for group in wanted if (name := (group["key"], group["uid"])) in by_name],
    }


def choices(run: Run, keys: list[str] | None) -> dict[str, list[str]]:
    """Return the values that each filter offers."""
    columns = {"outcome": "outcome", "end": "end_reason", "domain": "domain"}
    found = run.ask(f"SELECT DISTINCT {', '.join(columns.values())} FROM records", keys=keys)
    return {name: sorted({row[column] for row in found if row[column]}) for name, column in columns.items()}
