"""Read JSON lines, one object per line. Samples, trajectories, metrics and notes of a run are read only here.

A killed process may leave its last line half written. Such a line counts as never written: a reader skips it with a
warning, and a process that appends cuts it off first.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from verl_ext.runs import files

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

T = TypeVar("T")


class OtherForm(ValueError):
    """A line is no JSON object or not of the expected form; the message names the file and the line."""


def read(
    path: Path, parse: Callable[[dict[str, Any]], T] = lambda row: row, expected: str = "a JSON object"
) -> Iterator[T]:
    """Yield `parse(row)` for each row; empty lines are skipped.

    Args:
        parse: raises ValueError, KeyError, TypeError or AttributeError for a row of another form.
        expected: what a line should be and what to do, for the message.
    Raises:
        OtherForm: a line is no JSON object, or `parse` refuses it.
    """
    for number, line, row in lines(path):
        if not line.strip():
            continue
        if isinstance(row, json.JSONDecodeError | UnicodeDecodeError) and not line.endswith(b"\n"):
            logger.warning("%s: the last line is incomplete and is left out.", path)
            return
        try:
            if not isinstance(row, dict):
                raise row
            parsed = parse(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _other_form(path, number, line, error, expected) from error
        yield parsed


def lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | ValueError]]:
    """Yield number, bytes and row of every line; the row of a line that is no JSON object is the error.

    Raises:
        OtherForm: the path is no regular file, such as a FIFO, which would block.
    """
    if what := files.no_file(path):
        raise OtherForm(f"{path} is {what}. Expected a file of JSON lines.")
    with open(path, "rb") as file:  # as bytes: a text may contain characters that str.splitlines treats as line ends
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield number, line, row if isinstance(row, dict) else ValueError("it is not a JSON object")
            except ValueError as error:
                yield number, line, error
            except RecursionError as error:
                yield number, line, ValueError(str(error))


def dumps(record: Any, **options: Any) -> str:
    """Return a line without its end. A lone surrogate, which no file takes, becomes its JSON escape."""
    return json.dumps(record, ensure_ascii=False, **options).encode("utf-8", "backslashreplace").decode("utf-8")


def cut_half_line(path: Path) -> None:
    """Cut off the half line that a killed process has left, before another process appends to the file."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _other_form(path: Path, number: int, line: bytes, error: Exception, expected: str) -> OtherForm:
    seen = f"no key {error}" if isinstance(error, KeyError) else error
    start = line.decode("utf-8", "replace").strip()[:80]
    return OtherForm(f"{path}, line {number}: {seen}. Expected {expected}, got {start!r}.")
