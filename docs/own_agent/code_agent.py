"""Solve a problem by programs between <code> and </code>, whose output the model reads in the middle of its answer."""

MAX_PROGRAMS = 3


async def solve(task, endpoint):
    client, text = endpoint.openai(), ""  # any openai.AsyncOpenAI with endpoint.base_url and endpoint.api_key
    for number in range(MAX_PROGRAMS + 1):
        messages, options = task["messages"], {}
        if text:  # the model continues its own message, which ends with the output
            messages = [*messages, {"role": "assistant", "content": text}]
            options = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=messages, stop=["</code>"], **options
        )
        choice = answer.choices[0]
        text += choice.message.content
        _before, start, code = choice.message.content.rpartition("<code>")
        if choice.stop_reason != "</code>" or not start or number == MAX_PROGRAMS:
            return
        result = await endpoint.call("code_interpreter", {"code": code.strip()})
        text += f"</code>\n<interpreter>\n{result.output}\n</interpreter>\n"
