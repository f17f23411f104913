"""The environment `openenv`: a session with a server of OpenEnv over a WebSocket, without that package.

    retool.environment: {name: openenv, url: "http://127.0.0.1:8000"}

The model acts by the tool `act`, whose arguments are the fields of the server's action (`GET /schema`; without that,
one object `action`). It reads the observation. Written for OpenEnv 0.10 (`/ws`, with the messages `reset`, `step` and
`close`, and the answers `observation` and `error`); `state` and the server's own MCP messages are not used.
"""

import asyncio
import functools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from verl_ext.environments.base import Environment, Opening
from verl_ext.environments.rewards import check_success, finite, score_of
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import CallResult, Episode, Score
from verl_ext.protocols.base import Call, format_output

ACT = "act"
CLOSE_S = 5.0
MAX_MESSAGE = 100 << 20  # bytes, as the peer's own client
MAX_CHARS = 1_000_000  # of an observation that the model may read
_ACTION = {"type": "object", "properties": {"action": {"type": "object", "description": "the action"}}}
_OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # codes of errors that a step can cause


class OpenEnv(Environment):
    """An episode in one session of an OpenEnv server, which ends with the connection.

    An action that the server refuses, or that fails there, is the model's error. So is one that takes longer than
    `call_s` while the server's `/health` answers: it ends the session. Otherwise a server that does not answer, or
    closes the connection, is the infrastructure's failure. The score is the newest reward that an action had; an
    episode without one is a failure, since the model has not finished.

    Args:
        url: of the server, such as "http://127.0.0.1:8000".
        reset: arguments of `reset`, such as {seed: 1}; those of the row's `extra_info.openenv` come on top.
        success: the reward of a full success; acc is reward / success, within [0, 1]. None: the row's verifier scores.
        start_s, call_s: seconds until the first observation, and that an action may take.
    Raises:
        ValueError: a setting cannot be used.
    """

    writes_first = True

    call_s: float

    def __init__(
        self,
        config: Any = None,
        *,
        url: str,
        reset: Mapping[str, Any] | None = None,
        success: float | None = 1.0,
        start_s: float = 60.0,
        call_s: float = 60.0,
    ):
        super().__init__(config)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"openenv: url is {url!r}; expected one such as http://127.0.0.1:8000.")
        if not (start_s > 0 and call_s > 0):
            raise ValueError(f"openenv: start_s is {start_s} and call_s is {call_s}; expected numbers above 0.")
        check_success(success, "openenv")
        self._url, self._reset, self._success = url.rstrip("/"), dict(reset or {}), success
        self._start_s, self.call_s = start_s, call_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reward: float | None = None
        self._over: str | None = None  # why nothing can be done any more

    @classmethod
    def schemas(cls, config: Any = None, **settings: Any) -> dict[str, dict]:
        """Return the schema of `act`, for which it asks the server once in a process.

        Raises:
            ValueError: the server cannot be reached.
        """
        environment = cls(config, **settings)
        return {ACT: _schema(environment._url, environment._start_s)}

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin a session; its first observation follows the row's last message.

        Raises:
            ToolUnavailable: the server has no session to give, or does not answer.
            ValueError: it refuses the arguments of `reset`.
        """
        own = (task.get("extra_info") or {}).get("openenv") or {}
        reset = self._reset | {name: value for name, value in own.items() if value is not None}
        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self._start_s):
                self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE)
                kind, data = await self._ask({"type": "reset", "data": reset})
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise ToolUnavailable(f"openenv: {self._url}: {str(error) or repr(error)}") from error
        if kind == "error" and data.get("code") == "VALIDATION_ERROR":
            raise ValueError(f"openenv: {self._url} refuses reset({reset!r:.200}): {_complaint(data)}")
        if kind != "observation":
            raise ToolUnavailable(f"openenv: {self._url} answered reset with {_complaint(data)}")
        messages, seen = list(task["raw_prompt"]), _text(data.get("observation"))
        if messages and messages[-1]["role"] == "user":
            messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n\n{seen}".strip()}
        else:
            messages.append({"role": "user", "content": seen})
        return Opening(messages, {ACT: await asyncio.to_thread(_schema, self._url, self._start_s)})

    async def call(self, call: Call) -> CallResult:
        """Make one step, after those that were called before.

        Raises:
            ValueError: the reward is no finite number, or the episode ended without one.
        """
        async with self._turn:
            if self._over:
                return _told(f"ToolError: {self._over}")
            action = call.arguments.get("action") if _takes_any(self._url, self._start_s) else call.arguments
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self.call_s):
                    kind, data = await self._ask({"type": "step", "data": action or {}})
            except TimeoutError:
                self._over = "the episode is over, because an action took too long"
                if not await self._is_healthy():
                    return CallResult("", failure=f"{ACT}: {self._url}: no answer within {self.call_s:g} s")
                return _told(f"TimeoutError: no answer within {self.call_s:g} s; the episode is over", self.call_s)
            except (aiohttp.ClientError, OSError) as error:
                return CallResult("", failure=f"{ACT}: {self._url}: {str(error) or repr(error)}")
            run_s = time.perf_counter() - started
            if kind == "error" and data.get("code") in _OF_THE_ACTION:
                return _told(f"ToolError: {_complaint(data)}", run_s)
            if kind != "observation":
                return CallResult("", failure=f"{ACT}: {self._url} answered with {_complaint(data)}")
            is_last = data.get("done") and self._reward is None and self._success is not None
            if data.get("reward") is not None or is_last:
                self._reward = finite(data.get("reward"), f"openenv: {self._url}")
            if data.get("done"):
                self._over = "the episode is over"
            said = _text(data.get("observation")) + "\nThe episode is over." * bool(data.get("done"))
            return CallResult(format_output(said, ""), run_s=run_s)

    async def score(self, episode: Episode) -> Score | None:
        return score_of(self._reward, self._success, "openenv")

    async def close(self) -> None:
        """End the session."""
        socket, http, self._socket, self._http = self._socket, self._http, None, None
        with suppress(aiohttp.ClientError, OSError, ConnectionError):
            async with asyncio.timeout(CLOSE_S):
                if socket is not None:
                    await socket.send_json({"type": "close"})
                    await socket.close()
        if http is not None:
            await http.close()

    async def _ask(self, message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return type and data of the answer to a message.

        Raises:
            ConnectionError: the server has closed the connection, or does not speak the protocol.
        """
        if self._socket is None:
            raise ConnectionError("the session has ended")
        await self._socket.send_json(message)
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server ended the session ({answer.type.name}, {answer.data!r:.80})")
        try:
            said = json.loads(answer.data)
            return str(said["type"]), dict(said.get("data") or {})
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"expected a message of OpenEnv, got {answer.data!r:.200}") from error

    async def _is_healthy(self) -> bool:
        if self._http is None:
            return False
        with suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_S), self._http.get(f"{self._url}/health") as answer:
                return answer.status == 200
        return False


