"""The servers of a run whose servers are watched (`retool.fleet.health`): their journal, and its sums."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.runs import durable, jsonl

FILE = "servers.jsonl"


@dataclass
class ServerTally:
    """The servers of a run over all its starts; the servers of an earlier start ended with it.

    Attributes:
        known: all servers that the run ever had.
        alive: those of the newest start that are alive.
        doubled: servers that died or were removed twice, or were never started, or were started twice.
        vacant: servers of the newest start that died and have not been replaced.
        unfounded: servers that replaced one in a start in which none was vacant.
    """

    started: int = 0
    died: int = 0
    replaced: int = 0
    removed: int = 0
    failed_starts: int = 0
    known: set[str] = field(default_factory=set)
    alive: set[str] = field(default_factory=set)
    doubled: list[str] = field(default_factory=list)
    vacant: int = 0
    unfounded: list[str] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        event, server = record["event"], record["server"]
        if event == "run":
            self.alive, self.vacant = set(), 0
        elif event in ("started", "replaced"):
            self.doubled += [server] * (server in self.alive)
            self.alive.add(server)
            self.known.add(server)
            self.started += 1
            if event == "replaced":
                self.replaced += 1
                self.unfounded += [server] * (self.vacant == 0)
                self.vacant = max(0, self.vacant - 1)
        elif event == "died":
            self.doubled += [server] * (server not in self.alive)
            self.alive.discard(server)
            self.died, self.vacant = self.died + 1, self.vacant + 1
        elif event == "removed":
            self.doubled += [server] * (server not in self.alive)
            self.alive.discard(server)
            self.removed += 1
        elif event == "start_failed":
            self.failed_starts += 1
        else:
            raise ValueError(f"unknown event {event!r}; expected run, started, replaced, died, removed or start_failed")

    def faults(self, lost: Iterable[str] = ()) -> list[str]:
        """Return what does not sum, a sentence each.

        Args:
            lost: servers that requests were lost with, by the ledger of prompts. They need not be reported dead: a run
                may be killed before that.
        """
        faults = []
        if strangers := sorted({*lost} - self.known):
            faults.append(f"requests lost {len(strangers)} servers that the run never had: {', '.join(strangers[:3])}.")
        if self.doubled:
            faults.append(f"{len(self.doubled)} servers died, left or started twice: {', '.join(self.doubled[:3])}.")
        if self.unfounded:
            faults.append(f"{len(self.unfounded)} servers replaced one although none had died: {self.unfounded[0]}.")
        return faults

    def line(self) -> str:
        return (
            f"servers: {self.started} started, {self.died} died, {self.replaced} of these replaced, "
            f"{self.removed} removed, {self.failed_starts} failed to start"
        )


class ServerJournal:
    """Writes what becomes of servers. Its events belong to no step: a server that died stays dead at a resume."""

    def __init__(self, folder: Path):
        self._path = folder / FILE

    def begin(self, servers: Iterable[str]) -> None:
        """Note a start of the run with these servers."""
        jsonl.cut_half_line(self._path)
        self.note("run", "", "")
        for server in servers:
            self.note("started", server, "with the run")

    def note(self, event: str, server: str, why: str) -> None:
        """Note one of the events of `ServerTally.add`; when this returns, it is on disk."""
        durable.make_folder(self._path.parent)
        record = {"at": time.time(), "event": event, "server": server, "why": why}
        durable.append_line(self._path, jsonl.dumps(record))


def read_servers(folder: Path) -> ServerTally | None:
    """Return the tally of the run's servers; None if they were not watched.

    Raises:
        ValueError: a line is malformed.
    """
    path, tally = folder / FILE, ServerTally()
    if not path.exists():
        return None
    for _ in jsonl.read(path, tally.add, "an object with `event` and `server`"):
        pass
    return tally
