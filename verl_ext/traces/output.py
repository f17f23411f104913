"""What a check holds on disk until its end, and the files that it writes: the kept traces, and a line for each other.

All files appear when they are complete. Memory holds a bounded number of traces, however many there are.
"""

import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from verl_ext.records.problem import canonical
from verl_ext.reward.votes import vote
from verl_ext.runs import jsonl, parquet
from verl_ext.traces.trace import LeftOut, Reason, Trace

if TYPE_CHECKING:
    from verl_ext.traces.gate import Checked  # seconds to import

NOTES = b"retool_traces"  # of the file's metadata: settings, versions, counts
COLUMNS = ("messages", "tools", "id", "source", "problem", "data_source", "ability")
COLUMNS += ("ground_truth", "extra_info", "about")
SCHEMA = pa.schema({name: pa.string() for name in COLUMNS})  # `messages`, `tools`, `extra_info`, `about` are JSON

MOST_SOURCES = 6  # with a column in the table
_TABLES = """
CREATE TABLE passed (number INTEGER PRIMARY KEY, problem TEXT, source TEXT, row TEXT, text TEXT, codes TEXT,
                     reason TEXT, detail TEXT);
CREATE TABLE other (number INTEGER PRIMARY KEY, reason TEXT, line TEXT);
CREATE TABLE answers (problem TEXT, vote TEXT, said TEXT, is_right INTEGER, question TEXT, gold TEXT);
"""
_INDEXES = "CREATE INDEX of_problem ON passed (problem, number); CREATE INDEX of_answers ON answers (problem);"


