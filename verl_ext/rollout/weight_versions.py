"""Which version of the weights wrote which token. A version is the training step after which a server was given them.

A span is (start, end, version): tokens [start, end) of a response. Spans are in order; tokens of tools are in none.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from verl_ext.versions import VERL, require_versions

Span = tuple[int, int, int | None]
_attempts: ContextVar[list[tuple[int, int | None]] | None] = ContextVar("attempts", default=None)


@contextmanager
def noted_attempts() -> Iterator[list[tuple[int, int | None]]]:
    """(tokens, version) of each request that the block makes for one turn, in order."""
    attempts: list[tuple[int, int | None]] = []
    token = _attempts.set(attempts)
    try:
        yield attempts
    finally:
        _attempts.reset(token)


def spans_of(attempts: Iterable[tuple[int, int | None]], start: int, kept: int) -> list[Span]:
    """Spans of a turn that begins at `start` and of which the first `kept` tokens stay."""
    spans, end = [], start
    for tokens, version in attempts:
        begin, end = end, min(end + tokens, start + kept)
        if end > begin:
            spans.append((begin, end, version))
    return spans


def joined(spans: Sequence[Span], more: Sequence[Span]) -> list[Span]:
    """Both, with neighbours of one version as one span."""
    result = list(spans)
    for begin, end, version in more:
        if result and result[-1][1:] == (begin, version):
            begin = result.pop()[0]
        result.append((begin, end, version))
    return result


def oldest(spans: Iterable[Span]) -> int | None:
    """The oldest version in a response; None if a server told none, or no token was written."""
    versions = [version for *_, version in spans]
    return None if None in versions else min(versions, default=None)


def note_attempts(clients: ModuleType) -> None:
    """verl/workers/rollout/llm_server.py:99 (0.9.1): `LLMServerClient.generate` is one request.

    :225 `FullyAsyncLLMServerClient` merges the requests of a turn that was aborted for new weights, and keeps the
    versions of the first and the last alone.
    """
    require_versions(VERL, "verl_ext/rollout/weight_versions.py")
    generate = clients.LLMServerClient.generate

    async def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await generate(self, *args, **kwargs)
        if (attempts := _attempts.get()) is not None:
            attempts.append((len(output.token_ids), output.extra_fields.get("global_steps")))
        return output

    clients.LLMServerClient.generate = noted


def read_version_at_admission(servers: ModuleType) -> None:
    """verl/workers/rollout/vllm_rollout/vllm_async_server.py:689 (0.9.1) reads the version when a request has ended.

    A request that was aborted for new weights may then have got their version before it is read. No request is under
    way while weights change (:1022 `_park_until_admitted`), so the version at its admission is that of all its tokens.
    """
    require_versions(VERL, "verl_ext/rollout/weight_versions.py")
    server = servers.vLLMHttpServer
    park, generate = server._park_until_admitted, server.generate

    # Ray pickles the server's class by value, with what its functions name: hence no context variable here.
    async def _park_until_admitted(self: Any, request_id: str) -> Any:
        rejected = await park(self, request_id)
        self.__dict__.setdefault("_admitted_at", {})[request_id] = self.global_steps
        return rejected

    async def generate_at_version(
        self: Any, prompt_ids: Any, sampling_params: Any, request_id: str, **rest: Any
    ) -> Any:
        admitted_at = self.__dict__.setdefault("_admitted_at", {})
        try:
            output = await generate(self, prompt_ids, sampling_params, request_id, **rest)
            if request_id in admitted_at:  # what a prefill server hands on is admitted by another one
                output.extra_fields["global_steps"] = admitted_at[request_id]
            return output
        finally:
            admitted_at.pop(request_id, None)

    server._park_until_admitted, server.generate = _park_until_admitted, generate_at_version
