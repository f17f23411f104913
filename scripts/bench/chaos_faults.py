"""Inject the faults of chaos.py into a run: of sandbox, verifier, rollout servers, learner and disk.

A fault acts on processes and sockets of this machine, from a separate thread: no code of the run knows of it.
"""

import itertools
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import psutil

from scripts.studies.slow_sandbox import delay_s
from verl_ext.reward.score import score_answer
from verl_ext.sandbox.launch import running_server

HOLD_S = 15.0  # how long a sandbox or verifier is broken
SLOW_S = 30.0  # how long a sandbox is slow
SLOW_MEAN_S = 2.0  # mean delay of a call, log-normal
OOM_EVERY_S = 0.2
SAVE_S = 120.0  # a save must begin within this time, or the fault counts as missed
DISK = "48m"  # size of the disk that gets full: several checkpoints of the tiny model
SANDBOX = "verl_ext.sandbox.server"
OPTIONS = ("--preload=",)  # as in the quickstart: the tiny task's programs import nothing
GARBAGE = (
    b"<html><body>502 Bad Gateway</body></html>",
    b'{"status": "Success", "run_result": {"status": "Finished", "stdo',
    b'{"ok": true}',
    b"",
    b"\xff\xfe\x00garbage\x00",
)


class Missed(RuntimeError):
    """Raised if a fault found nothing to hit."""


class Sandbox:
    """The real server, on the same port at all its starts."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.url = self._stack.enter_context(running_server(port=self._port, options=OPTIONS))

    def stop(self) -> None:
        self._stack.close()

    def processes(self) -> list[psutil.Process]:
        """Return the server, followed by the processes it started."""
        own = {SANDBOX, str(self._port)}
        found = [each for each in psutil.Process().children() if own <= set(_command(each))]
        return [each for server in found for each in (server, *_below(server))]


class Judge:
    """An OpenAI-compatible server on 127.0.0.1 that scores as `score_answer` does, and hangs while `hangs` is set."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer({"data": [{"id": "judge"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                while judge.hangs.is_set():
                    time.sleep(0.1)
                content = f"Score: {verdict(body['messages'][0]['content']):g}"
                self.answer({"choices": [{"message": {"role": "assistant", "content": content}}]})

            def answer(self, content: object) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(ConnectionError):  # the verifier gave up on it
                    self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                return None

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.hangs.clear()
        self._server.shutdown()
        self._server.server_close()


def verdict(prompt: str) -> float:
    """Judge the verifier's own prompt (verl_ext/reward/verifiers/judge.py) by the text in its tags."""
    parts = {
        name: re.search(rf"<{name}>\n(.*?)\n</{name}>", prompt, re.DOTALL) for name in ("reference_answer", "response")
    }
    return score_answer(parts["response"][1], parts["reference_answer"][1]).acc if all(parts.values()) else 0.0


@dataclass
class Scene:
    """A run, and what a fault can act on.

    Attributes:
        run: its folder, which a fault may fill.
        log: what it prints.
        ended: set while the run does not exist: it has not started, or its process has ended.
        before: what the proxy in front of the sandbox does to a call.
    """

    run: Path
    log: Path
    sandbox: Sandbox
    judge: Judge
    seed: int
    ended: threading.Event = field(default_factory=threading.Event)
    before: Callable[[str], bytes | None] = lambda program: None

    @property
    def notes(self) -> Path:
        """Return the folder for what the other sides are judged by, off the run's own disk, which a fault may fill."""
        return self.run.parent / "notes"

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run: those below this process, except the sandbox."""
        others = set(self.sandbox.processes())
        return [each for each in _below(psutil.Process()) if each not in others]

    def hold(self, seconds: float) -> None:
        """Wait for some seconds, or until the run has ended."""
        self.ended.wait(seconds)


def sandbox_dead(scene: Scene) -> None:
    kill_sandbox(scene, HOLD_S)


def kill_sandbox(scene: Scene, away_s: float) -> None:
    """Kill the sandbox with all its processes, and start it again on its port after `away_s`."""
    _signal(scene.sandbox.processes(), signal.SIGKILL)
    scene.sandbox.stop()
    time.sleep(away_s)
    scene.sandbox.start()


def sandbox_hung(scene: Scene) -> None:
    stopped = scene.sandbox.processes()
    _signal(stopped, signal.SIGSTOP)
    try:
        time.sleep(HOLD_S)
    finally:
        _signal(stopped, signal.SIGCONT)


def sandbox_slow(scene: Scene) -> None:
    number = itertools.count()
    _behave(scene, lambda program: time.sleep(delay_s(SLOW_MEAN_S, scene.seed, program, next(number))), SLOW_S)


def sandbox_garbage(scene: Scene) -> None:
    answers = itertools.cycle(GARBAGE)
    _behave(scene, lambda program: next(answers), HOLD_S)


def sandbox_out_of_memory(scene: Scene) -> None:
    """Kill all but the server itself, again and again, as the kernel's OOM killer does if memory is short."""
    deadline = time.monotonic() + HOLD_S
    while time.monotonic() < deadline:
        _signal(scene.sandbox.processes()[1:], signal.SIGKILL)
        time.sleep(OOM_EVERY_S)


