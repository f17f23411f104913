"""Read traces: files in any form that protocols/trace.py understands, and folders with a run's records."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_ext.datasets.rows import DataError, read_rows
from verl_ext.protocols.trace import explicit
from verl_ext.runs.folder import FOLDER, training_folder
from verl_ext.traces.from_records import read_run
from verl_ext.traces.trace import LeftOut, Reason, Trace, Unread

_GOLDS = ("ground_truth", "answer")  # columns, besides verl's `reward_model`


def read_traces(source: str, *, split: str = "train") -> Iterator[Trace | Unread]:
    """Yield a trace for each row of a source, or why it is none.

    Args:
        source: a parquet or JSONL file, a folder of them, a data set of the hub; or the folder of a run with records.
        split: of the hub's data set.
    Raises:
        DataError: it cannot be read, or a row has no column `messages`.
    """
    if (Path(source) / FOLDER).is_dir():
        yield from read_run(training_folder(Path(source), "rl", "evaluation"))
        return
    for where, row in read_rows(source, split=split, show=False):
        if "messages" not in row:
            raise DataError(f"{where}: a trace needs a column messages; the row has {', '.join(row)}.")
        name = str(row["id"]) if row.get("id") is not None else where.rpartition(", ")[2]
        try:
            yield _trace(row, name, str(row.get("source") or source))
        except ValueError as error:
            yield Unread(name, source, LeftOut(Reason.NOT_A_TRACE, str(error)))


def _trace(row: Mapping[str, Any], name: str, source: str) -> Trace:
    about, info = _object(row, "about"), _object(row, "extra_info")
    gold = _object(row, "reward_model").get("ground_truth")
    gold = gold if gold is not None else next((row[each] for each in _GOLDS if row.get(each) is not None), None)
    gold = about.pop("ground_truth", gold)  # of a kept file, if it is no text
    task = {
        "data_source": _text(row, "data_source"),
        "ability": _text(row, "ability"),
        "reward_model": {"ground_truth": gold},
        "extra_info": info or None,
    }
    if kwargs := _object(row, "tools_kwargs") or info.get("tools_kwargs"):  # verl's data set takes them from there
        task["tools_kwargs"] = kwargs
    tools = _json(row, "tools") or None
    return Trace(name, source, explicit(row["messages"], tools), tools, task, about)


def _object(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return the object in a column, {} if there is none."""
    value = _json(row, column)
    if not isinstance(value, dict | None):
        raise ValueError(f"{column} is {value!r:.80}; expected an object")
    return dict(value or {})


def _json(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, also if it is JSON text."""
    value = row.get(column)
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except ValueError as error:
        raise ValueError(f"{column} is {value!r:.80}; expected JSON ({error})") from error


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | None):
        raise ValueError(f"{column} is {value!r:.80}; expected text")
    return value or ""
