"""Async client of one or more sandbox servers. It knows HTTP, so that the agent loop and the tools need not.

It uses aiohttp, because with many calls in flight httpx takes many times the CPU (scripts/bench/sandbox.py).
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from verl_ext.sandbox.leases import Session, Sessions
from verl_ext.sandbox.limits import ANSWER_GRACE_S, MAX_ATTEMPTS, SERVER_NAME, TOKEN_VARIABLE
from verl_ext.sandbox.result import RunResult, Status
from verl_ext.sandbox.servers import Servers, doubled

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

END_TIMEOUT_S = 5.0
MAX_PAUSE_S = 2.0  # before another attempt
TELL_EVERY_S = 60.0  # of an outage


class SandboxClient:
    """Runs Python on sandbox servers; usable from any number of tasks of one event loop.

    Whose fault it is that a program was lost is the server's decision, which its answer tells. A server that does not
    answer is an infrastructure failure.

    Args:
        urls: base URLs such as "http://127.0.0.1:8080"; each call goes to the one with the fewest calls in flight,
            and after a failure to another. One that refuses calls rests for as long as a call pauses; one that does
            not answer rests longer, by the time that the program may run.
        max_concurrency: calls in flight from this client, to all servers together; further ones wait.
        max_attempts: requests per call; only infrastructure failures are tried again (connection, 408, 429, 5xx,
            SandboxError, an answer that cannot be read). If servers have answered before, a call goes on until its
            time runs out: restarting a server costs no call. This does not hold in a session: its state is gone.
        backoff_s: pause before the second attempt; doubles each time, with jitter, up to MAX_PAUSE_S.
        queue_timeout_s: time that a call may take beyond the program's own limit, to wait and to try again.
        acquire: awaited before every request of a call, such as `RateLimit.acquire`; waiting there counts as queueing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_concurrency: int = 64,
        max_attempts: int = MAX_ATTEMPTS,
        backoff_s: float = 0.25,
        queue_timeout_s: float = 60.0,
        acquire: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if isinstance(urls, str) or not urls or not all(map(_is_http_url, urls)):
            raise ValueError(f"urls: expected a list of URLs such as ['http://127.0.0.1:8080'], got {urls!r}")
        if max_concurrency < 1 or max_attempts < 1:
            raise ValueError(f"expected at least 1, got {max_concurrency=}, {max_attempts=}")
        self._urls = [url.rstrip("/") for url in urls]
        self.servers, self._backoff_s = Servers(len(urls), backoff_s), backoff_s
        self._slots = asyncio.Semaphore(max_concurrency)
        self.max_attempts, self.queue_timeout_s, self._acquire = max_attempts, queue_timeout_s, acquire
        self._headers = authorization()
        self._http: aiohttp.ClientSession | None = None
        self.sessions = Sessions(self._renew)
        self._tells_from = 0.0

    async def run(
        self,
        code: str,
        *,
        timeout_s: float = 30,
        memory_limit_mb: int = 1024,
        stdin: str | None = None,
        echo_last_expression: bool = False,
        session_id: str | None = None,
    ) -> RunResult:
        """Execute `code` as `python main.py` would. Returns within timeout_s + queue_timeout_s, whatever happens.

        Args:
            timeout_s: wall-clock limit of the program, > 0.
            memory_limit_mb: address space of the program; <= 0: no limit.
            echo_last_expression: print what a last bare expression gives, as a Python prompt does.
            session_id: unique name, such as a UUID, of a session whose earlier calls `code` is to see. The session is
                on one server, and a call that may have run is not sent again. Such a call is a `sandbox_failure` and
                ends the session, whose name is then used up; the same holds if the server no longer has it. Until
                `end_session`, this client renews the session's lease: waiting for the next call does not end it.
        Raises:
            ValueError: a server rejects the request itself (HTTP 4xx: a wrong URL or argument), or it is not our
                server, and so cannot echo or keep sessions.
        """
        deadline = time.monotonic() + timeout_s + self.queue_timeout_s
        body: dict[str, Any] = {
            "code": code,
            "language": "python",
            "run_timeout": timeout_s,
            "memory_limit_MB": memory_limit_mb,
            "stdin": stdin,
        }
        if echo_last_expression:
            body["echo_last_expression"] = True
        if session_id is None:
            return await self._run(body, deadline, None)
        body["session_id"] = session_id
        session = self.sessions.setdefault(session_id, Session())
        try:
            async with asyncio.timeout(self.queue_timeout_s) as waiting, session.lock:
                waiting.reschedule(None)
                if self.sessions.get(session_id) is not session:
                    return failed("an earlier call ended the session")
                result = await self._run(body, deadline, session)
                if result.status == "sandbox_failure":
                    await self.end_session(session_id, timeout_s=deadline - time.monotonic())
                return result
        except asyncio.CancelledError:
            session.is_cut = True
            raise
        except TimeoutError:
            return failed(f"an earlier call of the session still runs after {self.queue_timeout_s:g} s")

    async def _run(self, body: dict[str, Any], deadline: float, session: Session | None) -> RunResult:
        """Make all attempts of one call; `deadline` is by time.monotonic()."""
        timeout_s, failure, note = body["run_timeout"], InfrastructureFailure("no attempt was made"), ""
        failed_servers: set[int] = set()  # in this call; tried again only once every other has also failed
        server = attempts = 0
        while True:
            if attempts:
                pause_s = self.pause_s(attempts, failure)
                if time.monotonic() + pause_s + timeout_s >= deadline:
                    note = "; no time left to try again"
                    break
                if attempts >= self.max_attempts:
                    is_dead = session and session.calls and not failure.is_busy  # and with it the state
                    if is_dead or not (failure.is_busy or self.servers.have_answered):
                        break
                    self._tell(failure)
                await asyncio.sleep(pause_s)
            try:
                async with self.turn(deadline - timeout_s) as waited_s:
                    attempts += 1
                    if not failure.is_lost:  # else the same server decides
                        server = self.servers.least_busy(failed_servers)
                    if session:
                        session.server = server = server if session.server is None else session.server
                    result = await self._attempt(server, body, deadline, waited_s, attempts, session)
                    self.servers.answers(server)
                    return result
            except TimeoutError as exc:  # no turn
                failure = InfrastructureFailure(str(exc))
                break
            except InfrastructureFailure as exc:
                failure = exc
                failed_servers.add(server)
                if isinstance(exc.__cause__, TimeoutError):
                    self.servers.refuses(server, timeout_s)
                elif not exc.may_have_run:
                    self.servers.refuses(server)
                if session and exc.may_have_run:
                    break
                if session and not session.calls:  # no server has it yet: another may take it
                    session.server = None
        result = failed(f"sandbox failed after {attempts} attempt(s): {failure}{note}", attempts)
        return replace(result, program_lost=failure.is_lost, found_no_place=failure.is_busy)

    def pause_s(self, attempts: int, failure: "InfrastructureFailure") -> float:
        """Return how long to wait before another attempt."""
        pause_s = doubled(self._backoff_s, attempts - 1, MAX_PAUSE_S) * random.uniform(0.5, 1.5)
        return max(pause_s, failure.retry_after_s)

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[float]:
        """Wait until another request may go, and count it as in flight for the length of the block.

        Yields:
            the seconds waited.
        Raises:
            TimeoutError: no request could go by `deadline`; the message says why.
        """
        started, obstacle = time.monotonic(), "no free slot of this client"
        try:
            async with asyncio.timeout(deadline - started) as waiting, self._slots:
                obstacle = "the rate limit let no request through"
                if self._acquire:
                    await self._acquire()
                waiting.reschedule(None)
                yield time.monotonic() - started
        except TimeoutError:
            raise TimeoutError(f"{obstacle} for {time.monotonic() - started:.1f} s") from None

    def _tell(self, failure: Exception) -> None:
        if time.monotonic() >= self._tells_from:
            self._tells_from = time.monotonic() + TELL_EVERY_S
            logger.warning("Calls try on until their time runs out, because no sandbox takes them: %s", failure)

    async def end_session(self, session_id: str, *, timeout_s: float = END_TIMEOUT_S) -> None:
        """Have the server end a session, which it would do by itself after a while; ignores a failure."""
        session = self.sessions.drop(session_id)
        if session is None or session.server is None:
            return
        given_up = "?given_up" if session.is_cut or session.lock.locked() else ""  # a call may be on its way
        await self.delete(session.server, f"/v1/sessions/{quote(session_id, safe='')}{given_up}", timeout_s)

    async def delete(self, server: int, path: str, timeout_s: float = END_TIMEOUT_S) -> None:
        """Have a server end what it would end by itself after a while; ignores a failure."""
        timeout = aiohttp.ClientTimeout(total=min(max(timeout_s, 0.01), END_TIMEOUT_S))
        with contextlib.suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            async with self._open_http().delete(f"{self._urls[server]}{path}", timeout=timeout):
                pass

    async def _renew(self, server: int, session_ids: list[str]) -> None:
        """Have a server keep sessions that wait for their next call; that call finds out if this failed."""
        timeout = aiohttp.ClientTimeout(total=END_TIMEOUT_S)
        with contextlib.suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            body = {"session_ids": session_ids}
            async with self._open_http().post(f"{self._urls[server]}/v1/sessions", json=body, timeout=timeout):
                pass

    async def _attempt(
        self,
        server: int,
        body: dict[str, Any],
        deadline: float,
        waited_s: float,
        attempt: int,
        session: Session | None,
    ) -> RunResult:
        """Send one request to one server; raises InfrastructureFailure for a failure worth another attempt."""
        url = f"{self._urls[server]}/run_code"
        # The remaining waiting time is shared equally between this attempt and each possible later one.
        spare_s = deadline - time.monotonic() - body["run_timeout"]
        queue_s = max(spare_s / (max(self.max_attempts - attempt, 0) + 1), 0.01)
        timeout_s = max(min(queue_s + body["run_timeout"] + ANSWER_GRACE_S, deadline - time.monotonic()), 0.01)
        headers, content = await self.post(server, "/run_code", body | {"queue_timeout": queue_s}, timeout_s)
        if ("session_id" in body or "echo_last_expression" in body) and headers.get("Server") != SERVER_NAME:
            raise ValueError(
                f"{url} is answered by {headers.get('Server')!r}, but only {SERVER_NAME} (verl_ext.sandbox.server) has "
                "sessions and echoes a last expression. Use that server, or do without both."
            )
        result, there = parse(url, content, waited_s, attempt)
        if session:
            session.calls += 1
            self.sessions.renew_within(there["idle_s"])
            if there["call"] != session.calls:
                raise InfrastructureFailure(
                    f"{url} has lost the session: its call {session.calls} was call {there['call']} there"
                )
            if not there["alive"]:
                session.calls = 0
                result = replace(result, session_ended=True)
        return result

    async def post(
        self, server: int, path: str, body: dict[str, Any], timeout_s: float
    ) -> tuple[Mapping[str, str], bytes]:
        """Send a request to one server; return headers and content of the answer.

        Raises:
            ValueError: HTTP 4xx.
            InfrastructureFailure: no answer, or another HTTP status.
        """
        url = f"{self._urls[server]}{path}"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            with self.servers.request(server):
                async with self._open_http().post(url, json=body, timeout=timeout) as response:
                    status, headers, content = response.status, response.headers, await response.read()
        except aiohttp.ClientConnectorError as exc:
            raise InfrastructureFailure(f"{url}: {exc}", may_have_run=False) from exc
        except TimeoutError as exc:
            raise InfrastructureFailure(f"{url} did not answer within {timeout_s:.1f} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise InfrastructureFailure(f"{url}: {exc or type(exc).__name__}") from exc
        if status == 200:
            return headers, content
        text = content.decode(errors="replace")[:500]
        if 400 <= status < 500 and status not in (408, 429):
            raise ValueError(f"{url} rejected the request with HTTP {status}: {text}")
        may_have_run = status not in (429, 503, 504)
        is_busy = not may_have_run and headers.get("Server") == SERVER_NAME
        raise InfrastructureFailure(
            f"{url}: HTTP {status}: {text}", _retry_after_s(headers), may_have_run=may_have_run, is_busy=is_busy
        )

    def _open_http(self) -> aiohttp.ClientSession:
        """Return the HTTP session, made on the first call because it belongs to the event loop that runs then."""
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        return self._http

    async def aclose(self) -> None:
        """Close the connections, and renew no lease meanwhile; later calls open new ones."""
        self.sessions.stop()
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()


class InfrastructureFailure(Exception):
    """A failure of the sandbox or the way to it.

    Attributes:
        retry_after_s: the server's wish.
        is_lost: the server lost the program, and decides whose doing it was when it is asked again.
        is_busy: our server is well, and will take the call later.
    """

    def __init__(
        self,
        message: str,
        retry_after_s: float = 0.0,
        *,
        may_have_run: bool = True,
        is_lost: bool = False,
        is_busy: bool = False,
    ):
        super().__init__(message)
        self.retry_after_s, self.may_have_run, self.is_lost = retry_after_s, may_have_run, is_lost
        self.is_busy = is_busy


def failed(message: str, attempts: int = 0) -> RunResult:
    return RunResult("sandbox_failure", "", "", None, 0.0, 0.0, attempts, message)


def authorization() -> dict[str, str]:
    """Return the header with $SANDBOX_TOKEN, if that is set.

    Raises:
        ValueError: no header can carry the token. The message does not quote it.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()  # as the server does
    if not token.isprintable():
        raise ValueError("The sandbox's token contains line breaks or control characters. Correct SANDBOX_TOKEN.")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _is_http_url(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0  # sandboxes do not use its other form, a date


def parse(url: str, content: bytes, waited_s: float, attempts: int) -> tuple[RunResult, dict[str, Any]]:
    """Return SandboxFusion's answer as a RunResult, and our server's `session`, {} without one.

    Raises:
        InfrastructureFailure: it is a SandboxError, or not such an answer.
    """
    try:
        answer = json.loads(content)
        if answer["status"] == "SandboxError":
            raise InfrastructureFailure(f"{url}: SandboxError: {answer['message']}", is_lost=answer.get("lost", False))
        result = answer["run_result"]
        ends: dict[str, Status] = {"Success": "ok", "Failed": "code_error"}
        run = RunResult(
            status="timeout" if result["status"] == "TimeLimitExceeded" else ends[answer["status"]],
            stdout=result["stdout"] or "",
            stderr=result["stderr"] or "",
            return_code=result["return_code"],
            queue_s=waited_s + (answer.get("queue_time") or 0.0),
            run_s=result["execution_time"] or 0.0,
            attempts=attempts,
            message="",
        )
        return run, answer.get("session") or {}
    except (ValueError, KeyError, TypeError) as exc:
        raise InfrastructureFailure(f"{url}: expected a /run_code answer, got {content[:200]!r} ({exc!r})") from exc
