"""A gateway on loopback whose model is a script, and the real `openai` client that asks it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from verl_ext.episode import AgentUse, TokenRow
from verl_ext.gateway.server import Endpoint, Gateway
from verl_ext.gateway.session import Sampled, Session
from verl_ext.gateway.template import Template


@dataclass
class Script:
    """The far side of the gateway: `answer` makes the text of a turn from the text of its prompt.

    A turn ends with the end token, unless `max_tokens` cuts it or a stop string ends it, as the engine does.
    """

    tokenizer: Any
    answer: Callable[[str], str] = lambda prompt: "fine"
    failures: list[str | Exception] = field(default_factory=list)  # of the next requests
    sees_stops: bool = True  # else new weights interrupt each turn, within its stop
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # turns wait for it
    begun: int = 0
    seen: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)  # prompt, ids, log-probs
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # request id, sampling parameters

    def __post_init__(self) -> None:
        self.gate.set()

    def say(self, texts: Iterable[str]) -> None:
        it = iter(texts)
        self.answer = lambda prompt: next(it)

    async def generate(self, request_id: str, prompt_ids: list[int], params: dict[str, Any]) -> Sampled:
        self.begun += 1
        self.requests.append((request_id, params))
        text = self.answer(self.tokenizer.decode(prompt_ids))
        await self.gate.wait()
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return Sampled(failed=failure)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        stops = params.get("stop", ()) if self.sees_stops else ()
        for end in range(1, len(ids)) if stops else ():
            text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
            if any(stop in text for stop in stops):
                ids = ids[:end]
                break
        ids = ids[: params["max_tokens"]]
        log_probs = [-0.001 * (i + 1) for i in range(len(ids))]
        self.seen.append((prompt_ids, ids, log_probs))
        spans = [(0, len(ids), len(self.seen))] if self.sees_stops else [(0, 3, 1), (3, len(ids), 2)]
        return Sampled(ids=ids, log_probs=log_probs, spans=spans)


@dataclass
class Room:
    """One session, its script, and what an agent of it does."""

    gateway: Gateway
    script: Script
    endpoint: Endpoint
    client: Any

    @property
    def session(self) -> Session:
        return self.endpoint.room.session

    async def ended(self) -> tuple[AgentUse, list[TokenRow]]:
        """Seal the session, check that it holds what was sampled, and return its counts and its rows.

        Each turn is one generation, with its prompt, ids and log-probs; in its row it stands behind that prompt.
        """
        session = await self.gateway.seal(self.endpoint)
        left = list(self.script.seen)
        for node in session.nodes:
            left.remove((node.place.prompt_ids, node.ids, node.sampled.log_probs))
        leaves = session.rows()
        for leaf in leaves:
            row, begin = leaf.row, len(leaf.row.prompt_ids)
            for node in leaf.nodes:
                start = len(node.place.prompt_ids)
                assert (row.prompt_ids + row.ids)[: start + len(node.ids)] == node.place.prompt_ids + node.ids
                if node in leaf.trained:
                    assert row.log_probs[start - begin : start - begin + len(node.ids)] == node.sampled.log_probs
            assert sum(row.mask) == sum(len(node.ids) for node in leaf.trained)
        return session.use, [leaf.row for leaf in leaves]

    async def ask(
        self, messages: list[dict], *, stream: bool = False, client: Any = None, **more: Any
    ) -> tuple[dict[str, Any], str]:
        """Return the message and the reason of its end, as an agent puts them together."""
        create = (client or self.client).chat.completions.create
        if not stream:
            (choice,) = (await create(model="policy", messages=messages, **more)).choices
            return choice.message.model_dump(exclude_none=True), choice.finish_reason
        message, finish = {"role": "assistant", "content": ""}, None
        async for chunk in await create(model="policy", messages=messages, stream=True, **more):
            for choice in chunk.choices:
                message["content"] += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    calls = message.setdefault("tool_calls", [])
                    if call.index == len(calls):
                        function = {"name": call.function.name, "arguments": ""}
                        calls.append({"id": call.id, "type": "function", "function": function})
                    calls[call.index]["function"]["arguments"] += call.function.arguments or ""
                finish = choice.finish_reason or finish
        return message, finish

    async def talk(self, question: str, turns: int, **more: Any) -> list[dict[str, Any]]:
        """Play a plain agent of several turns, which answers each call with "2"."""
        messages = [{"role": "user", "content": question}]
        for i in range(turns):
            message, _ = await self.ask(messages, **more)
            messages.append(message)
            for call in message.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "2"})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": f"Go on ({i})."})
        return messages


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a state is reached."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def opened(tokenizer: Any, **options: Any) -> AsyncIterator[Room]:
    import openai

    keep_alive_s = options.pop("keep_alive_s", 5.0)
    script = Script(tokenizer)
    gateway = Gateway(script.generate, Template(tokenizer), keep_alive_s=keep_alive_s)
    await gateway.start()
    settings = {"params": {"temperature": 0.7, "top_p": 1.0, "logprobs": 0}, "max_context": 2000, "max_turns": 64}
    settings |= options
    endpoint = gateway.open(settings.pop("params"), settings.pop("max_context"), **settings)
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="none") as client:
        yield Room(gateway, script, endpoint, client)
    await gateway.stop()
