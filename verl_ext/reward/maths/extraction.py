"""Find the one answer that a response commits to; nothing here looks at the maths.

An answer is the last complete `\\boxed{...}` (or, without any, the last `<answer>...</answer>`) in what the model says
after its last `</think>`, outside the code it wrote and outside what tools printed.
"""

import re
from bisect import bisect_left as bisect

from verl_ext.protocols.thinking import after_thinking

_CODE_TAGS = ("code", "tool_call", "python", "execute")
_PRINTED_TAGS = tuple("interpreter tool_response output tool_output tool_result execution_result observation".split())
_PROSE_FENCES = {"latex", "tex", "math", "markdown", "md", "text", "plaintext"}
# A fence without a language is prose too, since models frame final answers that way, unless it follows code.
# Each branch begins with a character that has no case, which lets the search skip over prose.
_BLOCK_OPEN = re.compile(
    rf"<(?i:(?P<tag>{'|'.join(_CODE_TAGS + _PRINTED_TAGS)})\s*>|(?P<role>\|im_start\|>(?:tool|user|system)\b))"
    rf"|(?P<fence>```|~~~)[ \t]*(?!(?i:{'|'.join(_PROSE_FENCES)})\b)\w[^\n`~]*\n"
)
_BLOCK_CLOSE = re.compile(r"<(?:/(?P<tag>\w+)\s*>|(?P<role>\|im_end\|>))|(?P<fence>```|~~~)")
_PRINTED_FENCE = re.compile(
    r"\s*(?:[^\n`]{0,40}(?:output|result|print)[^\n`]{0,20}\n\s*)?```[ \t]*\n(?:(?!```).)*```",
    re.DOTALL | re.IGNORECASE,
)
_STRAY_CLOSE = re.compile(rf"</(?i:{'|'.join(_PRINTED_TAGS)})\s*>")
_BOX_OPEN = re.compile(r"(?<!\\)\\++(?:boxed|fbox)\s*\{")
_BOX_TOKEN = re.compile(rf"(?P<box>{_BOX_OPEN.pattern})|\\.|(?P<open>\{{)|(?P<close>\}})", re.DOTALL)
_LAYOUT = r"(?:\s|\$|\\[()\[\], ]|\\q?quad)*"
_AND = rf"(?:\\text\s*\{{\s*)?(?:and|or)(?:\s*\}})?{_LAYOUT}"
_LABEL = r"(?:[a-zA-Z](?:_\{?\w\}?)?\s*=\s*)?"
_MINUS = re.compile(r"[=$]\s*-\s*$")
_POWER = re.compile(r"\s*\^\s*(?:\d+|\{\s*-?\d+\s*\})")
_JOINT = re.compile(rf"{_LAYOUT}(?:[,;]{_LAYOUT}(?:{_AND})?|{_AND}){_LABEL}")
MAX_JOINT_CHARS = 40
# A box that shows how to answer and holds no answer: empty, dots, a blank or words that stand for an answer.
PLACEHOLDER = re.compile(
    r"(?:\s|[{}$.…_~·□-]|\\[,;:! _]|\\(?:q?quad|[cl]?dots[bcimo]?|square|Box|blank|phantom|cdot|underline)(?![a-z])"
    r"|\\hspace\{[^{}]*\}|\\(?:text|math)(?:bf|it|rm|tt)?(?![a-z]))*+"
    r"(?:[\[<(]?(?:your |the |my |final |numerical |correct )*(?:answer|result|value|solution|expression)s?"
    r"(?: here| goes here)?[\]>)]?[\s{}$.…]*)?",
    re.IGNORECASE,
)


