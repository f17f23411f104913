"""Read and write Parquet: a file is written completely or not at all, and errors name an unreadable file.

All Parquet goes through here, except that the viewer queries files with DuckDB, and `datasets` reads the hub's data.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.runs import files

Rows = Iterable[Mapping[str, Any]] | pa.Table
Notes = Mapping[bytes, str] | None
Check = Callable[[Path, pa.Schema], None]
PART = ".tmp"  # suffix of the name of a file being written, after its writer's pid
_CHUNK = 256  # rows per table
_BATCH = 64  # rows in memory at once if a file is read row by row
GROUP_BYTES = 2**24  # of a row group at most, approximately: a reader takes row groups one by one


class Unreadable(ValueError):
    """A file is not Parquet, cut short, or not of the expected form; the message names it."""


def _takes_any(path: Path, schema: pa.Schema) -> None:
    """Accept any columns."""


def write(path: Path, rows: Rows, schema: pa.Schema | None = None, notes: Notes = None, **options: Any) -> int:
    """Write a file completely or not at all. A column that a row lacks is null.

    Args:
        rows: taken a few hundred at a time; tables of them wait until a row group is full.
        schema: of `rows`; a table has its own.
        notes: kept in the file's metadata.
        options: of `pyarrow.parquet.ParquetWriter`.
    Returns:
        The number of rows.
    Raises:
        OSError: the disk is full or read-only; nothing is left of the file.
        pyarrow.ArrowInvalid, pyarrow.ArrowTypeError: a value does not have its column's type.
    """
    if isinstance(rows, pa.Table):
        table = cast(pa.Table, rows)  # pyarrow has no annotations, so the check narrows nothing
        tables = iter([table if schema is None else table.cast(schema)])
        schema = table.schema if schema is None else schema
    else:
        tables = _tables(rows, schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    part, count = path.with_name(f"{path.name}.{os.getpid()}{PART}"), 0
    try:
        with (
            pa.OSFile(str(part), "wb") as file,
            pq.ParquetWriter(file, schema, **options) as writer,
        ):
            writer.add_key_value_metadata(dict(notes or {}))
            for table in _of_groups(tables):
                writer.write_table(table, max(1, len(table) * GROUP_BYTES // max(1, table.nbytes)))
                count += len(table)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return count


def _tables(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    left = iter(rows)
    while chunk := list(itertools.islice(left, _CHUNK)):
        yield pa.Table.from_pylist(chunk, schema=schema)


def _of_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join tables until a row group is full, because each row group has its own pages of every column."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(each.nbytes for each in waiting) >= GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


@contextmanager
def _opened(path: Path, check: Check) -> Iterator[pq.ParquetFile]:
    if what := files.no_file(path):
        raise Unreadable(f"{path} is {what}. Expected a Parquet file. Remove it.")
    try:
        with pq.ParquetFile(path) as file:
            check(path, file.schema_arrow)
            yield file
    except (pa.ArrowException, EOFError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file system's; a damaged footer has no errno
            raise
        raise Unreadable(
            f"{path} cannot be read ({error}). Expected Parquet; the file was truncated or changed after it was "
            "written. Remove it or restore it."
        ) from error


def read(path: Path, columns: Sequence[str] | None = None, check: Check = _takes_any) -> pa.Table:
    """Return the rows of a file.

    Args:
        columns: all by default; a column that the file lacks is left out.
        check: raises Unreadable for a file with other columns.
    Raises:
        Unreadable: it is no regular file, not Parquet, cut short, or refused by `check`.
        FileNotFoundError: it does not exist.
    """
    with _opened(path, check) as file:
        return file.read(columns=None if columns is None else list(columns))


def stream(path: Path, columns: Sequence[str] | None = None, check: Check = _takes_any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, with `_BATCH` rows in memory at a time; see `read`."""
    with _opened(path, check) as file:
        for batch in file.iter_batches(_BATCH, columns=None if columns is None else list(columns)):
            yield from batch.to_pylist()


def batches(path: Path, columns: Sequence[str], size: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number of its first row, batch) of some columns, at most `size` rows at a time. Raises as `read`."""
    with _opened(path, _takes_any) as file:
        start = 0
        for batch in file.iter_batches(size, columns=list(columns)):
            yield start, batch
            start += len(batch)


def columns_of(path: Path) -> pa.Schema:
    """Return names and types of the columns, by the file's footer. Raises as `read`."""
    with _opened(path, _takes_any) as file:
        return file.schema_arrow


def count_rows(path: Path) -> int:
    """Return the number of rows, by the file's footer.

    Raises:
        Unreadable, FileNotFoundError: as `read`.
    """
    with _opened(path, _takes_any) as file:
        return file.metadata.num_rows
