"""Run long commands so that you see their progress, and so that nothing they started outlives them.

Ray, vLLM and verl leave daemons, shared memory and sockets behind when they are killed, and some even when they are
not. Linux only: this process makes itself the reaper of its orphaned descendants, so that it can reach every daemon by
its pid.
"""

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO, TypeVar

import psutil
from omegaconf import OmegaConf

from verl_ext.quickstart import disk

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5
MEMORY_POLL_S = 5.0
GRACE_S = 10.0  # between SIGTERM and SIGKILL
SHARED_MEMORY = Path("/dev/shm")
SOCKETS = Path("/tmp/rl-colocate-zmq-*")  # verl binds them there, whatever TMPDIR is

_FINDING = re.compile(r"(?:OK|WARN|FAIL) +[a-z-]+ ")  # verl_ext/doctor/finding.py
_RESUME = re.compile(r"Resume: .*")  # verl_ext/checkpoints/folder.py

Watch = Callable[[], object]
T = TypeVar("T")


class CommandFailed(RuntimeError):
    """A command ended with an error; the message holds the end of its log."""


class DiskFull(CommandFailed):
    """A command failed, and a disk that it writes to was full; the end of the message says which."""


class Supervisor:
    """Context manager around the commands of a pipeline; see the module's docstring.

    Commands get a private `TMPDIR`, deleted at the end. SIGTERM and a closed terminal end the block like Ctrl-C.

    Args:
        lock: that of the folder that the commands write to (runs/lock.py). The commands also hold it: they survive if
            this process is killed, and then nobody else may write there.
    """

    def __init__(self, lock: TextIO | None = None):
        self._kept_open = () if lock is None else (lock.fileno(),)

    def __enter__(self) -> "Supervisor":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Short, and below /tmp: Ray's socket paths must stay under 108 characters.
        self._tmp = Path(tempfile.mkdtemp(prefix="retool-", dir="/tmp"))
        children = psutil.Process().children()
        self._kept_children = {child.pid for child in children}
        self._fork_servers = [child for child in children if _runs(child, "verl_ext.cpu.warm_python")]
        self._others_memory = set(SHARED_MEMORY.glob("*"))
        self._left_behind: set[Path] = set()
        self._peak_bytes = 0
        self._peak_resident = 0
        self._stop = threading.Event()
        self._monitor = threading.Thread(target=self._monitor_loop, daemon=True)
        self._monitor.start()
        self._old_handlers = {
            number: signal.signal(number, _raise_interrupt)
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A second Ctrl-C must not interrupt the cleaning, which takes at most 2 x GRACE_S.
        self._old_handlers[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        for number in self._old_handlers:
            signal.signal(number, signal.SIG_IGN)
        self._stop.set()
        self._monitor.join()
        self._clean()
        shutil.rmtree(self._tmp, ignore_errors=True)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def peak_gb(self) -> float:
        """Return the most memory (PSS, 10^9 bytes) that all descendants together have held since the last call."""
        peak, self._peak_bytes, self._peak_resident = self._peak_bytes, 0, 0
        return round(peak / 1e9, 2)

    def run(
        self, command: list[str], *, log: Path | None, env: dict[str, str] | None = None, watch: Watch | None = None
    ) -> None:
        """Run a command to its end, then end whatever it left running.

        Args:
            log: file to which its output is appended; None for the terminal.
            env: variables in addition to this process's.
            watch: called every half second while it runs, to show progress.
        Raises:
            DiskFull: it failed, and a disk was full.
            CommandFailed: it exited with a status other than 0.
        """
        environment = os.environ | {"TMPDIR": str(self._tmp), "PYTHONUNBUFFERED": "1"} | (env or {})
        written_to, logged_before, full = [self._tmp, SHARED_MEMORY], 0, None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            written_to.insert(0, log.parent)
            logged_before = log.stat().st_size if log.exists() else 0
        with open(log, "ab") if log else contextlib.nullcontext() as sink:
            # A separate session: Ctrl-C reaches only this process, which then ends the command in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
                pass_fds=self._kept_open,
            )
            try:
                while process.poll() is None:
                    time.sleep(POLL_S)
                    if watch:
                        watch()
                if process.returncode:  # before the rest of what it wrote is deleted
                    full = disk.full_folder(written_to, _end_of(log, logged_before) if log else "")
                    full = full and disk.describe(full)
            finally:
                if process.poll() is None:
                    self._interrupt(process)
                self._clean()
        if process.returncode:
            message = _failure_message(command, process.returncode, log)
            raise DiskFull(f"{message}\n{full}") if full else CommandFailed(message)

    def _descendants(self) -> list[psutil.Process]:
        """Return all processes below this one, except those that existed earlier and the pipeline's sandbox server.

        A command may have had its processes forked by the caller's warm_python.
        """
        forks = [fork for server in self._fork_servers for fork in _children(server)]
        return forks + [
            process
            for child in psutil.Process().children()
            if child.pid not in self._kept_children and not _runs(child, "verl_ext.sandbox.server")
            for process in [child, *_children(child)]
        ]

    def _interrupt(self, process: subprocess.Popen) -> None:
        """Have a command end in order; note first what its processes hold, because they may be gone before it is."""
        deadline = time.monotonic() + GRACE_S
        self._note_left_behind(self._descendants())
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < deadline:
            self._note_left_behind(self._descendants())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)

    def _clean(self) -> None:
        """End all descendants, and delete the shared memory and sockets that they had made."""
        descendants = self._descendants()
        self._note_left_behind(descendants)
        for signal_number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for process in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal_number)
            _, descendants = psutil.wait_procs(descendants, timeout=grace_s)
            descendants = list({*descendants, *self._descendants()})
            if not descendants:
                break
        paths, self._left_behind = self._left_behind, set()
        for path in paths:
            path.unlink(missing_ok=True)

    def _monitor_loop(self) -> None:
        known: set[Path] = set()
        while not self._stop.wait(MEMORY_POLL_S):
            descendants = self._fork_servers + self._descendants()
            resident = sum(seen.rss for process in descendants if (seen := _told(process.memory_info, None)))
            if resident > self._peak_resident:  # each PSS costs the kernel a walk over all pages
                self._peak_resident = resident
                whole = (_told(process.memory_full_info, None) for process in descendants)
                self._peak_bytes = max(self._peak_bytes, sum(seen.pss for seen in whole if seen))
            candidates = {*SHARED_MEMORY.glob("*"), *SOCKETS.parent.glob(SOCKETS.name)}
            if candidates - known:
                known |= candidates
                self._note_left_behind(descendants)

    def _note_left_behind(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            self._left_behind |= _told(functools.partial(_left_behind, process), set()) - self._others_memory


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _told(question: Callable[[], T], otherwise: T) -> T:
    """Return what psutil says about a process; `otherwise` if the process has ended or denies access."""
    try:
        return question()
    except (psutil.Error, OSError):
        return otherwise


def _children(process: psutil.Process) -> list[psutil.Process]:
    return _told(functools.partial(process.children, recursive=True), [])


def _runs(process: psutil.Process, module: str) -> bool:
    return module in _told(process.cmdline, [])


def _left_behind(process: psutil.Process) -> set[Path]:
    """Return what a process may leave behind: shared memory, and verl's sockets.

    Shared memory lies directly in /dev/shm; a mapped file in a folder there is a user's, such as a checkpoint.
    """
    maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in maps if not line.endswith("(deleted)")}
    sockets = {str(connection.laddr) for connection in process.net_connections(kind="unix")}
    return {path for path in mapped if path.parent == SHARED_MEMORY} | {
        Path(path) for path in sockets if Path(path).match(str(SOCKETS))
    }


