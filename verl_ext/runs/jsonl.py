"""JSON lines: one object a line. Samples, trajectories, metrics and notes of a run are read here and nowhere else.

A process that is killed may leave its last line half written. Such a line counts as never written: a reader leaves it
out with a warning, and a process that appends cuts it off first.
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
    """A line is no JSON object, or not one of the form that was expected; the message names the file and the line."""


def read(
    path: Path, parse: Callable[[dict[str, Any]], T] = lambda row: row, expected: str = "a JSON object"
) -> Iterator[T]:
    """What `parse` makes of each row; empty lines are passed over.

    Args:
        parse: raises ValueError, KeyError, TypeError or AttributeError for a row of another form.
        expected: what a line should have been, for the message, and what to do.
    Raises:
        OtherForm: a line is no JSON object, or none that `parse` takes.
    """
    for number, line, row in lines(path):
        if not line.strip():
            continue
        if isinstance(row, json.JSONDecodeError | UnicodeDecodeError) and not line.endswith(b"\n"):
            logger.warning("%s: the last line is half written and is left out.", path)
            return
        try:
            if not isinstance(row, dict):
                raise row
            parsed = parse(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _other_form(path, number, line, error, expected) from error
        yield parsed


def lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | ValueError]]:
    """Number, bytes and row of every line; in place of a row what is wrong with a line that is no JSON object.

    Raises:
        OtherForm: it is no file; a FIFO would be waited for.
    """
    if what := files.no_file(path):
        raise OtherForm(f"{path} is {what}. Expected a file of JSON lines.")
    with open(path, "rb") as file:  # as bytes: a text may hold what str.splitlines takes for the end of a line
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield number, line, row if isinstance(row, dict) else ValueError("it is no JSON object")
            except ValueError as error:
                yield number, line, error
            except RecursionError as error:
                yield number, line, ValueError(str(error))


def dumps(record: Any, **options: Any) -> str:
    """A line, without its end. A lone surrogate, which no file takes, becomes JSON's escape of it."""
    return json.dumps(record, ensure_ascii=False, **options).encode("utf-8", "backslashreplace").decode("utf-8")


def cut_half_line(path: Path) -> None:
    """Cut off what a killed process has left of its last line, before another one appends to the file."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _other_form(path: Path, number: int, line: bytes, error: Exception, expected: str) -> OtherForm:
    seen = f"no key {error}" if isinstance(error, KeyError) else error
    start = line.decode("utf-8", "replace").strip()[:80]
    return OtherForm(f"{path}, line {number}: {seen}. Expected {expected}, got {start!r}.")
