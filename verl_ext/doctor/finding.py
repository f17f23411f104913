"""What a check says."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

WIDTH = 132  # columns


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"  # the run works, but not as one would want
    FAIL = "FAIL"  # the run would stop, or train on what is not meant


@dataclass(frozen=True)
class Finding:
    """One result; `advice` says what to do, and is empty where nothing is."""

    level: Level
    topic: str
    message: str
    advice: str = ""

    def __str__(self) -> str:
        start, behind = f"{self.level:4}  {self.topic:11} ", " " * 18
        paragraphs = [(start, line) for line in self.message.splitlines()[:1]]
        paragraphs += [(behind, line) for line in self.message.splitlines()[1:]]
        paragraphs += [(f"{behind}-> ", self.advice)] * bool(self.advice)
        return "\n".join(
            textwrap.fill(
                text,
                WIDTH,
                initial_indent=first,
                subsequent_indent=behind,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for first, text in paragraphs
        )


@dataclass(frozen=True)
class Topic:
    """Makes the findings of one topic."""

    name: str

    def ok(self, message: str) -> Finding:
        return Finding(Level.OK, self.name, message)

    def all_well(self, problems: Iterable[Finding], message: str) -> Iterator[Finding]:
        """The problems as they come, so that a check that breaks has told what it found; one OK where there is none."""
        is_well = True
        for problem in problems:
            is_well = False
            yield problem
        if is_well:
            yield self.ok(message)

    def warn(self, message: str, advice: str) -> Finding:
        return Finding(Level.WARN, self.name, message, advice)

    def fail(self, message: str, advice: str) -> Finding:
        return Finding(Level.FAIL, self.name, message, advice)
