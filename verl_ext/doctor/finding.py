"""What a check says, `yield fail("what is wrong -> what to do")`, and how it is printed."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

BEHIND = " " * 18  # level and topic
WRAPPER = textwrap.TextWrapper(
    132, initial_indent=BEHIND, subsequent_indent=BEHIND, break_long_words=False, break_on_hyphens=False
)


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"  # the run works, but not as anyone would want
    FAIL = "FAIL"  # the run would stop, or train on something unintended


@dataclass(frozen=True)
class Finding:
    """One result; `advice` says what to do, and is empty if nothing is. The command line adds the topic."""

    level: Level
    topic: str
    message: str
    advice: str = ""

    def __str__(self) -> str:
        lines = [*self.message.splitlines(), *[f"-> {self.advice}"] * bool(self.advice)]
        start = f"{self.level:4}  {self.topic:11} "
        return start + "\n".join(map(WRAPPER.fill, lines)).removeprefix(BEHIND)


def _finding(level: Level, text: str) -> Finding:
    """Make a finding of `what is wrong -> what to do`; an indented line break of the source becomes a space."""
    text = re.sub(r"\n {8,}", " ", text)  # line breaks of a quoted error stay
    message, _, advice = (text, "", "") if level is Level.OK else text.rpartition(" -> ")
    return Finding(level, "", message, advice.strip())


ok, warn, fail = (partial(_finding, level) for level in Level)


def all_well(problems: Iterable[Finding], text: str) -> Iterator[Finding]:
    """Yield problems as they come, so that a check that breaks has reported what it found; one OK if there is none."""
    is_well = True
    for problem in problems:
        is_well = False
        yield problem
    if is_well:
        yield ok(text)