class Spool:
    """The checked traces on disk, in the order of their numbers, until it is known which of them are kept."""

    def __init__(self, file: Path):
        self._db = sqlite3.connect(file, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(_TABLES)
        self._db.execute("BEGIN")

    def add(self, number: int, checked: "Checked") -> None:
        """Note a trace, and what its answer votes for."""
        trace, score = checked.trace, checked.score
        key = trace.problem_key
        if score is not None and score.acc is not None and (voted := vote(score.pred, score.normalised, score.acc)):
            gold = None if trace.gold is None else canonical(trace.gold)
            answer = (key, repr(voted), score.pred, int(score.acc >= 1.0), trace.problem, gold)
            self._db.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", _texts(answer))
        if checked.left is not None:
            self.leave_out(number, trace.id, trace.source, checked.left, trace)
            return
        row, codes = jsonl.dumps(row_of(trace)), jsonl.dumps(checked.codes)
        values = (number, key, trace.source, row, checked.text, codes)
        self._db.execute("INSERT INTO passed VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)", _texts(values))

    def leave_out(self, number: int, name: str, source: str, why: LeftOut, trace: Trace | None = None) -> None:
        line = _line(name, source, why, trace.problem if trace else None, trace.messages if trace else None)
        self._db.execute("INSERT INTO other VALUES (?, ?, ?)", (number, str(why.reason), line))

    def by_problem(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the traces of each problem that are left: {number, source, text, codes}, in their order."""
        self._db.executescript(f"{_INDEXES} BEGIN;")
        columns = ("problem", "number", "source", "text", "codes")
        cursor = self._db.execute(f"SELECT {', '.join(columns)} FROM passed ORDER BY problem, number")
        problem, found = None, list[dict[str, Any]]()
        for values in cursor:
            row = dict(zip(columns, values, strict=True))
            if row["problem"] != problem and found:
                yield found
                found = []
            problem = row["problem"]
            found.append(row | {"codes": json.loads(row["codes"])})
        if found:
            yield found

    def answers(self, problem: str) -> list[dict[str, Any]]:
        """Return how often each answer was given to a problem: {said, is_right, count}, most often first."""
        sql = "SELECT min(said), max(is_right), count(*), min(question), min(gold) FROM answers WHERE problem = ?"
        rows = self._db.execute(f"{sql} GROUP BY vote ORDER BY count(*) DESC, min(said)", (problem,))
        return [dict(zip(("said", "is_right", "count", "question", "gold"), row, strict=True)) for row in rows]

    def problems(self) -> Iterator[str]:
        """Yield all problems that have an answer."""
        yield from (row[0] for row in self._db.execute("SELECT DISTINCT problem FROM answers ORDER BY problem"))

    def drop(self, number: int, why: LeftOut) -> None:
        """Leave out a trace that had passed."""
        sql = "UPDATE passed SET reason = ?, detail = ? WHERE number = ?"
        self._db.execute(sql, (str(why.reason), why.detail, number))

    def kept_by_source(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for source, number in self._db.execute(
            "SELECT source, number FROM passed WHERE reason IS NULL ORDER BY number"
        ):
            found.setdefault(source, []).append(number)
        return found

    def kept(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the kept traces, in order."""
        for (row,) in self._db.execute("SELECT row FROM passed WHERE reason IS NULL ORDER BY number"):
            yield json.loads(row)

    def left_out(self, reason: Reason | None = None) -> Iterator[str]:
        """Yield the line of each other trace, in order; only of one reason, if it is given."""
        wanted = "WHERE reason = coalesce(:reason, reason)"  # without those that are kept, whose reason is null
        sql = f"SELECT number, reason, NULL, line FROM other {wanted} UNION ALL"
        sql += f" SELECT number, reason, detail, row FROM passed {wanted} ORDER BY number"
        for _, found, detail, text in self._db.execute(sql, {"reason": reason and str(reason)}):
            if detail is None:
                yield text
                continue
            row = json.loads(text)
            why = LeftOut(Reason(found), detail)
            yield _line(row["id"], row["source"], why, row["problem"], json.loads(row["messages"]))

    def counts(self) -> dict[str, Counter[str]]:
        """Return source -> how many traces are "kept" or left out, by reason."""
        found: dict[str, Counter[str]] = {}
        for source, reason, count in self._db.execute("SELECT source, reason, count(*) FROM passed GROUP BY 1, 2"):
            found.setdefault(source, Counter())[reason or "kept"] += count
        sql = "SELECT json_extract(line, '$.source'), reason, count(*) FROM other GROUP BY 1, 2"
        for source, reason, count in self._db.execute(sql):
            found.setdefault(source, Counter())[reason] += count
        return found

    def close(self) -> None:
        self._db.close()


@contextmanager
def spooled(out: Path) -> Iterator[Spool]:
    """Give a spool in a folder next to `out`, which is removed, as are those of processes that were killed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.stem}.*.spool"):
        if not Path("/proc", left.name.split(".")[-2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}.", suffix=f".{os.getpid()}.spool") as folder:
        spool = Spool(Path(folder) / "traces.sqlite")
        try:
            yield spool
        finally:
            spool.close()


def row_of(trace: Trace) -> dict[str, Any]:
    """Return a row of a file of traces. Lone surrogates, which no file takes, are spelled out."""
    about, gold = dict(trace.about), trace.gold
    if gold is not None and not isinstance(gold, str):
        about["ground_truth"] = gold
    extra = trace.task.get("extra_info")
    row = {
        "messages": jsonl.dumps(trace.messages),
        "tools": None if trace.tools is None else jsonl.dumps(trace.tools),
        "id": trace.id,
        "source": trace.source,
        "problem": trace.problem,
        "data_source": trace.task.get("data_source") or "",
        "ability": trace.task.get("ability") or "",
        "ground_truth": None if gold is None else canonical(gold),
        "extra_info": None if extra is None else canonical(extra),
        "about": canonical(about),
    }
    return dict(zip(row, _texts(row.values()), strict=True))


def write_kept(rows: Iterable[Mapping[str, Any]], out: Path, notes: Mapping[str, Any]) -> int:
    """Write the kept traces; return their number."""
    return parquet.write(out, rows, SCHEMA.with_metadata({NOTES: json.dumps(notes, default=str)}))


def write_lines(lines: Iterable[str], path: Path) -> None:
    """Write lines into a file that appears when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def beside(out: Path, kind: str) -> Path:
    """Return the path of another file of the same check, such as OUT.left_out.jsonl."""
    return out.with_name(f"{out.name.removesuffix('.parquet')}.{kind}")


def table(counts: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Return how many traces are kept and left out: a row for each reason that occurs, a column for each source
    unless there are too many."""
    total: Counter[str] = sum((Counter(each) for each in counts.values()), Counter())
    columns = {"all": total, **counts} if 1 < len(counts) <= MOST_SOURCES else {"traces": total}
    rows = [["", *(name if len(name) <= 30 else f"…{name[-29:]}" for name in columns)]]
    for name in ("kept", *Reason):
        if total[name] or name == "kept":
            rows.append([str(name), *(f"{each.get(name, 0):,}" for each in columns.values())])
    return rows


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as lines of text."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    sides = ["<", *">" * (len(widths) - 1)]
    padded = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _line(name: str, source: str, why: LeftOut, problem: str | None, messages: Any) -> str:
    line = {"id": name, "source": source, "reason": str(why.reason), "detail": why.detail}
    return jsonl.dumps(line | {"problem": problem, "messages": messages})


def _texts(values: Iterable[Any]) -> list[Any]:
    """Return values with lone surrogates spelled out, which neither SQLite nor Arrow takes."""
    return [v.encode("utf-8", "backslashreplace").decode() if isinstance(v, str) else v for v in values]
