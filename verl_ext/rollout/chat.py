"""The agent loop with a chat endpoint as its model: a teacher, or any model that others serve.

The loop counts, stops and records as always, with the tokenizer of the model that is to learn; tokens are made of the
endpoint's text. What the endpoint gets is a conversation, in the first of three styles that it can do:

    continue    one message of the assistant grows: text, program, output. The endpoint continues it
    tools       calls and outputs are the endpoint's own tool calls, which are translated to the run's protocol
    turns       each output is a message of the user

A system prompt explains the protocol by an example. It is no part of the recorded prompt.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from verl_ext.protocols.base import CODE_SCHEMA
from verl_ext.protocols.code import CODE_STOP
from verl_ext.protocols.trace import text_of
from verl_ext.reward.openai_endpoint import OpenAiEndpoint
from verl_ext.rollout.lives import Life
from verl_ext.rollout.loop import RetoolAgentLoop
from verl_ext.rollout.response import Rollout
from verl_ext.rollout.servers import ServerFailure, ServerRefused, ask
from verl_ext.rollout.stops import end_id
from verl_ext.rollout.talk import Answer, Talk
from verl_ext.rollout.ways import Way
from verl_ext.usage import USAGE, Usage

_CONTENT_FILTER = "content_filter"
_NUMBERS = "one two three four five six seven"


class ChatServer:
    """An endpoint with `/v1/chat/completions`; see the module. `connect` finds out what it can do.

    Args:
        url: such as "https://api.example.org/v1".
        model: as the server names it; "" takes the first of its `/models`.
        style: one of those above; "" finds the first one that works.
        timeout_s, max_attempts: limits for one turn; see `OpenAiEndpoint`.
    """

    max_model_len = None
    seeded = False

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str = "",
        style: str = "",
        timeout_s: float = 3600.0,
        max_attempts: int = 8,
    ):
        self._endpoint = OpenAiEndpoint(url, api_key=api_key, timeout_s=timeout_s, max_attempts=max_attempts)
        self.url, self.model, self.style = self._endpoint.url, model, style
        self._omitted: set[str] = set()  # parameters that it does not take
        self._continued: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # added to the request, to its last message

    @property
    def interface(self) -> str:
        """Return how requests are made, for the result."""
        without = f", without {', '.join(sorted(self._omitted))}" if self._omitted else ""
        return f"/v1/chat/completions, style {self.style}{without}"

    async def connect(self) -> None:
        """Find the model's name, the parameters that the endpoint takes, and the style.

        Raises:
            ServerRefused: it refuses the plainest request.
            ServerFailure: it does not answer.
        """
        if not self.model:
            served = (await ask(self._endpoint, "/models"))["data"]
            if not served:
                raise ServerRefused(f"{self.url} serves no model.")
            self.model = served[0]["id"]
        question = [{"role": "user", "content": "Say yes."}]
        params = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "stop": [CODE_STOP]}
        while True:
            try:
                await self._ask(question, params)
                break
            except ServerRefused as error:
                named = [name for name in params if name not in self._omitted and name in str(error)]
                if not named:
                    raise
                self._omitted.add(named[0])
        if not self.style:
            self.style = await self._find_style()
        elif self.style == "continue" and not await self._can_continue():
            raise ServerRefused(
                f"{self.url} does not continue a message of the assistant, as style=continue wants it. Choose another."
            )

    async def _find_style(self) -> str:
        if await self._can_continue():
            return "continue"
        try:
            await self._ask([{"role": "user", "content": "Say yes."}], {"max_tokens": 16, "tools": [CODE_SCHEMA]})
        except ServerRefused:
            return "turns"
        return "tools"

    async def _can_continue(self) -> bool:
        """Find a form of request in which the endpoint goes on where a message of the assistant ends."""
        said, following = _NUMBERS.split()[:4], _NUMBERS.split()[4]
        question = {"role": "user", "content": f"Write exactly this, and nothing else: {_NUMBERS}"}
        forms = (
            ({"continue_final_message": True, "add_generation_prompt": False}, {}),  # vLLM, SGLang
            ({}, {"prefix": True}),  # DeepSeek, Mistral
            ({}, {}),
        )
        for self._continued in forms:
            messages = [question, {"role": "assistant", "content": " ".join(said)}]
            try:
                answer = await self._ask(self._with_end_open(messages), self._continued[0] | {"max_tokens": 16})
            except ServerRefused:
                continue
            if answer.text.strip().lower().startswith(following):
                return True
        return False

    def _with_end_open(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*messages[:-1], messages[-1] | self._continued[1]]

    async def answer(
        self, messages: Sequence[dict[str, Any]], params: Mapping[str, Any], tools: Sequence[dict] = ()
    ) -> Answer:
        """Return what the model says next. If the last message is the assistant's, it is continued.

        Raises:
            ServerFailure: the endpoint does not answer, however often it is asked, or refuses this request.
            ServerRefused: it refuses any request of ours, because of the key or the model's name.
        """
        body = dict(params)
        if tools:
            body["tools"] = list(tools)
        if messages[-1]["role"] == "assistant":
            messages, body = self._with_end_open(messages), body | self._continued[0]
        try:
            return await self._ask(messages, body)
        except ServerRefused as error:
            if _CONTENT_FILTER in str(error):
                return Answer("", usage=Usage(1, refusals=1))
            if getattr(error.__cause__, "status", None) in (401, 403, 404):
                raise
            raise ServerFailure(str(error)) from error  # this conversation; others may do

    async def _ask(self, messages: Sequence[dict[str, Any]], params: Mapping[str, Any]) -> Answer:
        body = {"model": self.model, "messages": list(messages)}
        for name, value in params.items():
            if name == "max_tokens" and name in self._omitted:
                name = "max_completion_tokens"  # as OpenAI calls it now
            if name not in self._omitted:
                body[name] = value
        said = await ask(self._endpoint, "/chat/completions", body)
        try:
            choice = said["choices"][0]
            message = choice["message"]
            refusal = str(message.get("refusal") or "")
            used = said.get("usage") or {}
            tokens = int(used.get("prompt_tokens") or 0), int(used.get("completion_tokens") or 0)
            usage = Usage(1, *tokens, int(bool(refusal) or choice.get("finish_reason") == _CONTENT_FILTER))
            called = [call["function"] for call in message.get("tool_calls") or []]
            calls = [{**function, "name": str(function["name"])} for function in called]
            text = refusal or text_of({**message, "content": _joined(message.get("content"))})
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerFailure(f"{self.url} answered {str(said)[:200]!r}, expected a message") from error
        return Answer(text, calls, choice.get("finish_reason") == "length", usage)

    async def aclose(self) -> None:
        await self._endpoint.aclose()


def _joined(content: Any) -> Any:
    """Return a content as text if it is a list of parts, of which those that are no text do not count."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


