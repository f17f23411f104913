"""An agent whose conversations have one row, two or three, by what the model says first."""

import asyncio
import zlib


async def ask(endpoint, messages):
    answer = await endpoint.openai().chat.completions.create(model=endpoint.model, messages=messages, max_tokens=40)
    return answer.choices[0].message.content


async def agent(task, endpoint):
    messages = task["messages"]
    said = await ask(endpoint, messages)

    def more(text, said=said):
        return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": text}]

    kind = zlib.crc32(said.encode()) % 3
    if kind == 0:
        await ask(endpoint, more("Go on."))
    elif kind == 1:
        await ask(endpoint, [{"role": "user", "content": "Another question."}])
    else:
        await asyncio.gather(*(ask(endpoint, more(f"Try {n}.")) for n in range(2)))
        await ask(endpoint, more("And?", said="edited"))
