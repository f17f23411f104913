"""Agents of the tests of `rollout/agents.py`: each asks a real gateway by the real openai client."""

import asyncio
import contextlib
import sys
import time

import openai

from verl_ext.environments.base import Environment
from verl_ext.episode import Score


async def ask(endpoint, messages, **options):
    answer = await endpoint.openai().chat.completions.create(model=endpoint.model, messages=messages, **options)
    return answer.choices[0].message.content


async def once(task, endpoint):
    await ask(endpoint, task["messages"])


async def twice(task, endpoint):
    said = await ask(endpoint, task["messages"])
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "2+2?"}]
    await ask(endpoint, [*task["messages"], *more])


def in_a_thread(task, endpoint):
    client = endpoint.openai()
    client.chat.completions.create(model=endpoint.model, messages=task["messages"])
    assert endpoint.call("code_interpreter", {"code": "print(2)"}).output == "2"


def sleeps(task, endpoint):
    endpoint.openai().chat.completions.create(model=endpoint.model, messages=task["messages"])
    time.sleep(1)


async def runs_code(task, endpoint):
    await ask(endpoint, task["messages"])
    result = await endpoint.call("code_interpreter", {"code": "print(2)"})
    messages = [*task["messages"], {"role": "assistant", "content": "\\boxed{1}"}]
    await ask(endpoint, [*messages, {"role": "user", "content": result.output}])


async def own_tool(task, endpoint):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}]
    client, messages = endpoint.openai(), list(task["messages"])
    answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
    message = answer.choices[0].message
    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "the sum"} for call in message.tool_calls]
    await client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)


async def calls_badly(task, endpoint):
    await ask(endpoint, task["messages"])
    assert (await endpoint.call("code_interpreter", {"program": "1"})).error == "missing_argument"
    result = await endpoint.call("made_up", {"program": "1"})  # a name of the model's
    assert (result.error, "the tools are code_interpreter" in result.output) == ("unknown_tool", True)


async def says_what_it_got(task, endpoint):
    await ask(endpoint, [{"role": "user", "content": repr(sorted(task.items()))}])


async def branches(task, endpoint):
    await twice(task, endpoint)
    await ask(endpoint, [{"role": "user", "content": "3+3?"}])


async def at_once(task, endpoint):
    await asyncio.gather(*(ask(endpoint, [{"role": "user", "content": f"{n}+1?"}]) for n in task["agent"]))


async def never_stops(task, endpoint):
    messages = task["messages"]
    while True:
        said = await ask(endpoint, messages)
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "2+2?"}]


async def gives_up_when_refused(task, endpoint):
    with contextlib.suppress(openai.BadRequestError):
        await never_stops(task, endpoint)


async def asks_on_and_on(task, endpoint):
    """Takes every refusal for an accident."""
    while True:
        with contextlib.suppress(openai.BadRequestError):
            await ask(endpoint, task["messages"])


async def asks_nothing(task, endpoint):
    pass


async def crashes_at_once(task, endpoint):
    raise KeyError("no such tool")


async def crashes_later(task, endpoint):
    await ask(endpoint, task["messages"])
    raise KeyError("what the model wrote")


def crashes_in_a_thread(task, endpoint):
    endpoint.openai().chat.completions.create(model=endpoint.model, messages=task["messages"])
    raise KeyError("what the model wrote")


async def exits(task, endpoint):
    await ask(endpoint, task["messages"])
    sys.exit(1)


async def fails_in_one_of_two(task, endpoint):
    client = endpoint.openai().with_options(max_retries=0)
    questions = [[{"role": "user", "content": text}] for text in ("1+1?", "2+2?")]
    found = [client.chat.completions.create(model=endpoint.model, messages=each) for each in questions]
    first, _second = [await asyncio.gather(each, return_exceptions=True) for each in found]
    raise first[0]


async def asks_and_runs(task, endpoint):
    await ask(endpoint, task["messages"])
    await endpoint.call("code_interpreter", {"code": "print(2)"})


async def thinks_for_long(task, endpoint):
    await ask(endpoint, task["messages"])
    await asyncio.sleep(60)


async def does_not_let_go(task, endpoint):
    await ask(endpoint, task["messages"])
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(1)


async def one_argument(task):
    pass


async def closes(task, endpoint):
    """Ends only when it is cancelled."""
    await ask(endpoint, task["messages"])
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)


class World(Environment):
    """Notes what happens to it."""

    log = []

    async def open(self, task):
        self.log[:] = ["opened"]
        return await super().open(task)

    async def score(self, episode):
        self.log.append(f"scored {episode.finish_reason} {len(episode.turns)}")
        return Score.graded(0.5, "", "world")

    async def close(self):
        self.log.append("closed")


async def rewrites(task, endpoint):
    await ask(endpoint, task["messages"])
    more = [{"role": "assistant", "content": "another"}, {"role": "user", "content": "2+2?"}]
    await ask(endpoint, [*task["messages"], *more])


async def calls_before_it_asks(task, endpoint):
    await endpoint.call("code_interpreter", {"code": "print(2)"})
    await ask(endpoint, task["messages"])