def _failure_message(command: list[str], returncode: int, log: Path | None) -> str:
    message = f"`{' '.join(command[:3])} ...` failed with exit status {returncode}."
    if log is not None:
        tail = log.read_text(errors="replace").splitlines()[-40:]  # with all that the doctor finds
        message += f" The end of {log}:\n  " + "\n  ".join(line[:300] for line in tail)
    return message


def _end_of(log: Path, position: int, limit: int = 2**20) -> str:
    """Return what a command has logged since `position` (bytes), at most the last `limit` bytes."""
    with open(log, "rb") as file:
        file.seek(max(position, log.stat().st_size - limit))
        return file.read().decode(errors="replace")


def _new_lines(path: Path, positions: dict[Path, int]) -> Iterator[str]:
    """Yield whole lines that no earlier call gave; `positions` keeps where each file was read to, in bytes."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(positions.get(path, 0))
        while (line := file.readline()).endswith(b"\n"):
            positions[path] = file.tell()
            yield line.decode(errors="replace").rstrip()


def show_notes(log: Path) -> Watch:
    """Print from a launcher's log what the doctor found, and from which step a run resumes."""
    positions = {log: log.stat().st_size if log.exists() else 0}
    findings: list[str] = []

    def watch() -> None:
        for line in _new_lines(log, positions):
            if _FINDING.match(line) or (findings and line.startswith(" " * 18)):
                findings.append(line)
            elif line.startswith("doctor: "):
                print("\n".join(f"  {each}" for each in [*findings, line]), flush=True)
                findings.clear()
            elif (found := _RESUME.search(line)) and "starts from scratch" not in line:
                print(f"  {found[0]}", flush=True)

    return watch


