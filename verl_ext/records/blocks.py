"""Find calls and replies in the text of a response, by the protocols' tags.

Rewards are not affected: verl_ext/reward/ computes them on tokens.
"""

import json
import re

# A block that the response budget cut off has no closing tag and runs to the end; if the model forgot the tag, it runs
# to the reply that says so. Around a hermes tool reply, verl's decoded text keeps the bare role names of the chat
# template ("user", "assistant"), which nobody wrote.
BLOCK = re.compile(
    r"<code>(?P<code>.*?)(?:</code>|(?=\n(?:user\n)?<interpreter>\n)|\Z)|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<interpreter>(?P<interpreter>.*?)(?:</interpreter>|\Z)"
    r"|(?:(?<!\s)\s*\nuser\n)?<tool_response>(?P<reply>.*?)(?:</tool_response>|\Z)(?:\s*\nassistant\n)?",
    re.DOTALL,
)
ERROR = re.compile(r"Traceback \(most recent call last\)|^[^\S\n]*\w*(?:Error|Exception)\b|\btimed out\b", re.MULTILINE)


def code_of(block: re.Match[str]) -> str | None:
    """Return the program of a call: for hermes the argument `code`, or the call as written if it has none. None for
    a reply."""
    if block.lastgroup not in ("code", "call"):
        return None
    said = block[block.lastgroup].strip("\n")
    try:
        code = json.loads(said)["arguments"]["code"] if block.lastgroup == "call" else said
    except (ValueError, KeyError, TypeError, RecursionError):
        return said
    return code if isinstance(code, str) else said
