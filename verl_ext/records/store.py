"""Write, list and read a run's records: Parquet files, one per step and kind, each written whole or not at all.

Columns: schema.py. To read, use `tables` or `rows`: they name a file that cannot be read, and read the others.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.records.schema import ADDED, ADDED_WITHIN, CPU_KEY, LOST_KEY, SCHEMAS, VERSION, VERSION_KEY
from verl_ext.runs import parquet
from verl_ext.runs.folder import FOLDER, RecordFile, files_of, path_of
from verl_ext.settings import RecorderSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

# Columns that are most of a file
_LONG = (
    "prompt",
    "opening",
    "task",
    "text",
    "shown",
    "code",
    "stdout",
    "stderr",
    "reward_parts",
    "tool_use",
    "evidence",
    "agent",
)
_OF_STEPS = tuple(kind for kind in SCHEMAS if kind != "waiting")


def _options(schema: pa.Schema) -> dict[str, Any]:
    """Return the options for writing a file. Each of 60 columns has a fixed cost: with zstd for all, statistics and
    dictionaries, a step of 256 short rollouts took twice as long. Nobody reads statistics: a file holds one step.
    """
    pq.write_table(schema.empty_table(), empty := pa.BufferOutputStream())
    columns = pq.ParquetFile(empty.getvalue()).schema
    codecs = {each.path: "lz4" if set(_LONG).isdisjoint(each.path.split(".")) else "zstd" for each in columns}
    repeated = ["uid", "text", "decision"] if schema == SCHEMAS["tokens"] else False
    return {"compression": codecs, "use_dictionary": repeated, "write_statistics": False, "store_schema": False}


_OPTIONS = {kind: _options(schema) for kind, schema in SCHEMAS.items()}


def write(path: Path, kind: str, rows: parquet.Rows, notes: parquet.Notes = None) -> int:
    """Write a file as `parquet.write` does, with the columns of the kind. Returns its size in bytes."""
    parquet.write(path, rows, SCHEMAS[kind], {VERSION_KEY: VERSION} | dict(notes or {}), **_OPTIONS[kind])
    return path.stat().st_size


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], Iterable[Mapping[str, Any]]]) -> None:
    """Rewrite a file of trajectories with the rows that `change` makes of its present ones."""
    table = read(path) if path.exists() else SCHEMAS["trajectories"].empty_table()
    notes = {name: value for name, value in (table.schema.metadata or {}).items() if name in (CPU_KEY, LOST_KEY)}
    write(path, "trajectories", change(table.to_pylist()), notes)


def _check(path: Path, schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != VERSION:
        older = " Read them with the release of verl-retool that wrote them." if version in ("1", "2") else ""
        raise parquet.Unreadable(f"{path} has records of version {version}; expected {VERSION}.{older}")
    known = SCHEMAS.get(path.parent.name)  # None if the file was moved elsewhere
    types = {field.name: field.type for field in schema}
    types = ADDED | types
    if lacks := [field.name for field in known or () if types.get(field.name) not in (field.type, _older(field))]:
        raise parquet.Unreadable(
            f"{path} lacks columns of version {VERSION}, or they have another type: {', '.join(lacks)}."
        )


def _older(field: pa.Field) -> pa.DataType:
    """Return the type that a column had before fields were added to its structs."""
    if not (added := ADDED_WITHIN.get(field.name)):
        return field.type
    return pa.list_(pa.struct([part for part in field.type.value_type if part.name not in added]))


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file as `parquet.read` does; also raises Unreadable for a file of another version. What an older
    file lacks, of ADDED and ADDED_WITHIN, is left out."""
    return parquet.read(path, columns, _check)


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, all columns, with a few rows in memory at a time; raises as `read` does."""
    return parquet.stream(path, check=_check)


def tables(
    run: Path, kind: str = "trajectories", columns: Sequence[str] | None = None
) -> Iterator[tuple[RecordFile, pa.Table]]:
    """Yield the readable files of a kind, by step. A warning names each one that cannot be read."""
    for file in files_of(run, kind):
        try:
            yield file, read(file.path, columns)
        except FileNotFoundError:  # removed by retention since it was listed
            continue
        except parquet.Unreadable as error:
            logger.warning("%s The other files are read.", error)


def rows(run: Path, kind: str = "trajectories", columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of `tables`, one after the other."""
    for _, table in tables(run, kind, columns):
        yield from table.to_pylist()


def forget_after(run: Path, step: int) -> int:
    """Remove the files of later steps; returns their number."""
    later = [file.path for file in files_of(run, "*") if file.step > step]
    for path in later:
        path.unlink(missing_ok=True)
    return len(later)


def cpu_seconds(run: Path) -> dict[int, float]:
    """Return step -> CPU seconds that its records took, in the recorder and in the processes that report to it. The
    time to write a file counts towards the next one, which may be that of a validation.
    """
    found: defaultdict[int, float] = defaultdict(float)
    for file, table in tables(run, columns=()):
        found[file.step] += float(table.schema.metadata.get(CPU_KEY, 0))
    return {step: seconds for step, seconds in found.items() if seconds}


def sizes(run: Path) -> dict[int, int]:
    """Return training step -> bytes of its files, without `waiting`; removes what killed writers left."""
    remove_half_written(run)
    found: dict[int, int] = {}
    for file in (file for kind in _OF_STEPS for file in files_of(run, kind) if not file.validate):
        found[file.step] = found.get(file.step, 0) + file.path.stat().st_size
    return found


def remove_half_written(run: Path) -> None:
    """Remove files that a killed writer left half written."""
    for part in (run / FOLDER).glob(f"*/*{parquet.PART}"):
        # Its writer may be alive, if this is a second start while a run is in progress.
        if not Path("/proc", part.name.split(".")[-2]).exists():
            part.unlink(missing_ok=True)


def keep(run: Path, sizes: dict[int, int], limits: RecorderSettings) -> None:
    """Remove the oldest training steps, all kinds of a step together, until few and small enough are left; the newest
    stays, and all validations, which a report compares. The groups that wait at a checkpoint stay as long as a run can
    resume from it.

    Args:
        sizes: of `sizes`; the removed steps are taken out. It is kept because listing 500 steps takes 30 ms.
    """
    while len(sizes) > 1 and (len(sizes) > limits.keep_steps or sum(sizes.values()) > limits.max_gb * 2**30):
        step = min(sizes)
        for kind in _OF_STEPS:
            path_of(run, kind, step).unlink(missing_ok=True)
        del sizes[step]
    for file in files_of(run, "waiting")[:-1]:
        if not (run / f"global_step_{file.step}").is_dir():
            file.path.unlink(missing_ok=True)
