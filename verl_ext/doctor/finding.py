"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


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
        lines = [f"{self.level:4}  {self.topic:11} {self.message}"]
        if self.advice:
            lines.append(f"{'':18}-> {self.advice}")
        return "\n".join(line.replace("\n", f"\n{'':18}") for line in lines)


@dataclass(frozen=True)
class Topic:
    """Makes the findings of one topic."""

    name: str

    def ok(self, message: str) -> Finding:
        return Finding(Level.OK, self.name, message)

    def warn(self, message: str, advice: str) -> Finding:
        return Finding(Level.WARN, self.name, message, advice)

    def fail(self, message: str, advice: str) -> Finding:
        return Finding(Level.FAIL, self.name, message, advice)