class ChatLoop(RetoolAgentLoop):
    """The agent loop with a `ChatServer` as its `server_manager`."""

    server_manager: ChatServer

    async def generate(
        self, rollout: Rollout, life: Life, way: Way, params: dict[str, Any], request_id: str, priority: int
    ) -> TokenOutput:
        """Return what the endpoint says next as tokens of this loop's tokenizer: the turn as a rollout would have it.

        Raises:
            ServerFailure, ServerRefused: see `ChatServer.answer`.
        """
        server, protocol, tools = self.server_manager, way.protocol, life.opening.tools
        talk = Talk(server.style, protocol, tools)
        messages = talk.messages(life.opening.messages, rollout.episode.turns)
        asked = {name: params[name] for name in ("temperature", "top_p") if name in params} | talk.stops()
        asked["max_tokens"] = rollout.room
        answer = await server.answer(messages, asked, list(tools.values()) if server.style == "tools" else ())
        text, ended = talk.turn_of(answer)
        ids = (await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=False))[: rollout.room]
        if ended and len(ids) < rollout.room:
            ids.append(end_id(self.tokenizer))
        used = Usage(**rollout.episode.from_server.get(USAGE, {})) + answer.usage
        return TokenOutput(token_ids=ids, stop_reason="completed", extra_fields={USAGE: asdict(used)})
