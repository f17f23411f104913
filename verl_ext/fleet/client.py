"""The client of servers that may die: a turn continues elsewhere with the tokens that it has.

verl's asynchronous client (workers/rollout/llm_server.py:225, 0.9.1) joins the requests that a weight update
interrupted into one turn. Here it joins a request whose server died in the same way. Tokens, log-probs and versions
that came back are kept; tool calls lie between turns and are not repeated.
"""

import asyncio
import logging
import os
import time
from typing import Any

from ray.exceptions import ActorUnavailableError
from verl.workers.rollout.replica import TokenOutput

from verl_ext.fleet.routing import ROUTER_S, server_of
from verl_ext.rollout.client import AsyncTurnClient, Request
from verl_ext.rollout.liveness import GONE
from verl_ext.settings import HealthSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

FAILED = "server_failed"  # extra field of an output that its server did not finish: another server continues it
GAVE_UP = "error"  # stop reason of a turn that makes the rollout an infrastructure failure (rollout/loop.py)
PAUSE_S = 0.5  # until a request asks again for a server, or asks an unreachable one again
MAX_UNREACHED = 20  # consecutive tries that did not reach the server; one more counts as a lost request


class NoServerLeft(Exception):
    """No server was available for `retool.fleet.health.wait_s`, or the router is gone."""


class _Request(Request):
    """One request of a turn, whose server may die."""

    limits: HealthSettings

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        deadline = time.monotonic() + self.limits.wait_s
        while True:
            left = max(PAUSE_S, deadline - time.monotonic())
            try:
                async with asyncio.timeout(left):  # `wait_for` would run it in a separate context (balancer.py)
                    name, server = await super()._acquire_server(request_id, **extra)
            except TimeoutError:
                raise NoServerLeft(f"the router did not answer for {self.limits.wait_s:g} s") from None
            except (RuntimeError, *GONE) as error:  # GONE: the router
                if isinstance(error, RuntimeError) and "No available servers" not in str(error):  # verl's router.py:196
                    raise
                if isinstance(error, GONE) and not isinstance(error, ActorUnavailableError):
                    raise NoServerLeft(f"the router of the rollout servers is gone: {error!r}") from error
                if time.monotonic() > deadline:
                    raise NoServerLeft(f"no rollout server answered for {self.limits.wait_s:g} s: {error!r}") from error
                await asyncio.sleep(PAUSE_S)
            else:
                return name, server

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Generate as verl's (:99). If the server fails: `aborted` with the tokens it returned, or `GAVE_UP`."""
        try:
            output = await self._reach(request_id, **kwargs)
        except NoServerLeft as error:
            logger.error("A rollout failed: %s. See the log of the rollout servers.", error)
            return TokenOutput(token_ids=[], stop_reason=GAVE_UP)
        except GONE as error:  # its process or node is gone, with the tokens of this request
            output, why = TokenOutput(token_ids=[], stop_reason="aborted"), repr(error)
        else:
            why = "its engine is dead"
            if not output.extra_fields.pop(FAILED, False):
                return output
        turn = self._turns[request_id]
        name = server_of(turn.server)
        turn.lost.append(name)
        lost = len(turn.lost)
        await self._leave_out(name)  # before anyone's next request
        logger.warning(
            "Server %s failed (%s). A request continues on another server with its %d tokens (attempt %d of %d).",
            *(name, why, len(output.token_ids), lost, self.limits.attempts),
        )
        if lost >= self.limits.attempts:
            output.stop_reason = GAVE_UP
        return output

    async def _leave_out(self, name: str) -> None:
        """Take a server out of the router. If the router stays out of reach, the watch (recovery.py) does it later."""
        for _ in range(MAX_UNREACHED):
            try:
                return await asyncio.wait_for(self._load_balancer.remove_servers.remote(server_ids=[name]), ROUTER_S)
            except TimeoutError:  # it hangs; the next request says so
                return None
            except ActorUnavailableError as error:
                logger.warning("The router cannot be reached. Trying again in %g s: %r", PAUSE_S, error)
                await asyncio.sleep(PAUSE_S)
            except GONE:  # the next request says so
                return None

    async def _reach(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Call verl's `generate`, and repeat it while Ray cannot reach the server, which lives and stays in the router.

        Such a try does not count as a lost server. Its tokens are lost, because the server cannot hand them back.
        """
        for _ in range(MAX_UNREACHED):
            try:
                return await super().generate(request_id, **kwargs)
            except ActorUnavailableError as error:
                logger.warning("A server cannot be reached. Its request is sent again in %g s: %r", PAUSE_S, error)
                await asyncio.sleep(PAUSE_S)
        return await super().generate(request_id, **kwargs)


class FleetClient(AsyncTurnClient, _Request):
    """The client whose turns outlive their servers; see the module's docstring. A turn ends with `GAVE_UP` if
    `limits.attempts` servers died or none is left."""

    def __init__(self, *args: Any, limits: HealthSettings, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.limits = limits