def _show_progress(folder: Path, describe: Callable[[dict], str | None], interval_s: float) -> Watch:
    """Print a line per training step for which `describe` gives one, at most every `interval_s`; and the last one."""
    launched, printed, positions = time.time(), 0.0, {}
    first: tuple[int, float] | None = None

    def watch() -> None:
        nonlocal first, printed
        for step, text in ((step, describe(data)) for step, data in _new_metrics(folder, launched, positions)):
            if text is None:
                continue
            now, total = time.time(), _total_steps(folder)
            if first is None:
                first = (step, now)
                print(f"  first step after {now - launched:.0f} s", flush=True)
            if now - printed >= interval_s or step == total:
                printed = now
                if total and step > first[0]:
                    left_s = round((now - first[1]) / (step - first[0]) * (total - step))
                    text += f" | ETA {left_s // 60}:{left_s % 60:02}"
                print(f"  step {step}{f'/{total}' if total else ''} | {text}", flush=True)

    return watch


def _new_metrics(folder: Path, launched: float, positions: dict[Path, int]) -> Iterator[tuple[int, dict]]:
    """Yield (step, metrics) of each new line of verl's file loggers that this start has opened."""
    for path in sorted(folder.glob("metrics*.jsonl")):
        if path.stat().st_mtime >= launched:
            for record in map(json.loads, _new_lines(path, positions)):
                yield record["step"], record["data"]


def _total_steps(folder: Path) -> int:
    """Return the planned steps, from the configuration that Hydra wrote when the run started; 0 while there is none."""
    config = folder / "hydra" / "config.yaml"
    return OmegaConf.load(config).trainer.total_training_steps if config.exists() else 0


def show_sft_progress(folder: Path) -> Watch:
    """Print lines such as `step 120/750 | loss 0.412 | ETA 2:10`, every 10 s."""
    return _show_progress(folder, lambda data: f"loss {data['train/loss']:.3f}" if "train/loss" in data else None, 10.0)


def show_rl_progress(folder: Path) -> Watch:
    """Print one line per step: score, accuracy, code use, tool errors, length, entropy, seconds."""

    def describe(data: dict) -> str | None:
        if "train/acc" not in data:
            return None
        entropy = data.get("actor/entropy", data.get("actor/entropy_loss", float("nan")))  # the second: bypass_mode
        return (
            f"score {data['critic/score/mean']:+.3f} | acc {data['train/acc']:.2f} | "
            f"code {data['tool/code_ratio']:.2f} | tool err {data['tool/error_rate']:.1%} | "
            f"len {data['response_length/mean']:.0f} tok | "
            f"entropy {entropy:.3f} | {data['timing_s/step']:.1f} s"
        )

    return _show_progress(folder, describe, 0.0)
