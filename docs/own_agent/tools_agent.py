"""Solve a problem with the tools of the run's environment, which the model calls by OpenAI's `tools`."""

import json


async def solve(task, endpoint):
    client, messages = endpoint.openai(), list(task["messages"])
    while True:  # the run ends it: retool.agent.max_turns, or a full context
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=task["tools"])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = await endpoint.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.output})