def verifier_hung(scene: Scene) -> None:
    scene.judge.hangs.set()
    try:
        time.sleep(HOLD_S)
    finally:
        scene.judge.hangs.clear()


def engine_killed(scene: Scene) -> None:
    _signal(_engines(scene)[:1], signal.SIGKILL)


def engine_stopped(scene: Scene) -> None:
    _signal(_engines(scene)[:1], signal.SIGSTOP)


def learner_killed(scene: Scene) -> None:
    """Kill the whole run when the first shard of its next checkpoint is on the disk but the checkpoint is not whole."""
    there, deadline = set(_checkpoints(scene.run)), time.monotonic() + SAVE_S
    while not any(_shard(path) for name, path in _checkpoints(scene.run).items() if name not in there):
        if time.monotonic() > deadline or scene.ended.is_set():
            raise Missed(f"no checkpoint was started within {SAVE_S:g} s")
        time.sleep(0.001)
    _signal(scene.processes(), signal.SIGKILL)


def disk_full(scene: Scene) -> None:
    """Let nothing be written to the run's folder until the run has ended, or for a while."""
    ballast = scene.run / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    scene.hold(2 * SLOW_S)
    ballast.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a separate small file system at a folder.

    Raises:
        Missed: it cannot be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise Missed(f"no tmpfs can be mounted, which needs root: {str(why).strip()}") from error
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class Fault(NamedTuple):
    """Attributes:
    inject: returns when the fault is over; what was killed stays dead.
    overrides: of the run, with the address of the judge as `{judge}`.
    steps: of the run.
    by_proxy: whether calls reach the sandbox through the proxy.
    judged: whether the judge scores answers, instead of the verifier of mathematics.
    """

    inject: Callable[[Scene], None]
    overrides: tuple[str, ...] = ()
    steps: int = 12
    by_proxy: bool = False
    small_disk: bool = False
    judged: bool = False


_JUDGE = "++reward.reward_kwargs.verifiers.tiny_tools"
JUDGED = (
    f"{_JUDGE}.path=verl_ext.reward.verifiers.judge.JudgeVerifier",
    f"{_JUDGE}.base_url='{{judge}}'",
    f"{_JUDGE}.timeout_s=5",
    f"{_JUDGE}.max_attempts=2",
)
TWO_ENGINES = (
    "hardware=cpu_separate",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=3",
    "retool.fleet.health.enable=true",
    "retool.fleet.health.dead_s=12",  # above the longest step of the tiny engine
    "retool.fleet.health.start_s=30",
)
FAULTS = {
    "sandbox dead": Fault(sandbox_dead),
    "sandbox hung": Fault(sandbox_hung),
    "sandbox slow": Fault(sandbox_slow, by_proxy=True),
    "sandbox answering garbage": Fault(sandbox_garbage, by_proxy=True),
    "sandbox out of memory": Fault(sandbox_out_of_memory),
    "verifier hung": Fault(verifier_hung, JUDGED, judged=True),
    "engine killed": Fault(engine_killed, TWO_ENGINES, steps=24),
    "engine stopped": Fault(engine_stopped, TWO_ENGINES, steps=24),
    "learner killed in a save": Fault(learner_killed),
    "disk full": Fault(disk_full, small_disk=True),
}
QUICK = ("sandbox dead", "sandbox hung", "sandbox answering garbage", "engine killed", "learner killed in a save")


def _checkpoints(run: Path) -> dict[str, Path]:
    """Return name -> folder of each checkpoint, also while it is written: ours in `.saving`, the others' in place."""
    patterns = ("global_step_*", ".saving/global_step_*", "checkpoint-*")
    return {path.name: path for pattern in patterns for path in run.glob(pattern)}


def _shard(checkpoint: Path) -> Path | None:
    names = ("model_world_size_*.pt", "model.safetensors")
    return next((path for name in names for path in checkpoint.rglob(name)), None)


def _engines(scene: Scene) -> list[psutil.Process]:
    """Return the processes of vLLM's engine cores, the oldest first. They are found by the pid with which they sign
    their log lines, because a fork of warm_python has no separate title.
    """
    named = set(map(int, re.findall(r"\(EngineCore\w* pid=(\d+)\)", scene.log.read_text(errors="replace"))))
    found = [each for each in scene.processes() if each.pid in named]
    if not found:
        raise Missed(f"{scene.log} names no process of the run that is an engine of vLLM")
    return sorted(found, key=lambda each: each.pid)


def _behave(scene: Scene, before: Callable[[str], bytes | None], seconds: float) -> None:
    usual, scene.before = scene.before, before
    time.sleep(seconds)
    scene.before = usual


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
