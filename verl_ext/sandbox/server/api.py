"""The routes of the sandbox server, and who may send requests.

Bodies are in request.py, answers in answers.py, the routes of boxes in box_api.py.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from verl_ext.sandbox.limits import SERVER_NAME
from verl_ext.sandbox.server.answers import MAX_ERRORS, NO_ANSWER, answer, cut, overloaded, reject
from verl_ext.sandbox.server.body import Bodies, HeldBytesError
from verl_ext.sandbox.server.box_api import BoxRoutes
from verl_ext.sandbox.server.boxes import Boxes
from verl_ext.sandbox.server.clients import client_of, without_quotations
from verl_ext.sandbox.server.connection import LostProgramError, SandboxError
from verl_ext.sandbox.server.metrics import Metrics
from verl_ext.sandbox.server.pool import CONTROL, Pool, QueueTimeoutError, wrong_with_control
from verl_ext.sandbox.server.request import MAX_RENEWED, RenewRequest, RunCodeRequest
from verl_ext.sandbox.server.sessions import SessionEndedError, SessionLimitError, Sessions

logger = logging.getLogger(__name__)

# verl's call_sandbox_api gives up after compile_timeout + run_timeout + 10 s and retries only on 504, so a request may
# wait compile_timeout (python compiles nothing) and half of the 10 s.
QUEUE_GRACE_S = 5.0
PING_QUEUE_S = 10.0  # a queue that lets no program through for this long is not healthy

Execute = Callable[[Any, web.Request], Awaitable[tuple[web.StreamResponse, str]]]


def make_app(pool: Pool, sessions: Sessions, boxes: Boxes, *, token: str | None = None) -> web.Application:
    """Return the application that serves `pool`.

    Args:
        token: what every request must carry as `Authorization: Bearer ...`; None: nothing.
    """
    routes = Routes(pool, sessions, boxes, token)
    of_boxes = BoxRoutes(boxes, routes.handle)
    app = web.Application(middlewares=[routes.check_sender])
    app.on_response_prepare.append(_name_server)
    app.add_routes(
        [
            web.post("/run_code", routes.run_code),
            web.get("/v1/ping", routes.ping),
            web.get("/metrics", routes.get_metrics),
            web.post("/v1/sessions", routes.renew_sessions),
            web.delete("/v1/sessions/{session_id}", routes.end_session),
            web.post("/v1/boxes/{box_id}", of_boxes.open),
            web.post("/v1/boxes/{box_id}/run", of_boxes.run),
            web.post("/v1/boxes/{box_id}/seal", of_boxes.seal),
            web.delete("/v1/boxes/{box_id}", of_boxes.end),
        ]
    )
    return app


class Routes:
    """The handlers of one application; see `make_app`."""

    def __init__(self, pool: Pool, sessions: Sessions, boxes: Boxes, token: str | None) -> None:
        self._pool, self._sessions, self._boxes, self._token = pool, sessions, boxes, token
        self._metrics, self._bodies = Metrics(pool, sessions, boxes), Bodies()
        self._health: asyncio.Task | None = None  # one check for all pings that arrive while it runs

    @web.middleware
    async def check_sender(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        client = client_of(request)
        client.is_chunked = "Transfer-Encoding" in request.headers
        if "Origin" in request.headers:  # a page in a browser on this machine, where loopback protects nothing
            return web.json_response({"detail": "requests from web pages are refused"}, status=403)
        if self._token is not None:
            sent = request.headers.get("Authorization", "")
            if not hmac.compare_digest(os.fsencode(sent), os.fsencode(f"Bearer {self._token}")):
                headers = {"WWW-Authenticate": "Bearer"}
                body = {"detail": "expected the header Authorization: Bearer <token>"}
                return web.json_response(body, status=401, headers=headers)
        client.works()
        try:
            return await handler(request)
        finally:
            client.waits()

    async def run_code(self, http_request: web.Request) -> web.StreamResponse:
        return await self.handle(http_request, RunCodeRequest, self._execute)

    async def handle(self, http_request: web.Request, kind: type[BaseModel], execute: Execute) -> web.StreamResponse:
        """Read a request of a kind, execute it, and count its outcome."""
        outcome = "hung_up"  # unless there is an answer
        try:
            response, outcome = await self._handle(http_request, kind, execute)
            return response
        except web.HTTPException:  # 408, 413: a body that is too slow, or over the limit
            outcome = "rejected"
            raise
        except ConnectionError:  # the client hung up while it was sent the answer
            raise
        except Exception:  # a bug, or no descriptors left: the answer is 500
            outcome = "sandbox_error"
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()

    async def _handle(
        self, http_request: web.Request, kind: type[BaseModel], execute: Execute
    ) -> tuple[web.StreamResponse, str]:
        client = client_of(http_request)
        client.waits()
        async with AsyncExitStack() as stack:
            try:
                body = self._bodies.read(http_request, kind.model_validate)
                request = await stack.enter_async_context(body)
            except ValidationError as exc:
                errors = exc.errors(include_url=False, include_input=False, include_context=False)[:MAX_ERRORS]
                return reject(*(error | {"loc": ["body", *map(cut, error["loc"])]} for error in errors))
            except (ValueError, web.RequestPayloadError) as exc:
                return reject({"type": "json_invalid", "loc": ["body"], "msg": f"JSON: {exc}"})
            except HeldBytesError as exc:
                return overloaded(exc, 503)
            client.works()
            try:
                return await execute(request, http_request)
            except QueueTimeoutError as exc:
                return overloaded(exc, 504)
            except SessionLimitError as exc:
                return overloaded(exc, 503)
            except SandboxError as exc:
                logger.error("%s", without_quotations(exc))
                why = {"message": str(exc), "lost": isinstance(exc, LostProgramError)}
                return web.json_response(NO_ANSWER | why), "sandbox_error"

    async def _execute(self, request: RunCodeRequest, http_request: web.Request) -> tuple[web.StreamResponse, str]:
        if request.session_id is not None and not self._sessions.max_sessions:
            why = "this server allows no sessions: start it without --max-sessions 0"
            return reject({"type": "value_error", "loc": ["body", "session_id"], "msg": why})
        budget_s = request.queue_timeout or request.compile_timeout + QUEUE_GRACE_S
        try:
            if request.session_id is None:
                result, queue_time = await self._pool.run(vars(request), queue_timeout_s=budget_s)
            else:
                result, queue_time = await self._sessions.run(
                    request.session_id, vars(request), queue_timeout_s=budget_s
                )
        except SessionEndedError as exc:
            return reject({"type": "value_error", "loc": ["body", "session_id"], "msg": str(exc)})
        self._metrics.queue_time.observe(queue_time)
        self._metrics.run_time.observe(result["execution_time"])
        if request.session_id is not None:
            result["session"] = {"call": result.pop("call"), "alive": result["alive"], "idle_s": self._sessions.idle_s}
        return await answer(result, queue_time, http_request)

    async def ping(self, _: web.Request) -> web.Response:
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(check_health(self._pool))
        why = await asyncio.shield(self._health)
        body = {"status": "error" if why else "ok", "message": why or "", "layers": self._pool.workers.layers}
        body |= {"max_sessions": self._sessions.max_sessions, "session_idle_s": self._sessions.idle_s}
        refusal = self._boxes.refusal()
        body |= {"max_boxes": 0 if refusal else self._boxes.max_sessions, "no_boxes": refusal}
        return web.json_response(body, status=503 if why else 200)

    async def get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def renew_sessions(self, http_request: web.Request) -> web.Response:
        """Renew the leases of the sessions and boxes that are named in the body; say how many of them exist."""
        client_of(http_request).waits()
        try:
            async with self._bodies.read(http_request, RenewRequest.model_validate) as request:
                ids = request.session_ids
                return web.json_response({"renewed": self._sessions.renew(ids) + self._boxes.renew(ids)})
        except (ValueError, web.RequestPayloadError):  # a ValidationError is a ValueError, and may quote an id
            detail = f'expected {{"session_ids": [...]}} with at most {MAX_RENEWED} ids'
            return web.json_response({"detail": detail}, status=422)
        except HeldBytesError as exc:
            return overloaded(exc, 503)[0]

    async def end_session(self, http_request: web.Request) -> web.Response:
        given_up = "given_up" in http_request.query
        ended = await self._sessions.end(http_request.match_info["session_id"], given_up=given_up)
        return web.json_response({"ended": ended}, status=200 if ended else 404)


async def check_health(pool: Pool) -> str | None:
    """Send the control program through the queue; return None if it ran as it should, else what it did instead."""
    try:
        result, _ = await pool.run(CONTROL, queue_timeout_s=PING_QUEUE_S)
        return wrong_with_control(result)
    except QueueTimeoutError as exc:
        return f"overloaded: {exc}; {pool.running} requests run and {pool.waiting} wait"
    except SandboxError as exc:
        return str(exc)


async def _name_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER_NAME
