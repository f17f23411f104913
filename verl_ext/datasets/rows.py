"""Read rows one at a time from a parquet or JSONL file, a folder of these, or a data set on the hub; write parquet.

Nothing is held in memory beyond a batch. `field` checks what a row must hold, and names the row and the column.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from verl_ext.runs import jsonl, parquet

if TYPE_CHECKING:
    import datasets

progress_bar = partial(tqdm, delay=2, mininterval=1)  # seconds: quick work shows no bar
_JSON_SUFFIXES = (".jsonl", ".json")


class DataError(ValueError):
    """A source cannot be read or used. If a row is not of the expected form, the message names the row and column."""


def read_rows(source: str, *, split: str = "train", show: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row), `where` being the file and line or row, for messages; show a progress bar.

    Args:
        source: path of a parquet or JSONL file or of a folder of them; else a data set on the hub, owner/name, or
            owner/name/subset if it has several.
        split: the split of the hub's data set.
        show: whether there is a progress bar.
    Raises:
        DataError: there is no such file, and the hub cannot be reached or does not have it; or a line is not a JSON
            object.
    """
    files = _files(source)
    with progress_bar(desc=f"read {source}", unit=" rows", disable=not show) as progress:
        for file in files or [None]:
            for where, row in _hub(source, split) if file is None else _local(file):
                progress.update()
                yield where, row


def field(row: dict[str, Any], column: str, where: str, kind: type | tuple[type, ...] = str) -> Any:
    """Return the value of a column; `reward_model.ground_truth` is a struct's field, `prompt.0.content` a list's.

    Raises:
        DataError: a part is absent, or the value is not of `kind`.
    """
    value: Any = row
    for depth, part in enumerate(column.split(".")):
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            there = f"it has {', '.join(value)}" if isinstance(value, dict) else f"there it has {_shown(value)}"
            path = ".".join(column.split(".")[: depth + 1])
            raise DataError(f"{where}, column {column}: the row has no {path}; {there}.")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not object):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise DataError(f"{where}, column {column}: found {_shown(value)}; expected {kinds}.")
    return value


def write_parquet(rows: Iterable[dict[str, Any]], path: Path, features: "datasets.Features") -> int:
    """Write rows of the given columns and return their number. The file appears when it is complete."""
    return parquet.write(path, progress_bar(rows, desc=f"write {path}", unit=" rows"), features.arrow_schema)


def _files(source: str) -> list[Path]:
    """Return the files of a local source, in order of their names; none if the source is on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".parquet", *_JSON_SUFFIXES))
        if not files:
            raise DataError(f"{source} has no file *.parquet, *.jsonl or *.json. Name a file, or another folder.")
        return files
    if path.is_file():
        if path.suffix not in (".parquet", *_JSON_SUFFIXES):
            raise DataError(f"{source} is neither *.parquet nor *.jsonl. Convert it, or name another file.")
        return [path]
    if path.suffix in (".parquet", *_JSON_SUFFIXES) or source.count("/") not in (1, 2):
        raise DataError(f"{source} does not exist and does not have the form owner/name of a hub data set.")
    return []


def lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of each non-empty line of a JSONL file, as `read_rows` does."""
    for number, line, row in jsonl.lines(file):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        if isinstance(row, ValueError):
            found = _shown(line.decode(errors="replace").strip())
            raise DataError(f"{where}: {row}; found {found}. Expected one JSON object per line.")
        yield where, row


def _local(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.suffix in _JSON_SUFFIXES:
        yield from lines(file)
        return
    try:
        for number, row in enumerate(parquet.stream(file)):
            yield f"{file}, row {number}", row
    except parquet.Unreadable as error:
        raise DataError(str(error)) from None


def _hub(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # 0.8 s

    owner, name, *subset = source.split("/")
    try:
        table = datasets.load_dataset(f"{owner}/{name}", *subset, split=split, streaming=True)
    except (OSError, ValueError) as error:  # no network, no such data set, no such split
        raise DataError(
            f"{source} cannot be read: {error}\nIt is not a file here, and the hub did not deliver it. Download it on "
            "a machine with a network, and name the parquet or JSONL file instead."
        ) from None
    for number, row in enumerate(table):
        yield f"{source}, row {number}", row


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
