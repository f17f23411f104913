"""A look at files of rows that reads little and imports nothing heavy: for who only wants to know what they are."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from verl_ext.runs import jsonl


def count_rows(files: list[Path]) -> int | None:
    """Rows of parquet files, from their footers; None where one is missing or no parquet."""
    if not files or not all(path.is_file() and path.suffix == ".parquet" for path in files):
        return None
    from verl_ext.runs import parquet  # 0.3 s

    try:
        return sum(map(parquet.count_rows, files))
    except parquet.Unreadable:
        return None


def first_rows(path: Path, columns: list[str], most: int | None) -> Iterator[dict[str, Any]]:
    """Some columns of the first rows (None: of all) of parquet or JSONL; none of a file that cannot be read so."""
    if not path.is_file():
        return
    if path.suffix != ".parquet":
        yield from (row for _, _, row in islice(jsonl.lines(path), most) if isinstance(row, dict))
        return
    from verl_ext.runs import parquet  # 0.3 s

    with suppress(parquet.Unreadable):
        yield from (row for row in islice(parquet.stream(path, columns), most) if row)
