"""An engine whose tokens say which weights sampled them."""

import asyncio
from types import SimpleNamespace
from typing import Any


class Detokenizer:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def num_output_tokens(self) -> int:
        return len(self.ids)


class Engine:
    """vLLM's AsyncLLM. `step` samples one token of each request that runs; the token is the version of the weights.

    The front end's count of tokens lags behind the core: it reads a message only when the event loop gets to it.
    """

    errored, weights, room = False, 1, 4

    def __init__(self) -> None:
        manager = SimpleNamespace(processes=[])
        resources = SimpleNamespace(engine_manager=manager)
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue(), resources=resources)
        self.output_processor = SimpleNamespace(request_states={})
        self.running: dict[str, SimpleNamespace] = {}
        self.waiting: dict[str, SimpleNamespace] = {}
        self.salts: list[str | None] = []
        self.mode, self.pauses, self.added, self.resets = None, [], 0, 0
        self.takes_requests = asyncio.Event()
        self.takes_requests.set()
        self.reader = asyncio.ensure_future(self._read())

    async def list_loras(self) -> list[int]:
        return []

    async def add_request(self, request_id: str, prompt: Any, params: Any, **_: Any) -> asyncio.Queue:
        await asyncio.sleep(0)  # the prompt is looked at
        await self.takes_requests.wait()
        self.added += 1
        queue, name = asyncio.Queue(), f"{request_id}-{self.added}"
        state = SimpleNamespace(external_req_id=request_id, detokenizer=Detokenizer(), queue=queue)
        self.output_processor.request_states[name] = state
        self.salts.append(prompt.get("cache_salt"))
        self.waiting[name] = SimpleNamespace(limit=params.max_tokens, written=0)
        return queue

    async def generate(self, *, prompt: Any, sampling_params: Any, request_id: str, **_: Any):
        queue = await self.add_request(request_id, prompt, sampling_params)
        yield await queue.get()

    def step(self) -> None:
        while self.mode is None and self.waiting and len(self.running) < self.room:
            name = next(iter(self.waiting))
            self.running[name] = self.waiting.pop(name)
        if self.mode == "keep":
            return
        message = SimpleNamespace(outputs=[])
        for name, request in list(self.running.items()):
            request.written += 1
            message.outputs.append((name, self.weights, request.written == request.limit))
            if request.written == request.limit:
                del self.running[name]
        self.engine_core.outputs_queue.put_nowait(message)

    async def _read(self) -> None:
        while True:
            message = await self.engine_core.outputs_queue.get()
            for name, token, is_last in message.outputs:
                await asyncio.sleep(0)  # as between chunks of a message
                if state := self.output_processor.request_states.get(name):
                    state.detokenizer.ids.append(token)
                    if is_last:
                        self._finish(name, "length")

    def _finish(self, name: str, reason: str) -> None:
        state = self.output_processor.request_states.pop(name)
        ids = state.detokenizer.ids
        log_probs = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        output = SimpleNamespace(token_ids=ids, logprobs=log_probs, finish_reason=reason)
        state.queue.put_nowait(SimpleNamespace(outputs=[output], num_cached_tokens=0))

    async def abort(self, request_ids: list[str]) -> None:
        for name, state in list(self.output_processor.request_states.items()):
            if state.external_req_id in request_ids:
                self.running.pop(name, None), self.waiting.pop(name, None)
                self._finish(name, "abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.mode = mode
        self.pauses.append((mode, clear_cache))
        while mode == "wait" and self.running:
            self.step()
            await asyncio.sleep(0)
        if mode == "abort":
            await self.abort([state.external_req_id for state in self.output_processor.request_states.values()])

    async def resume_generation(self) -> None:
        self.mode = None

    async def reset_prefix_cache(self, **_: Any) -> None:
        self.resets += 1

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...
