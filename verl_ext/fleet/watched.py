"""verl's vLLM server, extended to report whether its engine lives and to return the tokens of a dead engine's requests.

vLLM's engine is a separate process (`EngineCore`). The server next to it records every sampled token with its log-prob,
even for requests that ask for the final output only, so those tokens outlive the engine. Imports vLLM.
"""

import argparse
import asyncio
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import CoreEngineProcManager

from verl_ext.fleet.client import FAILED

NOTICE_S = 0.1  # how soon a heartbeat under way ends when the engine dies
KILL_TIMEOUT_S = 10.0  # from an engine's kill until vLLM notices, which looks once a second


class WatchedServer(vLLMHttpServer):
    """verl's server with heartbeats. If it is watched, a request of a dead engine ends as `aborted`, with `FAILED` in
    its extra fields; otherwise it raises, as verl's does.
    """

    _is_given_up = False
    _load_error: Exception | None = None
    _running = 0  # requests
    _is_watched = False  # until the first heartbeat; verl's own client would retry a dead engine forever

    async def run_server(self, args: argparse.Namespace) -> None:
        await super().run_server(args)
        generate = self.engine.generate

        async def generate_or_part(
            prompt: Any, sampling_params: Any, request_id: str, **rest: Any
        ) -> AsyncGenerator[Any, None]:
            try:
                async for output in generate(
                    prompt=prompt, sampling_params=sampling_params, request_id=request_id, **rest
                ):
                    yield output
            except EngineDeadError:
                if not self._is_watched:
                    raise
                yield self._part(request_id)

        self.engine.generate = generate_or_part
        manager = cast(CoreEngineProcManager, self.engine.engine_core.resources.engine_manager)
        pids = [process.pid for process in manager.processes if process.pid is not None]
        self._engines = [psutil.Process(pid) for pid in pids]  # psutil spares a later process of the same pid
        self.reaper = start_reaper(pids)

    def _part(self, request_id: str) -> Any:
        """Return the tokens of a request that a dead engine left behind, in vLLM's form for an aborted request."""
        states = self.engine.output_processor.request_states.values()
        state = next((each for each in states if each.external_req_id == request_id), None)
        if state is None:  # it never reached the engine
            return SimpleNamespace(outputs=[])
        return state.make_request_output([], None, FinishReason.ABORT, None)

    async def collective_rpc(self, method: str | Callable, *args: Any, **kwargs: Any) -> None:
        """Call as verl's, and keep an error in loading weights for `beat`: their sender waits for an answer that vLLM's
        worker does not give then (verl's bucketed_weight_transfer.py).
        """
        try:
            await super().collective_rpc(method, *args, **kwargs)
        except Exception as error:
            if method == "update_weights_from_ipc":
                self._load_error = error
            raise

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        self._running += 1
        try:
            output = await super().generate(*args, **kwargs)
        except EngineDeadError:  # on the way to the engine
            if not self._is_watched:
                raise
            output = TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self.global_steps})
        finally:
            self._running -= 1
        if output.stop_reason == "aborted" and (self._is_given_up or self.engine.errored):
            output.extra_fields[FAILED] = True
        return output

    async def beat(self) -> None:
        """Answer both heartbeats: return once the engine's core has answered, which a hanging one never does.

        Raises:
            EngineDeadError: the engine itself reports that it is dead.
            Exception: the server could not load its weights.
        """
        self._is_watched = True
        if self._load_error is not None:
            raise self._load_error
        if self._is_given_up or self.engine.errored:
            raise EngineDeadError()
        answer = asyncio.ensure_future(self.engine.is_paused())
        try:
            while not answer.done():  # vLLM leaves it unanswered when the engine dies under it
                await asyncio.wait([answer], timeout=NOTICE_S)
                if not answer.done() and (self._is_given_up or self.engine.errored):
                    raise EngineDeadError()
            await answer
        finally:
            answer.cancel()

    async def give_up(self) -> None:
        """Kill what is left of an engine that is dead or declared dead; every request returns with its tokens so far.

        Raises:
            TimeoutError: vLLM did not notice the death of its engine.
        """
        self._is_given_up = True
        self._submission_paused = self._rejecting = True  # requests that wait for an update to end also return
        self._resume_event.set()
        self._kill_engine()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while not self.engine.errored:
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM did not notice within {KILL_TIMEOUT_S:.0f} s that its engine was killed.")
            await asyncio.sleep(0.01)
        for answer in list(self.engine.engine_core.utility_results.values()):  # vLLM leaves their callers waiting
            if not answer.done():
                answer.set_exception(EngineDeadError())
        while self._running and time.monotonic() < deadline:  # log-probs of thousands of long requests take seconds
            await asyncio.sleep(0.01)

    def _kill_engine(self) -> None:
        """Kill the engine's processes and those that they started for further GPUs, even if suspended."""
        for core in self._engines:
            with suppress(psutil.NoSuchProcess):
                for each in [*core.children(recursive=True), core]:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()


_REAPER = """
cat > /dev/null
for each; do
    read -r stat < "/proc/${each%:*}/stat"
    set -- ${stat##*) }
    [ "${20}" = "${each#*:}" ] && kill -9 "${each%:*}"
done
"""


def start_reaper(pids: list[int]) -> subprocess.Popen:
    """Start a shell that kills processes when this one is gone, because a killed server cannot free its engine's GPU.

    A process is identified by its pid and start time, because pids are reused. The time is field 22 of /proc/PID/stat,
    the 20th after the name.
    """
    known = [f"{pid}:{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}" for pid in pids]
    command = ["sh", "-c", _REAPER, "sh", *known]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
