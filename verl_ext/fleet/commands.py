"""Commands to a run in progress, as files in its folder: whoever can write there can send one, even without Ray.

The sender writes `<id>.request.json` into `fleet_commands/`. The run renames it when it takes it, and writes
`<id>.answer.json`. A command that no run takes in time is withdrawn, so that no later run obeys it.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl_ext.runs import durable

FOLDER = "fleet_commands"
EVERY_S = 1.0  # between two looks of a run for commands
TAKE_S = 20.0  # for a run to take a command
ANSWER_S = 180.0  # for the answer, which may wait for a weight update
_POLL_S = 0.1


class NoAnswer(RuntimeError):
    """No run took a command, or it took it and did not answer."""


class Refused(ValueError):
    """The run cannot obey a command; the message says why."""


def ask(run: Path, words: list[str], *, take_s: float = TAKE_S, answer_s: float = ANSWER_S) -> Any:
    """Send a run a command and wait for its answer.

    Args:
        run: folder of the run.
    Raises:
        NoAnswer: no run looks into the folder, or the run does not answer.
        Refused: the run refuses the command.
    """
    folder = run / FOLDER
    durable.make_folder(folder)
    name = f"{time.time_ns()}_{uuid4().hex[:8]}"
    request, taken, answer = (folder / f"{name}.{what}.json" for what in ("request", "taken", "answer"))
    durable.write_text(request, json.dumps(words))
    is_taken = False
    try:
        is_taken = _wait(lambda: not request.exists(), take_s)
    finally:  # even if this process is ended: no later run obeys
        if not is_taken:
            with suppress(FileNotFoundError):  # taken at this moment
                request.unlink()
                raise NoAnswer(
                    f"No run read {folder} within {take_s:.0f} s. Expected an RL run in progress with separate "
                    "rollout servers: trainer.v1.trainer_mode=separate_async, actor_rollout_ref.hybrid_engine=false."
                )
    if not _wait(answer.exists, answer_s):
        taken.unlink(missing_ok=True)  # nobody waits for the answer
        raise NoAnswer(
            f"The run accepted {words} but did not answer within {answer_s:.0f} s. It may still do it; see its log."
        )
    told = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in told:
        raise Refused(told["refused"])
    return told["answer"]


def _wait(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@dataclass(frozen=True)
class Command:
    words: list[str]
    taken: Path

    def answer(self, value: Any) -> None:
        self._tell({"answer": value})

    def refuse(self, why: str) -> None:
        self._tell({"refused": why})

    def _tell(self, told: dict[str, Any]) -> None:
        if self.taken.exists():  # the sender still waits
            durable.write_text(self.taken.with_suffix("").with_suffix(".answer.json"), json.dumps(told))
            self.taken.unlink(missing_ok=True)


def clear(run: Path) -> None:
    """Remove the files of commands to an earlier start of the run, except requests that may wait for this one."""
    for path in (run / FOLDER).glob("*.json*"):
        written = path.name.partition("_")[0]  # see `ask`
        is_young = written.isdigit() and abs(time.time_ns() - int(written)) < TAKE_S * 1e9
        if not (is_young and path.name.endswith(".request.json")):
            path.unlink(missing_ok=True)


def take(run: Path) -> Iterator[Command]:
    """Yield the commands that wait, oldest first."""
    for request in sorted((run / FOLDER).glob("*.request.json")):
        taken = request.with_suffix("").with_suffix(".taken.json")
        try:
            request.rename(taken)
        except FileNotFoundError:  # withdrawn at this moment
            continue
        try:
            words = json.loads(taken.read_text(encoding="utf-8"))
        except ValueError as error:
            Command([], taken).refuse(f"Expected a list of words in JSON: {error}.")
            continue
        yield Command(words, taken)
