"""A server on 127.0.0.1 that speaks OpenEnv's protocol, as its own server does, in a thread."""

import asyncio
import json
import threading
from typing import Any

from aiohttp import WSMsgType, web

ACTION = {
    "description": "Walk on a line.",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object"},
        "steps": {"type": "integer", "description": "how far"},
    },
    "required": ["steps"],
}


class Server:
    """A walk to 3 on a line; each connection has its own place. `sessions` are those that are open."""

    def __init__(self) -> None:
        self.sessions: set[Any] = set()
        self.resets: list[dict] = []
        self.schema: Any = {"action": ACTION, "observation": {}, "state": {}}
        self.healthy, self.full, self.url = True, False, ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/ws", self.session), web.get("/schema", self.tell), web.get("/health", self.health)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(self._cancel_the_rest())
        self._loop.close()

    async def _cancel_the_rest(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.schema) if self.schema else web.Response(status=404)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"}, status=200 if self.healthy else 503)

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.full:
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.sessions.add(socket)
        place = 0
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    break
                if asked["type"] == "reset":
                    self.resets.append(asked["data"])
                    place = asked["data"].get("start", 0)
                    if place == "nowhere":
                        errors = [{"loc": ["start"], "msg": "Input should be a number"}]
                        data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                        await socket.send_json({"type": "error", "data": data})
                        continue
                    await self.observe(socket, place, None)
                else:
                    place = await self.step(socket, place, asked["data"])
        finally:
            self.sessions.discard(socket)
        return socket

    async def step(self, socket: web.WebSocketResponse, place: int, action: dict) -> int:
        steps = action.get("steps", 1)
        odd = {"drop": socket.close, "wait": lambda: asyncio.sleep(0.6), "babble": lambda: socket.send_str("[1")}
        if str(steps) in odd:
            await odd[str(steps)]()
        elif set(action) - {"steps"}:
            errors = [{"loc": [sorted(set(action) - {"steps"})[0]], "msg": "Extra inputs are not permitted"}]
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            await socket.send_json({"type": "error", "data": data})
        elif steps == 0:
            await socket.send_json({"type": "error", "data": {"message": "no step", "code": "EXECUTION_ERROR"}})
        elif steps == "broken":
            await socket.send_json({"type": "error", "data": {"message": "gone", "code": "SESSION_ERROR"}})
        elif isinstance(steps, dict):
            await socket.send_str(json.dumps({"type": "observation", "data": {"observation": {"x": 1}} | steps}))
        else:
            place += steps
            await self.observe(socket, place, max(0.0, 1 - abs(3 - place) / 3))
        return place

    async def observe(self, socket: web.WebSocketResponse, place: int, reward: float | None) -> None:
        seen = {"text": f"You are at {place}.", "hint": None}
        await socket.send_json(
            {"type": "observation", "data": {"observation": seen, "reward": reward, "done": place == 3}}
        )
