"""The records of a run as Parquet files, one a step and kind: written whole or not at all, listed, read.

    python -m verl_ext.records.store RUN [--kind tokens] [--step 17] | jq .

Columns: schema.py. Who reads takes `tables` or `rows`: a file that cannot be read is named, and the others are read.
"""

import argparse
import itertools
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from verl_ext.records import jsonl
from verl_ext.records.schema import CPU_KEY, SCHEMAS, VERSION, VERSION_KEY
from verl_ext.settings import RecorderSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

FOLDER = "records"
Rows = Iterable[Mapping[str, Any]] | pa.Table
Notes = Mapping[bytes, str] | None
_NAME = re.compile(r"(step|val)_(\d{6,})\.parquet")
_PART = ".tmp"
_LONG = ("prompt", "text", "code", "stdout", "stderr", "reward_parts", "tool_use")  # columns that are most of a file
_OF_STEPS = tuple(kind for kind in SCHEMAS if kind != "waiting")
_CHUNK = 256  # rows that are in memory at once
_BATCH = 64  # rows that are in memory at once where a file is read row by row
_GROUP_BYTES = 2**24  # about those of a row group of the file, at the most: who reads takes them one by one


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


class BrokenRecords(ValueError):
    """A file is no records of this version, or cut short; the message names it."""


class RecordFile(NamedTuple):
    """A file of a step."""

    path: Path
    step: int
    validate: bool


def path_of(run: Path, kind: str, step: int, *, validate: bool = False) -> Path:
    return run / FOLDER / kind / f"{'val' if validate else 'step'}_{step:06d}.parquet"


def files_of(run: Path, kind: str = "trajectories") -> list[RecordFile]:
    """The files of a kind ("*": of all) by step, a step's validation behind its training; [] where there are none."""
    named = [(path, _NAME.fullmatch(path.name)) for path in (run / FOLDER).glob(f"{kind}/*.parquet")]
    found = [RecordFile(path, int(match[2]), match[1] == "val") for path, match in named if match]
    return sorted(found, key=lambda file: (file.step, file.validate))


def write(path: Path, kind: str, rows: Rows, notes: Notes = None) -> int:
    """Write a file so that there is all of it or nothing. A column that a row lacks is null.

    Args:
        rows: are taken some hundred at a time.
        notes: are kept in the file's metadata.
    Returns:
        Its bytes.
    Raises:
        OSError: the disk is full or read-only; nothing is left of the file.
        pyarrow.ArrowInvalid, pyarrow.ArrowTypeError: a value is of another type than its column.
    """
    schema = SCHEMAS[kind]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}{_PART}")
    try:
        with pa.OSFile(str(part), "wb") as file, pq.ParquetWriter(file, schema, **_OPTIONS[kind]) as writer:
            writer.add_key_value_metadata({VERSION_KEY: VERSION} | dict(notes or {}))
            if isinstance(rows, pa.Table):
                writer.write_table(rows.cast(schema))
                rows = ()
            left = iter(rows)
            while chunk := list(itertools.islice(left, _CHUNK)):
                table = pa.Table.from_pylist(chunk, schema=schema)
                writer.write_table(table, max(1, len(chunk) * _GROUP_BYTES // max(1, table.nbytes)))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], Iterable[Mapping[str, Any]]]) -> None:
    """Write a file of trajectories with other rows, made of those that it has."""
    table = read(path) if path.exists() else SCHEMAS["trajectories"].empty_table()
    notes = {name: value for name, value in (table.schema.metadata or {}).items() if name == CPU_KEY}
    write(path, "trajectories", change(table.to_pylist()), notes)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(VERSION_KEY, b"none").decode()
            if version != VERSION:
                raise BrokenRecords(f"{path} has records of version {version}, expected {VERSION}.")
            known = SCHEMAS.get(path.parent.name)  # where the file was moved elsewhere, nobody knows
            if lacks := sorted(set(known.names if known else ()) - set(file.schema_arrow.names)):
                raise BrokenRecords(f"{path} lacks columns of version {VERSION}: {', '.join(lacks)}.")
            yield file
    except (pa.ArrowException, EOFError) as error:
        raise BrokenRecords(
            f"{path} cannot be read ({error}). Expected records in Parquet, version {VERSION}; the file was cut short "
            "or changed after it was written. Remove it, or restore it."
        ) from error


def read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file.

    Args:
        columns: all by default.
    Raises:
        BrokenRecords: the file is cut short or none of this version.
        FileNotFoundError: it is gone, as retention removes old ones while a run goes on.
    """
    with _opened(path) as file:
        return file.read(columns=None if columns is None else list(columns))


def stream(path: Path) -> Iterator[dict[str, Any]]:
    """As `read`, all columns, a few rows in memory at a time."""
    with _opened(path) as file:
        for batch in file.iter_batches(_BATCH):
            yield from batch.to_pylist()


def tables(
    run: Path, kind: str = "trajectories", columns: Sequence[str] | None = None
) -> Iterator[tuple[RecordFile, pa.Table]]:
    """The files of a kind that can be read, by step. A warning names each one that cannot."""
    for file in files_of(run, kind):
        try:
            yield file, read(file.path, columns)
        except FileNotFoundError:  # removed by retention since it was listed
            continue
        except BrokenRecords as error:
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
    """Step -> seconds of CPU that its records took, of the recorder and of those who told it."""
    found = {file.step: pq.read_metadata(file.path).metadata for file in files_of(run) if not file.validate}
    return {step: float(notes[CPU_KEY]) for step, notes in found.items() if CPU_KEY in notes}


def sizes(run: Path) -> dict[int, int]:
    """Step -> bytes of its files, without what waits at a checkpoint. What a killed writer left half written goes."""
    for part in (run / FOLDER).glob(f"*/*{_PART}"):
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
    from verl_ext.records.run_folder import NoRun, training_folder  # which lists our files

    parser = argparse.ArgumentParser(description="The records of a run as JSON lines.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, or of the quickstart")
    parser.add_argument("--kind", choices=SCHEMAS, default="trajectories")
    parser.add_argument("--step", type=int, help="all by default")
    args = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    try:
        run = training_folder(args.run, "rl")
    except NoRun as error:
        sys.exit(str(error))
    steps = sorted({file.step for file in files_of(run, args.kind)})
    if not steps or args.step not in (None, *steps):
        has = f"of step {args.step}. It has those of {steps[0]} to {steps[-1]}" if steps else "(retool.recorder)"
        sys.exit(f"{run} has no records of the kind {args.kind} {has}.")
    for file, table in tables(run, args.kind):
        if args.step in (None, file.step) and table.num_rows:
            print(*map(jsonl.dumps, table.to_pylist()), sep="\n")


if __name__ == "__main__":
    main()
