"""The clients of the rollout servers: verl's, which also say what became of each request of a turn.

verl's `generate` of one turn may take several requests, because new weights interrupt it, and tells neither which
server answered nor which weights wrote which part. `LLMServerManager.get_client(client_cls=...)` makes these.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

TURN = "turn"  # extra field of a turn's output: its `TurnRequests`


@dataclass
class TurnRequests:
    """The requests that were made for one turn."""

    server: str = ""  # address and port of the newest request's, "" without one; a router may name a rank: server/rank
    written: list[tuple[int, int | None]] = field(default_factory=list)  # tokens, and version of the weights, in order
    lost: list[str] = field(default_factory=list)  # servers that died under a request, one entry for each request


class Request(LLMServerClient):
    """One request of a turn; it stands between verl's two clients in the order in which Python looks up methods.

    The requests of a turn follow each other, and so do the turns of a rollout, which share its request id.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._turns: dict[str, TurnRequests] = {}  # request id -> the turn that runs
        self._only_server: tuple[str, Any] | None = None
        self._has_one_server = False

    def keep_server(self, *server: Any) -> None:
        """Keep the one server that there is, by its name and handle; if they are not given, the router is asked once.
        Each question to it costs a message.
        """
        self._has_one_server, self._only_server = True, server or self._only_server

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        found = self._only_server or await super()._acquire_server(request_id, **extra)
        if self._has_one_server:
            self._only_server = found
        if request_id in self._turns:
            self._turns[request_id].server = found[0]
        return found

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        if not self._has_one_server:
            super()._release_server(server_id, request_id)

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Generate as verl's (:99, 0.9.1), and tell the router if the server failed.

        A server that refuses a request with a ValueError has not failed: any other server would refuse it as well.
        """
        turn = self._turns[request_id]
        turn.server = ""
        try:
            output = await super().generate(request_id, **kwargs)
        except Exception as error:  # any cause of the server's death; it is raised again
            failed = getattr(self._load_balancer, "failed", None)  # verl's own router has none
            if turn.server and failed and not isinstance(error, ValueError):
                failed.remote(server_id=turn.server)
            raise
        runs = output.extra_fields.pop("version_runs", None)  # of a server of verl_ext/fleet
        turn.written += runs or [(len(output.token_ids), output.extra_fields.get("global_steps"))]
        return output


class _Turn(Request):
    """Stands before verl's client in that order: a turn's output says what became of its requests."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        turn = self._turns[request_id] = TurnRequests()
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            del self._turns[request_id]
        output.extra_fields[TURN] = turn
        return output


class TurnClient(_Turn, Request):
    """The client of the mode `sync`, in which a turn is one request."""


class AsyncTurnClient(_Turn, FullyAsyncLLMServerClient, Request):
    """The client of the asynchronous modes, in which new weights may interrupt a turn."""
