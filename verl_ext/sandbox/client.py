"""Async client of one or more sandbox servers. Knows HTTP, so that the agent loop and the tools need not.

aiohttp rather than httpx, whose calls cost much more CPU when many are in flight.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import aiohttp

# Beyond queueing and running, before an attempt counts as lost. Above the server's own grace (pool.ANSWER_GRACE_S),
# so that it is the server that reports a lost program.
ANSWER_GRACE_S = 8.0
MAX_BACKOFF_S = 10.0


@dataclass(frozen=True)
class RunResult:
    """What became of one program.

    `ok`: it ended with exit code 0. `code_error`: it ended with another. `timeout`: it was killed at its time limit;
    stdout and stderr hold what it had printed. `sandbox_failure`: the sandbox failed, the code is not to blame; the
    output is empty and `message` says what happened.
    """

    status: Literal["ok", "code_error", "timeout", "sandbox_failure"]
    stdout: str
    stderr: str
    return_code: int | None  # -N after signal N; None after a timeout or a sandbox failure
    queue_s: float  # waited for a free slot of this client and for a worker of the server, in the last attempt
    run_s: float  # the program ran
    attempts: int  # requests sent
    message: str  # empty unless sandbox_failure


class SandboxClient:
    """Runs Python on sandbox servers; usable from any number of tasks of one event loop.

    Args:
        urls: base URLs such as "http://127.0.0.1:8080"; each call goes to the one with the fewest calls in flight,
            and after a failure to another.
        max_concurrency: calls in flight from this client, to all servers together; further ones wait.
        max_attempts: requests per call; only the world's errors are tried again (connection, 408, 429, 5xx,
            SandboxError, an answer that cannot be read).
        backoff_s: pause before the second attempt; doubles each time, with jitter, up to 10 s.
        queue_timeout_s: what a call may take on top of the program's own time limit, for waiting and trying again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_concurrency: int = 64,
        max_attempts: int = 4,
        backoff_s: float = 0.25,
        queue_timeout_s: float = 60.0,
    ) -> None:
        if isinstance(urls, str) or not urls or not all(map(_is_http_url, urls)):
            raise ValueError(f"urls: expected a list of URLs such as ['http://127.0.0.1:8080'], got {urls!r}")
        if max_concurrency < 1 or max_attempts < 1:
            raise ValueError(f"expected at least 1, got {max_concurrency=}, {max_attempts=}")
        self._urls = [url.rstrip("/") for url in urls]
        self._in_flight = [0] * len(self._urls)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._queue_timeout_s = queue_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def run(
        self, code: str, *, timeout_s: float = 30, memory_limit_mb: int = 1024, stdin: str | None = None
    ) -> RunResult:
        """Execute `code` as `python main.py` would. Returns within timeout_s + queue_timeout_s, whatever happens.

        Args:
            timeout_s: wall-clock limit of the program, > 0.
            memory_limit_mb: address space of the program; <= 0: no limit.
        Raises:
            ValueError: a server rejects the request as such (HTTP 4xx): wrong URL or argument, no use in retrying.
        """
        deadline = time.monotonic() + timeout_s + self._queue_timeout_s
        body = {
            "code": code,
            "language": "python",
            "run_timeout": timeout_s,
            "memory_limit_MB": memory_limit_mb,
            "stdin": stdin,
        }
        failure = _WorldError("no attempt was made")
        failed_servers: set[int] = set()  # by this call; tried again only when every other has failed, too
        attempts = 0
        while attempts < self._max_attempts:
            if attempts:
                pause_s = min(self._backoff_s * 2 ** (attempts - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
                pause_s = max(pause_s, failure.retry_after_s)
                if time.monotonic() + pause_s + timeout_s >= deadline:
                    failure = _WorldError(f"{failure}; no time left to try again")
                    break
                await asyncio.sleep(pause_s)
            waited_from = time.monotonic()
            try:
                async with asyncio.timeout(deadline - waited_from):
                    await self._slots.acquire()
            except TimeoutError:
                failure = _WorldError(f"no free slot of this client for {time.monotonic() - waited_from:.1f} s")
                break
            try:
                waited_s = time.monotonic() - waited_from
                attempts += 1
                server = self._least_busy(failed_servers)
                return await self._attempt(server, body, deadline, waited_s, attempts)
            except _WorldError as exc:
                failure = exc
                failed_servers.add(server)
            finally:
                self._slots.release()
        message = f"sandbox failed after {attempts} attempt(s): {failure}"
        return RunResult("sandbox_failure", "", "", None, 0.0, 0.0, attempts, message)

    async def _attempt(self, server: int, body: dict, deadline: float, waited_s: float, attempt: int) -> RunResult:
        """One request to one server; raises _WorldError when that is worth another attempt."""
        url = f"{self._urls[server]}/run_code"
        # An equal share of the waiting time that is left for this attempt and each possible later one.
        spare_s = deadline - time.monotonic() - body["run_timeout"]
        queue_s = max(spare_s / (self._max_attempts - attempt + 1), 0.01)
        timeout_s = min(queue_s + body["run_timeout"] + ANSWER_GRACE_S, deadline - time.monotonic())
        self._in_flight[server] += 1
        try:
            async with self._open_session().post(
                url,
                json=body | {"queue_timeout": queue_s},
                timeout=aiohttp.ClientTimeout(total=max(timeout_s, 0.01)),
            ) as response:
                status, headers, content = response.status, response.headers, await response.read()
        except TimeoutError as exc:
            raise _WorldError(f"{url} did not answer within {timeout_s:.1f} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise _WorldError(f"{url}: {exc or type(exc).__name__}") from exc
        finally:
            self._in_flight[server] -= 1
        if status != 200:
            text = content.decode(errors="replace")[:500]
            if 400 <= status < 500 and status not in (408, 429):
                raise ValueError(f"{url} rejected the request with HTTP {status}: {text}")
            raise _WorldError(f"{url}: HTTP {status}: {text}", _retry_after_s(headers))
        return _parse(url, content, waited_s, attempt)

    def _least_busy(self, failed: set[int]) -> int:
        """A server with the fewest calls in flight, at random among equals; a failed one only if all have failed."""
        candidates = set(range(len(self._urls))) - failed or set(range(len(self._urls)))
        fewest = min(self._in_flight[server] for server in candidates)
        return random.choice([server for server in candidates if self._in_flight[server] == fewest])

    def _open_session(self) -> aiohttp.ClientSession:
        """Created on the first call, since it belongs to the event loop that is running then."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def aclose(self) -> None:
        """Close the connections; later calls open new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


class _WorldError(Exception):
    """The sandbox or the way to it failed; `retry_after_s` is what the server asked to wait."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _is_http_url(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0  # its other form, a date, is not used by sandboxes


def _parse(url: str, content: bytes, waited_s: float, attempts: int) -> RunResult:
    """SandboxFusion's answer as a RunResult; raises _WorldError for SandboxError and for what is not such an answer."""
    try:
        answer = json.loads(content)
        if answer["status"] == "SandboxError":
            raise _WorldError(f"{url}: SandboxError: {answer['message']}")
        result = answer["run_result"]
        if result["status"] == "TimeLimitExceeded":
            status = "timeout"
        else:
            status = {"Success": "ok", "Failed": "code_error"}[answer["status"]]
        return RunResult(
            status=status,
            stdout=result["stdout"] or "",
            stderr=result["stderr"] or "",
            return_code=result["return_code"],
            queue_s=waited_s + (answer.get("queue_time") or 0.0),
            run_s=result["execution_time"] or 0.0,
            attempts=attempts,
            message="",
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise _WorldError(f"{url}: expected a /run_code answer, got {content[:200]!r} ({exc!r})") from exc
