"""Find the part of a turn that is thinking, in which nothing is a call: from `<think>` to the next `</think>`.

Thinking that is never closed reaches to the end of the turn. A `</think>` that nothing opened closes all text before
it: many chat templates open the thinking in the prompt. A tag between quotes or backticks is only mentioned.
"""

import re

THINK_START, THINK_STOP = "<think>", "</think>"
TAG = r"(?<![`\"'])</?think>|</?think>(?![`\"'])"  # a quote or a code fence may end right before it
_TAG = re.compile(TAG)


def opens_thinking(before: str) -> bool:
    """Return whether the text before a turn, from prompt or reply, leaves the model within its thinking."""
    return before.rstrip().endswith(THINK_START)


def is_thinking(text: str, thinking: bool, start: int = 0, stop: int | None = None) -> bool:
    """Return whether `text[start:stop]` ends within thinking; `thinking` says whether it begins so."""
    tags = _TAG.findall(text, start, len(text) if stop is None else stop)
    return tags[-1] == THINK_START if tags else thinking


def end_of_thinking(text: str, start: int = 0) -> int:
    """Return where thinking that is open at `start` ends: after the next `</think>`, else at the end of the text."""
    return next((tag.end() for tag in _TAG.finditer(text, start) if tag[0] == THINK_STOP), len(text))


def without_thinking(text: str, thinking: bool = False) -> str:
    """Return what the turn says outside of its thinking."""
    kept, position = [], 0
    for tag in _TAG.finditer(text):
        if tag[0] == THINK_START and not thinking:
            kept.append(text[position : tag.start()])
        elif tag[0] == THINK_STOP:
            kept = kept if thinking else []
            position = tag.end()
        thinking = tag[0] == THINK_START
    return "".join(kept) + ("" if thinking else text[position:])


def after_thinking(text: str, *, unfinished: bool = False) -> str:
    """Return the text after its last `</think>`, without thinking that is never closed except with `unfinished`."""
    start, stop = 0, len(text)
    for tag in _TAG.finditer(text):
        if tag[0] == THINK_STOP:
            start, stop = tag.end(), len(text)
        elif not unfinished:
            stop = min(stop, tag.start())
    return text[start:stop]