def extract_answer(response_text: str, *, unfinished_thinking: bool = False) -> str | None:
    """Return the text inside the last complete box (or answer tag), untouched; None if there is none.

    The whole text is searched, in time linear in its length. An unclosed box is not an answer.

    Args:
        unfinished_thinking: a box after a `<think>` that is never closed is an answer as well.
    """
    spoken = strip_tool_blocks(response_text, unfinished_thinking=unfinished_thinking)
    box = _last_box(spoken)
    if box is not None:
        return box
    end = spoken.rfind("</answer>")
    start = spoken.rfind("<answer>", 0, max(end, 0))
    return spoken[start + len("<answer>") : end] if start >= 0 else None


def strip_tool_blocks(response_text: str, *, unfinished_thinking: bool = False) -> str:
    """Return the model's text after its last `</think>`, without its code, its tool calls and the tools' output.

    Thoughts that are never closed are also left out, except with `unfinished_thinking`.

    Blocks are `<code>`, `<interpreter>`, `<tool_call>`, `<tool_response>` and their likes, fences with a language name
    and the fence of output after one, and other roles' turns of a chat. A block that is never closed reaches to the
    end: a response cut off inside its code has not answered yet. A block that is never opened begins at the start.
    """
    outside = after_thinking(_drop_closed_blocks(response_text), unfinished=unfinished_thinking)
    unclosed = _BLOCK_OPEN.search(outside)
    outside = outside[: unclosed.start()] if unclosed else outside
    return _STRAY_CLOSE.split(outside)[-1]


def _kind(match: re.Match[str]) -> str:
    return (match["tag"] or (match["role"] and "role") or match["fence"]).lower()


def _drop_closed_blocks(text: str) -> str:
    closings: dict[str, list[tuple[int, int]]] = {}
    for match in _BLOCK_CLOSE.finditer(text):
        closings.setdefault(_kind(match), []).append(match.span())
    openings = list(_BLOCK_OPEN.finditer(text))
    kept, position = [], 0
    for number, match in enumerate(openings):
        if match.start() < position:
            continue
        kind = _kind(match)
        candidates = closings.get(kind, [])
        first = last = bisect(candidates, (match.end(), 0))
        if kind in _PRINTED_TAGS:
            # What a tool prints may hold its own closing tag: the block ends at the last one before the next block.
            following = openings[number + 1].start() if number + 1 < len(openings) else len(text)
            last = max(first, bisect(candidates, (following, 0)) - 1)
        if last == len(candidates):
            continue
        kept.append(text[position : match.start()])
        position = candidates[last][1]
        if kind == "```" and (printed := _PRINTED_FENCE.match(text, position)):
            position = printed.end()
    kept.append(text[position:])
    return "".join(kept)


def _last_box(text: str) -> str | None:
    """Return the content of the complete box that ends last, the outer of nested ones. `\\{` and `\\}` do not count.

    Boxes joined only by "and", "or" or a comma are one answer of several values.
    """
    first = _BOX_OPEN.search(text)
    if first is None:
        return None
    open_braces: list[tuple[int, int]] = []  # where a box and its content start, (-1, -1) for a plain brace
    boxes: list[tuple[int, int, str]] = []  # outermost boxes: start, end, content
    for token in _BOX_TOKEN.finditer(text, first.start()):
        if token["box"]:
            open_braces.append(token.span())
        elif token["open"]:
            open_braces.append((-1, -1))
        elif token["close"] and open_braces:
            start, content_start = open_braces.pop()
            if start >= 0:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, token.end(), text[content_start : token.start()]))
    if not boxes:
        return None
    while len(boxes) > 1 and PLACEHOLDER.fullmatch(boxes[-1][2]):  # I used \boxed{} as asked
        boxes.pop()
    start, end, content = boxes[-1]
    minus, power = _MINUS.search(text, max(0, start - 8), start), _POWER.match(text, end)
    if minus or power:  # x = -\boxed{42}, \boxed{42}^2
        return f"{'-' if minus else ''}({content}){power[0] if power else ''}"
    values = [content]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if start - end > MAX_JOINT_CHARS or not _JOINT.fullmatch(text, end, start):
            break
        values.append(content)
    return ", ".join(reversed(values)) if len(set(values)) > 1 else values[0]
