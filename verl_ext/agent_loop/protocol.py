"""The literal `<code>` / `<interpreter>` protocol of ReTool: what a call looks like, and how it is answered.

Agent loop (RL, evaluation) and data set (SFT) both take it from here, so that they cannot drift apart.
"""

import re

CODE_START, CODE_STOP = "<code>", "</code>"

_FENCE = re.compile(r"\A\s*```[a-zA-Z0-9_+-]*\n(.*?)\n?```\s*\Z", re.DOTALL)


class MalformedCall(ValueError):
    """The model's text ends in a call that cannot be run; the message is written for the model."""


def extract_code(text: str) -> str:
    """The code of the call that `text` ends in, as the model wrote it, less one Markdown fence.

    Args:
        text: one model turn that contains `</code>`.
    Raises:
        MalformedCall: no `<code>` before `</code>`, or nothing between them.
    """
    before_stop = text[: text.rindex(CODE_STOP)]
    start = before_stop.rfind(CODE_START)
    if start < 0:
        raise MalformedCall("FormatError: </code> without <code>")
    code = before_stop[start + len(CODE_START) :]
    fenced = _FENCE.match(code)
    code = fenced.group(1) if fenced else code
    if not code.strip():
        raise MalformedCall("FormatError: empty <code></code>")
    return code


def format_output(stdout: str, stderr: str, *, traceback: str = "full") -> str:
    """What the interpreter says: standard output, then standard error.

    Args:
        traceback: "full", or "last_line" for the exception only (short contexts).
    Raises:
        ValueError: unknown `traceback`.
    """
    if traceback not in ("full", "last_line"):
        raise ValueError(f"retool.traceback is {traceback!r}; expected 'full' or 'last_line'.")
    error = stderr.strip()
    if traceback == "last_line" and error:
        error = error.splitlines()[-1]
    return "\n".join(part for part in (stdout.strip(), error) if part) or "(no output)"


def interpreter_block(output: str) -> str:
    """The text between two model turns, tags included."""
    return f"\n<interpreter>\n{output}\n</interpreter>\n"
