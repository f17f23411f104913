"""Requests to OpenAI-compatible servers (vLLM, SGLang, ...) by the `openai` package's client, which also retries them.

The judge (verifiers/judge.py), the simulated user (environments/user.py) and the evaluation of a server
(rollout/servers.py) decide what a failure means.
"""

import asyncio
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from typing import Any


class RequestFailed(Exception):
    """A request failed at its last attempt; `status` is the HTTP status, None if no answer came."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Return whether the server refuses this request, so that asking again is no use."""
        return self.status is not None and self.status < 500 and self.status not in (408, 429)


class OpenAiEndpoint:
    """One server. Nothing from the environment applies to it: no OpenAI key, organisation or project, and no proxy.

    A failed connection, a time-out and HTTP 408, 409, 429 and 5xx are infrastructure failures: the client asks again
    after 0.5 s, then after twice as long each time (at most 8 s), or when the server's Retry-After says.

    Args:
        url: such as "http://127.0.0.1:8000/v1".
        api_key: "" sends the word EMPTY, as vLLM's documentation does, because the client cannot omit the key.
        timeout_s: of one attempt from connecting to the answer's last byte, the server's queue included.
        max_attempts: requests in all.
    """

    def __init__(self, url: str, *, api_key: str, timeout_s: float, max_attempts: int):
        self.url, self._api_key = url.rstrip("/"), api_key
        self._timeout_s, self.max_attempts = timeout_s, max_attempts
        self._client: Any = None
        self._first_model = ""

    async def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the server's JSON for a GET, or for a POST of `body`; a text if it answers with something else.

        The body is sent as JSON, not by `client.completions.create`, which looks at each token id of a prompt and takes
        milliseconds per thousand.

        Raises:
            RequestFailed: see above.
        """
        import openai

        self._client = self._client or self._connect()
        send = self._client.get if body is None else self._client.post
        try:
            return await send(path, cast_to=object, **({} if body is None else {"body": body}))
        except openai.APIStatusError as error:
            raise RequestFailed(f"HTTP {error.status_code}: {error.response.text[:500]}", error.status_code) from error
        except openai.APITimeoutError as error:
            raise RequestFailed(f"did not answer within {self._timeout_s:g} s") from error
        except openai.APIConnectionError as error:
            raise RequestFailed(f"{type(error.__cause__).__name__}: {error.__cause__}") from error
        except ValueError as error:  # the answer claims to be JSON and is not
            return getattr(error, "doc", str(error))

    async def chat(self, model: str, messages: Sequence[dict[str, str]], **options: Any) -> str:
        """Return what a model says next in a conversation.

        Args:
            model: as the server names it; "" takes the first of its `/models`.
            options: further fields of the request, such as `temperature` and `max_tokens`.
        Raises:
            RequestFailed: also for an answer without that text.
        """
        if not model:
            model = self._first_model = self._first_model or await self._member("/models", None, "data", 0, "id")
        body = {"model": model, "messages": list(messages), **options}
        return await self._member("/chat/completions", body, "choices", 0, "message", "content")

    async def _member(self, path: str, body: dict[str, Any] | None, *member: str | int) -> str:
        answer = await self.request(path, body)
        try:
            return reduce(getitem, member, answer) or ""
        except (KeyError, IndexError, TypeError) as error:
            expected = ".".join(map(str, member))
            raise RequestFailed(f"expected {expected} in the answer, got {str(answer)[:200]!r}") from error

    def _connect(self) -> Any:
        import httpx2  # as the client has it
        import openai

        timeout_s = self._timeout_s
        left_out: dict[str, Any] = {name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}

        class Client(openai.DefaultAsyncHttpxClient):
            async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
                """Make one attempt; httpx2's own limit is per read, which a server that drips bytes never exceeds."""
                try:
                    async with asyncio.timeout(timeout_s):
                        return await super().send(request, **options)
                except TimeoutError as error:
                    raise httpx2.ReadTimeout(f"no complete answer within {timeout_s:g} s") from error

        return openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self._api_key or "EMPTY",
            default_headers=left_out,
            timeout=self._timeout_s,
            max_retries=self.max_attempts - 1,
            http_client=Client(trust_env=False),
        )

    async def aclose(self) -> None:
        """Close the connections; a later request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