def _told(text: str, run_s: float = 0.0) -> CallResult:
    return CallResult(text[:MAX_CHARS], error=text.partition(":")[0], run_s=run_s)


def _complaint(data: Mapping[str, Any]) -> str:
    """Return what an error says, with what was wrong about each field."""
    errors = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in data.get("errors") or []]
    return "; ".join([f"{data.get('message')} ({data.get('code')})", *errors])


def _text(observation: Any) -> str:
    """Return an observation as text: that of its only field that is not empty, or JSON."""
    if isinstance(observation, Mapping):
        full = [value for value in observation.values() if value not in (None, "", [], {})]
        if len(full) == 1 and isinstance(full[0], str):
            return full[0][:MAX_CHARS]
    return json.dumps(observation, ensure_ascii=False)[:MAX_CHARS]


@functools.cache
def _schema(url: str, timeout_s: float) -> dict[str, Any]:
    """Return the schema of `act`, by the server's schema of an action if it tells one."""
    action: dict[str, Any] = {}
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{url}/schema", timeout=timeout_s) as answer:
            action = dict(json.load(answer).get("action") or {})
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise ValueError(f"openenv: {url}/schema answered HTTP {error.code}. Correct the url.") from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"openenv: {url}/schema cannot be read: {error}. Start the server, or correct the url."
        ) from error
    fields = {name: each for name, each in (action.get("properties") or {}).items() if name != "metadata"}
    parameters = _ACTION if not fields else {**action, "properties": fields}
    description = action.get("description") or "Act in the environment."
    return {"type": "function", "function": {"name": ACT, "description": description, "parameters": parameters}}


def _takes_any(url: str, timeout_s: float) -> bool:
    return _schema(url, timeout_s)["function"]["parameters"] is _ACTION
