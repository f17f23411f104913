"""Look at files of rows while reading little and importing nothing heavy, for callers that only check what they are."""

import heapq
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.runs import jsonl

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of a sample: from the start of a file, spread over it, and those with the longest texts.
FIRST, SPREAD, LONGEST = 256, 512, 16
MOST_ROWS = 200_000  # of a file, that are measured
MOST_BYTES = 2**26  # of JSON lines, that are parsed
BATCH = 1024  # rows in memory


@dataclass
class Sample:
    """Some rows of a file, in its order."""

    rows: list[tuple[str, dict[str, Any]]]  # (where, row): `where` is the file and its line or row, for messages
    total: int  # rows of the file
    columns: "pa.Schema"


def count_rows(files: list[Path]) -> int | None:
    """Count the rows of parquet (by the footer) or JSONL files (non-empty lines); None if a file cannot be read."""
    if not files or not all(path.is_file() for path in files):
        return None
    from verl_ext.runs import parquet  # 0.3 s

    try:
        return sum(parquet.count_rows(path) if path.suffix == ".parquet" else _count_lines(path) for path in files)
    except parquet.Unreadable:
        return None


def first_rows(path: Path, columns: list[str] | None, most: int | None) -> Iterator[dict[str, Any]]:
    """Yield some columns of the first `most` rows (None: all) of parquet or JSONL; nothing if it cannot be read so."""
    if not path.is_file():
        return
    if path.suffix != ".parquet":
        yield from (row for _, _, row in islice(jsonl.lines(path), most) if isinstance(row, dict))
        return
    from verl_ext.runs import parquet  # 0.3 s

    with suppress(parquet.Unreadable):
        yield from (row for row in islice(parquet.stream(path, columns), most) if row)


def sample(path: Path, text: str, columns: list[str]) -> Sample:
    """Return the first rows of a file, some that are spread over it, and those whose column `text` is longest.

    Args:
        columns: those to read from parquet, `text` among them; one that the file lacks is left out.
    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    if path.suffix == ".parquet":
        return _sample_parquet(path, text, columns)
    from verl_ext.datasets.rows import lines

    total, size = _count_lines(path), 0
    chosen = _Chosen(total)
    for number, (where, row) in enumerate(lines(path)):
        length = len(str(row.get(text)))
        if chosen.wants(number, length):
            chosen.put(number, length, (where, row))
        size += length
        if size > MOST_BYTES:
            break
    rows = chosen.rows()
    return Sample(rows, total, _columns_of([row for _, row in rows]))


def _columns_of(rows: list[dict[str, Any]]) -> "pa.Schema":
    """Return the columns of JSON rows; one whose values have several types, which verl accepts, gets the type null."""
    import pyarrow as pa

    fields = []
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            fields.append((name, pa.array([row.get(name) for row in rows]).type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError):
            fields.append((name, pa.null()))
    return pa.schema(fields)


def _sample_parquet(path: Path, text: str, columns: list[str]) -> Sample:
    from verl_ext.datasets.rows import DataError
    from verl_ext.runs import parquet  # 0.3 s

    try:
        total, schema = parquet.count_rows(path), parquet.columns_of(path)
        chosen = _Chosen(total)
        for start, batch in parquet.batches(path, [name for name in columns if name in schema.names], BATCH):
            lengths = _text_bytes(batch.column(text)) if text in batch.schema.names else [0] * len(batch)
            for i, length in enumerate(lengths):
                if chosen.wants(start + i, length):
                    chosen.put(start + i, length, (f"{path}, row {start + i}", batch.slice(i, 1).to_pylist()[0]))
            if start > MOST_ROWS:
                break
    except parquet.Unreadable as error:
        raise DataError(str(error)) from None
    return Sample(chosen.rows(), total, schema)


class _Chosen:
    """The rows of a sample: those that are chosen by position, and the longest of the others."""

    def __init__(self, total: int):
        self._step = max(1, total // SPREAD)
        self._kept: dict[int, Any] = {}
        self._longest: list[tuple[int, int, Any]] = []  # a heap

    def _is_placed(self, number: int) -> bool:
        return number < FIRST or number % self._step == 0

    def wants(self, number: int, length: int) -> bool:
        is_long = len(self._longest) < LONGEST or length > self._longest[0][0]
        return is_long or self._is_placed(number)

    def put(self, number: int, length: int, row: Any) -> None:
        if self._is_placed(number):
            self._kept[number] = row
        elif len(self._longest) < LONGEST:
            heapq.heappush(self._longest, (length, number, row))
        else:
            heapq.heapreplace(self._longest, (length, number, row))

    def rows(self) -> list[tuple[str, dict[str, Any]]]:
        kept = self._kept | {number: row for _, number, row in self._longest}
        return [kept[number] for number in sorted(kept)]


def _text_bytes(column: "pa.Array") -> list[int]:
    """Return the bytes of all texts of each value, at any depth of lists and structs."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    def measure(array: pa.Array) -> np.ndarray:
        kind = array.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            sizes = pc.fill_null(pc.call_function("binary_length", [array]), 0)
            return sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        if pa.types.is_struct(kind):
            return sum((measure(each) for each in array.flatten()), np.zeros(len(array), np.int64))
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            sums = np.concatenate([[0], np.cumsum(measure(array.flatten()))])
            sizes = pc.fill_null(pc.call_function("list_value_length", [array]), 0).to_numpy(zero_copy_only=False)
            ends = np.cumsum(sizes)
            return sums[ends] - sums[ends - sizes]
        return np.zeros(len(array), np.int64)

    return measure(column).tolist()


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(bool(line.strip()) for line in file)
