"""How an episode looks to a chat endpoint, and what the endpoint's answers are in the run's protocol; see chat.py."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext.episode import Reply, Turn
from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL, Call, ToolProtocol
from verl_ext.protocols.call_json import what_is_wrong
from verl_ext.protocols.code import CODE_START, CODE_STOP, CodeProtocol, split_call
from verl_ext.protocols.hermes import CALL_START
from verl_ext.protocols.thinking import without_thinking
from verl_ext.usage import Usage

CODE_PARAMETERS = CODE_SCHEMA["function"]["parameters"]
_RESPONSE = "<tool_response>"  # in which a tool answers, if the endpoint has no tools of its own
_CODE_SYSTEM = """You solve problems with Python. To run a program, write it between <code> and </code> and stop; its \
output then stands between <interpreter> and </interpreter>{where}. Only what a program prints is shown. Never write \
an output yourself. You may run several programs. End with the answer in \\boxed{{}}. For example:

User: What is the sum of the primes below 30?
Assistant: I add up the primes below 30 with a program.
<code>
print(sum(n for n in range(2, 30) if all(n % d for d in range(2, n))))
</code>
{output}
The sum is \\boxed{{129}}."""
_OUTPUT = "<interpreter>\n129\n</interpreter>"
_HERMES_SYSTEM = """You can call tools. To call one, write its name and its arguments as JSON between <tool_call> and \
</tool_call>, and stop; its answer then comes between <tool_response> and </tool_response> in the next message. Never \
write an answer of a tool yourself. For example:

<tool_call>
{{"name": "code_interpreter", "arguments": {{"code": "print(2 ** 10)"}}}}
</tool_call>

These are the tools:
{tools}"""
_TOOLS_SYSTEM = "Use the tools where they help, one step at a time, and say what you do before you call one."


@dataclass
class Answer:
    """What the endpoint said: text, the calls that it made by its own tools, and whether the length limit cut it."""

    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    was_cut: bool = False
    usage: Usage = field(default_factory=Usage)


class Talk:
    """How an episode looks to an endpoint: conversations of one style, and what its answers mean in the protocol.

    Args:
        style: "continue", "tools" or "turns", see chat.py.
        tools: name -> schema, those that the model may call.
    """

    def __init__(self, style: str, protocol: ToolProtocol, tools: Mapping[str, dict]):
        self.style, self.protocol, self.tools = style, protocol, tools
        self._is_code = isinstance(protocol, CodeProtocol)

    def system(self) -> str:
        """Return what explains the protocol; "" without tools."""
        if not self.tools:
            return ""
        if self.style == "tools":
            return _TOOLS_SYSTEM
        if not self._is_code:
            return _HERMES_SYSTEM.format(tools="\n".join(json.dumps(tool) for tool in self.tools.values()))
        if self.style == "continue":
            return _CODE_SYSTEM.format(where="", output=_OUTPUT)
        return _CODE_SYSTEM.format(where=" in the next message", output=f"User: {_OUTPUT}\nAssistant:")

    def stops(self) -> dict[str, list[str]]:
        """Return the parameter that asks the endpoint to stop where a tool would answer."""
        if self.style == "tools" or not self.tools:
            return {}
        return {"stop": [CODE_STOP] if self._is_code else [_RESPONSE]}

    def messages(self, opening: Sequence[dict[str, Any]], turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return the conversation so far; its last message is the assistant's if that is to be continued."""
        system = [message["content"] for message in opening if message["role"] == "system"]
        said = "\n\n".join(text for text in (self.system(), *system) if text)
        result = [{"role": "system", "content": said}] * bool(said)
        result += [message for message in opening if message["role"] != "system"]
        for number, turn in enumerate(turns):
            text, reply = self._plain(turn), turn.reply or Reply("", 0, 0)
            shown = reply.shown
            if not turn.calls:  # a user replied
                result += [{"role": "assistant", "content": text}]
                result += [{"role": "user", "content": each} for each in shown]
            elif self.style == "continue" and self._is_code and not turn.end:
                before = result.pop()["content"] if result[-1]["role"] == "assistant" else ""
                result.append({"role": "assistant", "content": before + text + reply.text})
            elif self.style == "tools" and not any(call.malformed for call in turn.calls):
                result += self._by_tools(text, turn, shown, number)
            else:
                tag = "interpreter" if self._is_code else "tool_response"
                answers = "\n".join(f"<{tag}>\n{each}\n</{tag}>" for each in shown)
                result += [{"role": "assistant", "content": text}, {"role": "user", "content": answers}]
        return result

    def _by_tools(self, text: str, turn: Turn, shown: Sequence[str], number: int) -> list[dict[str, Any]]:
        calls = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(turn.calls)
        ]
        content = split_call(text)[0] if self._is_code else text.partition(CALL_START)[0]
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": said}
            for call, said in zip(calls, shown, strict=True)
        ]
        return [{"role": "assistant", "content": content.rstrip(), "tool_calls": calls}, *answers]

    def _plain(self, turn: Turn) -> str:
        """Return a turn without end token and, unless the message is continued, without its thinking."""
        text = turn.text.removesuffix(turn.end)
        return text if self.style == "continue" else without_thinking(text)

    def turn_of(self, answer: Answer) -> tuple[str, bool]:
        """Return an answer as a turn in the run's protocol, and whether its end token follows."""
        text = answer.text
        if answer.calls:
            calls = answer.calls[: 1 if self._is_code else None]
            try:
                text = self.protocol.write(text.rstrip(), [self._call(call) for call in calls])
            except (ValueError, RecursionError):  # as the model would have written it, so that the loop answers
                text = f"{text}\n{CALL_START}\n{json.dumps(calls[0])}\n</tool_call>"
            return text, self.protocol.call_ends_turn or CODE_STOP not in text
        if not self._is_code:
            return text.partition(_RESPONSE)[0].rstrip(), not answer.was_cut
        if not answer.was_cut and text.rfind(CODE_START) > text.rfind(CODE_STOP) and self.tools:
            text += CODE_STOP  # where the endpoint stopped
        return text, not answer.was_cut  # the loop cuts what follows a call

    def _call(self, function: Mapping[str, Any]) -> Call:
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        name = function["name"]
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments are no object: {function}")
        if self._is_code and (name != CODE_TOOL or what_is_wrong(arguments, CODE_PARAMETERS, name)):
            raise ValueError(f"no call of the interpreter: {function}")
        return Call(name, arguments, 0)
