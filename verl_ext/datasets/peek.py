"""A look at files of rows that reads little and imports nothing heavy: for who only wants to know what they are."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any


def count_rows(files: list[Path]) -> int | None:
    """Rows of parquet files, from their footers; None where one is missing or no parquet."""
    if not files or not all(path.is_file() and path.suffix == ".parquet" for path in files):
        return None
    import pyarrow.parquet  # 0.3 s

    try:
        return sum(pyarrow.parquet.read_metadata(path).num_rows for path in files)
    except pyarrow.ArrowInvalid:
        return None


def first_rows(path: Path, columns: list[str], most: int | None) -> Iterator[dict[str, Any]]:
    """Some columns of the first rows (None: of all) of parquet or JSONL; none of a file that cannot be read so."""
    if not path.is_file():
        return
    if path.suffix != ".parquet":
        with path.open(encoding="utf-8") as lines, suppress(ValueError):  # told when all rows are read
            yield from (row for line in islice(lines, most) if isinstance(row := json.loads(line), dict))
        return
    import pyarrow.parquet  # 0.3 s

    with suppress(pyarrow.ArrowInvalid):
        table = pyarrow.parquet.ParquetFile(path)
        there = [name for name in columns if name in table.schema_arrow.names]
        batches = table.iter_batches(batch_size=most or 65536, columns=there) if there else ()
        for batch in islice(batches, most and 1):
            yield from batch.to_pylist()
