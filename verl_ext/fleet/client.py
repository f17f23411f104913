"""The client of servers that may die: a turn goes on elsewhere with the tokens that it has.

verl's asynchronous client (workers/rollout/llm_server.py:225, 0.9.1) makes one turn of the requests that an update of
the weights broke off. Here a request whose server died is one more of these. Tokens, log-probs and versions that came
back are kept; the calls of tools lie between turns, and are not repeated.
"""

import asyncio
import logging
import os
import time
from contextvars import ContextVar
from typing import Any

from ray.exceptions import ActorUnavailableError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_ext.rollout.liveness import GONE
from verl_ext.rollout.weight_versions import note_lost
from verl_ext.settings import HealthSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

FAILED = "server_failed"  # among the extra fields of an output that its server broke off: the rest comes from another
GAVE_UP = "error"  # the reason of a turn's end for which the rollout is an infrastructure failure (rollout/loop.py)
PAUSE_S = 0.5  # until a request asks again: for a server, or one that could not be reached
ROUTER_S = 10.0  # for the router to take a server out; it takes milliseconds
MAX_UNREACHED = 20  # tries of a request in a row that did not reach its server; the next one is a loss
_server: ContextVar[str] = ContextVar("server")  # of the newest request of this turn
_lost: ContextVar[int] = ContextVar("lost")  # requests of this turn that were lost with their servers


class NoServerLeft(Exception):
    """There was none for `retool.fleet.health.wait_s`, or there is no router any more."""


class _Request(LLMServerClient):
    """One request of a turn; in the order of `FleetClient`'s bases it stands between verl's two clients."""

    limits: HealthSettings

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        deadline = time.monotonic() + self.limits.wait_s
        while True:
            left = max(PAUSE_S, deadline - time.monotonic())
            try:
                async with asyncio.timeout(left):  # `wait_for` would run it in a context of its own (balancer.py)
                    name, server = await super()._acquire_server(request_id, **extra)
            except TimeoutError:
                raise NoServerLeft(f"the router did not answer for {self.limits.wait_s:g} s") from None
            except (RuntimeError, *GONE) as error:  # the latter of the router
                if isinstance(error, RuntimeError) and "No available servers" not in str(error):  # verl's router.py:196
                    raise
                if isinstance(error, GONE) and not isinstance(error, ActorUnavailableError):
                    raise NoServerLeft(f"the router of the rollout servers is gone: {error!r}") from error
                if time.monotonic() > deadline:
                    raise NoServerLeft(f"no rollout server for {self.limits.wait_s:g} s: {error!r}") from error
                await asyncio.sleep(PAUSE_S)
            else:
                _server.set(name)
                return name, server

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """As verl's (:99). Where the server fails, `aborted` with what it handed back, or `GAVE_UP`."""
        try:
            output = await self._reach(request_id, **kwargs)
        except NoServerLeft as error:
            logger.error("A rollout failed: %s. Look into the log of the rollout servers.", error)
            return TokenOutput(token_ids=[], stop_reason=GAVE_UP)
        except GONE as error:  # its process or node is gone, with the tokens of this request
            output, why = TokenOutput(token_ids=[], stop_reason="aborted"), repr(error)
        else:
            why = "its engine is dead"
            if not output.extra_fields.pop(FAILED, False):
                return output
        name, lost = _server.get().split("/")[0], _lost.get() + 1  # a router may name a rank of it: server/rank
        _lost.set(lost)
        note_lost(name)
        await self._leave_out(name)  # before the next request, anyone's
        logger.warning(
            "Server %s failed (%s): a request goes on elsewhere with its %d tokens (attempt %d of %d).",
            *(name, why, len(output.token_ids), lost, self.limits.attempts),
        )
        if lost >= self.limits.attempts:
            output.stop_reason = GAVE_UP
        return output

    async def _leave_out(self, name: str) -> None:
        """Take a server out of the router. One that is out of reach for long is told by the watch, at the latest."""
        for _ in range(MAX_UNREACHED):
            try:
                return await asyncio.wait_for(self._load_balancer.remove_servers.remote(server_ids=[name]), ROUTER_S)
            except TimeoutError:  # it hangs; the next request says so
                return None
            except ActorUnavailableError as error:
                logger.warning("The router cannot be reached now, it is told again in %g s: %r", PAUSE_S, error)
                await asyncio.sleep(PAUSE_S)
            except GONE:  # the next request says so
                return None

    async def _reach(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """verl's `generate`, again where Ray cannot reach the server now: it lives, and stays in the router.

        Such a try is no loss of a server. Its tokens are lost, as the server has no way to hand them back.
        """
        for _ in range(MAX_UNREACHED):
            try:
                return await super().generate(request_id, **kwargs)
            except ActorUnavailableError as error:
                logger.warning("A server cannot be reached now, a request asks again in %g s: %r", PAUSE_S, error)
                await asyncio.sleep(PAUSE_S)
        return await super().generate(request_id, **kwargs)


class FleetClient(FullyAsyncLLMServerClient, _Request):
    """See the module's docstring."""

    def __init__(self, *args: Any, limits: HealthSettings, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.limits = limits

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """One turn; see verl's. `stop_reason` is `GAVE_UP` where `attempts` servers died under it, or none was left."""
        before = _lost.set(0)
        try:
            return await super().generate(request_id, **kwargs)
        finally:
            _lost.reset(before)
