"""The records of a run as Parquet files, one a step and kind: written whole or not at all, listed, read.

    python -m verl_ext.records.store RUN [--kind tokens] [--step 17] | jq .

Columns: schema.py. Who reads takes `tables` or `rows`: a file that cannot be read is named, and the others are read.
"""

import argparse
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.records.schema import CPU_KEY, LOST_KEY, SCHEMAS, VERSION, VERSION_KEY
from verl_ext.runs import jsonl, parquet
from verl_ext.runs.folder import FOLDER, NoRun, RecordFile, files_of, path_of, training_folder
from verl_ext.settings import RecorderSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

_LONG = ("prompt", "text", "code", "stdout", "stderr", "reward_parts", "tool_use")  # columns that are most of a file
_OF_STEPS = tuple(kind for kind in SCHEMAS if kind != "waiting")


def _options(schema: pa.Schema) -> dict[str, Any]:
    """How a file is written. Each of 60 columns has a start and an end of its own: with zstd for all, statistics and
    dictionaries, a step of 256 short rollouts took twice as long. Nobody reads statistics: a file is of one step.
    """
    pq.write_table(schema.empty_table(), empty := pa.BufferOutputStream())
    columns = pq.ParquetFile(empty.getvalue()).schema
    codecs = {each.path: "zstd" if each.name in _LONG else "lz4" for each in columns}
    repeated = ["uid", "text", "decision"] if schema == SCHEMAS["tokens"] else False
    return {"compression": codecs, "use_dictionary": repeated, "write_statistics": False, "store_schema": False}


_OPTIONS = {kind: _options(schema) for kind, schema in SCHEMAS.items()}


def write(path: Path, kind: str, rows: parquet.Rows, notes: parquet.Notes = None) -> int:
    """As `parquet.write`, with the columns of the kind. Returns the file's bytes."""
    parquet.write(path, rows, SCHEMAS[kind], {VERSION_KEY: VERSION} | dict(notes or {}), **_OPTIONS[kind])
    return path.stat().st_size


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], Iterable[Mapping[str, Any]]]) -> None:
    """Write a file of trajectories with other rows, made of those that it has."""
    table = read(path) if path.exists() else SCHEMAS["trajectories"].empty_table()
    notes = {name: value for name, value in (table.schema.metadata or {}).items() if name in (CPU_KEY, LOST_KEY)}
    write(path, "trajectories", change(table.to_pylist()), notes)


def _check(path: Path, schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != VERSION:
        raise parquet.Unreadable(f"{path} has records of version {version}, expected {VERSION}.")
    known = SCHEMAS.get(path.parent.name)  # where the file was moved elsewhere, nobody knows
    types = {field.name: field.type for field in schema}
    if lacks := [field.name for field in known or () if types.get(field.name) != field.type]:
        raise parquet.Unreadable(
            f"{path} lacks columns of version {VERSION}, or has them with another type: {', '.join(lacks)}."
        )


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """As `parquet.read`; Unreadable is also a file that is none of this version."""
    return parquet.read(path, columns, _check)


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """As `read`, all columns, a few rows in memory at a time."""
    return parquet.stream(path, check=_check)


def tables(
    run: Path, kind: str = "trajectories", columns: Sequence[str] | None = None
) -> Iterator[tuple[RecordFile, pa.Table]]:
    """The files of a kind that can be read, by step. A warning names each one that cannot."""
    for file in files_of(run, kind):
        try:
            yield file, read(file.path, columns)
        except FileNotFoundError:  # removed by retention since it was listed
            continue
        except parquet.Unreadable as error:
            logger.warning("%s The other files are read.", error)


def rows(run: Path, kind: str = "trajectories", columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of `tables`, one after the other."""
    for _, table in tables(run, kind, columns):
        yield from table.to_pylist()


def forget_after(run: Path, step: int) -> int:
    """Remove the files of later steps; returns their number."""
    later = [file.path for file in files_of(run, "*") if file.step > step]
    for path in later:
        path.unlink(missing_ok=True)
    return len(later)


def cpu_seconds(run: Path) -> dict[int, float]:
    """Step -> seconds of CPU that its records took, of the recorder and of those who told it. To write a file counts in
    the next one, which may be that of a validation.
    """
    found: Counter[int] = Counter()
    for file, table in tables(run, columns=()):
        found[file.step] += float(table.schema.metadata.get(CPU_KEY, 0))
    return {step: seconds for step, seconds in found.items() if seconds}


def sizes(run: Path) -> dict[int, int]:
    """Step -> bytes of its files, without what waits at a checkpoint. What a killed writer left half written goes."""
    for part in (run / FOLDER).glob(f"*/*{parquet.PART}"):
        # Its writer may live: a second start beside a run.
        if not Path("/proc", part.name.split(".")[-2]).exists():
            part.unlink(missing_ok=True)
    found: dict[int, int] = {}
    for file in (file for kind in _OF_STEPS for file in files_of(run, kind)):
        found[file.step] = found.get(file.step, 0) + file.path.stat().st_size
    return found


def keep(run: Path, sizes: dict[int, int], limits: RecorderSettings) -> None:
    """Remove the oldest steps, all kinds of a step together, until few and small enough are left; the newest stays.
    What waits at a checkpoint stays as long as a run can go on from it.

    Args:
        sizes: of all steps; those that are removed are taken out. To list the files of 500 steps takes 30 ms.
    """
    while len(sizes) > 1 and (len(sizes) > limits.keep_steps or sum(sizes.values()) > limits.max_gb * 2**30):
        step = min(sizes)
        for kind, validate in itertools.product(_OF_STEPS, (False, True)):
            path_of(run, kind, step, validate=validate).unlink(missing_ok=True)
        del sizes[step]
    for file in files_of(run, "waiting")[:-1]:
        if not (run / f"global_step_{file.step}").is_dir():
            file.path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The records of a run as JSON lines.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, or of the quickstart")
    parser.add_argument("--kind", choices=SCHEMAS, default="trajectories")
    parser.add_argument("--step", type=int, help="all by default")
    args = parser.parse_args()
    try:
        run = training_folder(args.run, "rl")
    except NoRun as error:
        sys.exit(str(error))
    steps = sorted({file.step for file in files_of(run, args.kind)})
    if not steps or args.step not in (None, *steps):
        has = f"of step {args.step}. It has those of {steps[0]} to {steps[-1]}" if steps else "(retool.recorder)"
        sys.exit(f"{run} has no records of the kind {args.kind} {has}.")
    with suppress(BrokenPipeError):  # `| head` is no error
        for file, table in tables(run, args.kind):
            if args.step in (None, file.step) and table.num_rows:
                print(*map(jsonl.dumps, table.to_pylist()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
