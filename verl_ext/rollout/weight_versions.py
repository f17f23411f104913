"""Which server wrote a turn, and which version of the weights wrote each of its tokens.

A version is the training step after which a server was given the weights.

A span is (start, end, version): tokens [start, end) of a response. Spans are in order; tokens of tools are in none.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from verl_ext.versions import VERL, require_versions

Span = tuple[int, int, int | None]


class Attempts(list[tuple[int, int | None]]):
    """(tokens, version) of each request that is made for one turn; a request that crossed updates has several."""

    server: str | None = None  # address and port of the server that answered last

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.lost: list[str] = []  # servers that died under a request, one entry for each request


_attempts: ContextVar[Attempts | None] = ContextVar("attempts", default=None)


@contextmanager
def noted_attempts() -> Iterator[Attempts]:
    """Yield the requests that a block makes for one turn."""
    attempts = Attempts()
    token = _attempts.set(attempts)
    try:
        yield attempts
    finally:
        _attempts.reset(token)


def note_server(server: str) -> None:
    """Note which server the next request of this turn goes to."""
    if (attempts := _attempts.get()) is not None:
        attempts.server = server


def note_lost(server: str) -> None:
    """Note that a request of this turn lost its server and continues elsewhere."""
    if (attempts := _attempts.get()) is not None:
        attempts.lost.append(server)


def spans_of(attempts: Iterable[tuple[int, int | None]], start: int, kept: int) -> list[Span]:
    """Return the spans of a turn that begins at `start` and of which the first `kept` tokens stay."""
    spans, end = [], start
    for tokens, version in attempts:
        begin, end = end, min(end + tokens, start + kept)
        if end > begin:
            spans.append((begin, end, version))
    return spans


def joined(spans: Sequence[Span], more: Sequence[Span]) -> list[Span]:
    """Return both lists as one, with adjacent spans of the same version merged."""
    result = list(spans)
    for begin, end, version in more:
        if result and result[-1][1:] == (begin, version):
            begin = result.pop()[0]
        result.append((begin, end, version))
    return result


def oldest(spans: Iterable[Span]) -> int | None:
    """Return the oldest version in a response; None if a server reported none, or no token was written."""
    versions = [version for *_, version in spans]
    return None if None in versions else min(versions, default=None)


def note_attempts(clients: ModuleType) -> None:
    """Note each `LLMServerClient.generate`, which is one request (verl/workers/rollout/llm_server.py:99, 0.9.1).

    `FullyAsyncLLMServerClient` (:225) merges the requests of a turn that was aborted for new weights. It keeps only the
    versions of the first and the last, and no server.
    """
    require_versions(VERL, "verl_ext/rollout/weight_versions.py")
    acquire, generate = clients.LLMServerClient._acquire_server, clients.LLMServerClient.generate

    async def acquire_noted(self: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        name, server = await acquire(self, *args, **kwargs)
        note_server(name)
        return name, server

    async def generate_noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await generate(self, *args, **kwargs)
        runs = output.extra_fields.pop("version_runs", None)  # of a server of verl_ext/fleet
        if (attempts := _attempts.get()) is not None:
            attempts += runs or [(len(output.token_ids), output.extra_fields.get("global_steps"))]
        return output

    clients.LLMServerClient._acquire_server, clients.LLMServerClient.generate = acquire_noted, generate_noted
