"""The routes of boxes (boxes.py), for `Box` of the client (sandbox/box.py).

Opening one answers {idle_s}; running a command what /run_code answers; sealing {archive: a tar.gz in base64, dropped,
strays, lost}; `archive` is "" if the box was lost. Each answers a SandboxError, as /run_code
does, if the box is not there or the sandbox failed, and HTTP 422 if what was asked for may not be.
"""

import binascii
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from verl_ext.sandbox.server.answers import NO_ANSWER, answer, reject
from verl_ext.sandbox.server.boxes import Boxes, BoxRefusedError
from verl_ext.sandbox.server.large import in_turn
from verl_ext.sandbox.server.request import OpenBoxRequest, RunBoxRequest, SealBoxRequest
from verl_ext.sandbox.server.sessions import SessionEndedError

Answered = tuple[web.StreamResponse, str]


class BoxRoutes:
    """Handlers.

    Args:
        handle: of `api.Routes`: reads the request, and answers what every request can meet.
    """

    def __init__(self, boxes: Boxes, handle: Callable[..., Awaitable[web.StreamResponse]]) -> None:
        self._boxes, self._handle = boxes, handle

    async def open(self, http_request: web.Request) -> web.StreamResponse:
        return await self._handle_in_box(http_request, OpenBoxRequest, self._open)

    async def run(self, http_request: web.Request) -> web.StreamResponse:
        return await self._handle_in_box(http_request, RunBoxRequest, self._run)

    async def seal(self, http_request: web.Request) -> web.StreamResponse:
        return await self._handle_in_box(http_request, SealBoxRequest, self._seal)

    async def end(self, http_request: web.Request) -> web.Response:
        given_up = "given_up" in http_request.query
        ended = await self._boxes.end(http_request.match_info["box_id"], given_up=given_up)
        return web.json_response({"ended": ended}, status=200 if ended else 404)

    async def _handle_in_box(
        self, http_request: web.Request, kind: type[BaseModel], execute: Callable[..., Awaitable[Answered]]
    ) -> web.StreamResponse:
        async def in_box(request: Any, http_request: web.Request) -> Answered:
            try:
                return await execute(http_request.match_info["box_id"], request, http_request)
            except BoxRefusedError as exc:
                return reject({"type": "value_error", "loc": ["body"], "msg": str(exc)})
            except SessionEndedError as exc:
                return web.json_response(NO_ANSWER | {"message": f"no box: {exc}"}), "sandbox_error"

        return await self._handle(http_request, kind, in_box)

    async def _open(self, box_id: str, request: OpenBoxRequest, _: web.Request) -> Answered:
        await self._boxes.open(box_id, vars(request), queue_timeout_s=request.queue_timeout)
        return web.json_response({"status": "Success", "idle_s": self._boxes.idle_s}), "ok"

    async def _run(self, box_id: str, request: RunBoxRequest, http_request: web.Request) -> Answered:
        result, queue_time = await self._boxes.run(box_id, vars(request), queue_timeout_s=request.queue_timeout)
        result["session"] = {"alive": result["alive"], "idle_s": self._boxes.idle_s}
        return await answer(result, queue_time, http_request)

    async def _seal(self, box_id: str, request: SealBoxRequest, _: web.Request) -> Answered:
        report, archive = await self._boxes.seal(box_id, vars(request), queue_timeout_s=request.queue_timeout)
        text = await in_turn(len(archive), _with_archive, report, archive)
        return web.json_response(text=text), "ok"


def _with_archive(report: dict[str, Any], archive: bytearray) -> str:
    encoded = binascii.b2a_base64(archive, newline=False).decode()
    return json.dumps({"status": "Success", **report, "archive": encoded})
