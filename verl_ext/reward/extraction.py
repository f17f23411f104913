"""Find the one answer that a response commits to; nothing here looks at the maths.

An answer is the last complete `\\boxed{...}` (or, without any, the last `<answer>...</answer>`) in what the model says
after its last `</think>`, outside the code it wrote and outside what tools printed.
"""

import re

_TAGS = ("code", "interpreter", "tool_call", "tool_response", "output")
_PRINTED_BY_A_TOOL = {"interpreter", "tool_response", "output"}
_PROSE_FENCES = {"latex", "tex", "math", "markdown", "md", "text", "plaintext"}
# A fence without a language is prose too: models frame final answers that way.
_BLOCK_OPEN = re.compile(rf"<(?P<tag>{'|'.join(_TAGS)})>|```[ \t]*(?!(?:{'|'.join(_PROSE_FENCES)})\b)\w[^\n`]*\n")
_BOX_OPEN = re.compile(r"\\+(?:boxed|fbox)\s*\{")
_BOX_TOKEN = re.compile(rf"(?P<box>{_BOX_OPEN.pattern})|\\.|(?P<open>\{{)|(?P<close>\}})", re.DOTALL)
_LAYOUT = r"(?:\s|\$|\\[()\[\], ]|\\q?quad)*"
_AND = rf"(?:\\text\s*\{{\s*)?(?:and|or)(?:\s*\}})?{_LAYOUT}"
_JOINT = re.compile(rf"{_LAYOUT}(?:[,;]{_LAYOUT}(?:{_AND})?|{_AND})")
MAX_JOINT_CHARS = 40


def extract_answer(response_text: str) -> str | None:
    """The text inside the last complete box (or answer tag), untouched; None where there is none.

    The whole text is searched, in time linear in its length. An unclosed box is not an answer.
    """
    spoken = strip_tool_blocks(response_text)
    box = _last_box(spoken)
    if box is not None:
        return box
    end = spoken.rfind("</answer>")
    start = spoken.rfind("<answer>", 0, max(end, 0))
    return spoken[start + len("<answer>") : end] if start >= 0 else None


def strip_tool_blocks(response_text: str) -> str:
    """What the model says after its last `</think>`, without its code, its tool calls and the tools' output.

    Blocks are `<code>`, `<interpreter>`, `<tool_call>`, `<tool_response>`, `<output>` and fences with a language name.
    A block that is never closed reaches to the end: a response cut off inside its code has not answered yet.
    """
    outside = _drop_closed_blocks(response_text).rpartition("</think>")[2]
    unclosed = _BLOCK_OPEN.search(outside)
    return outside[: unclosed.start()] if unclosed else outside


def _drop_closed_blocks(text: str) -> str:
    kept, position, never_closed = [], 0, set()
    for match in _BLOCK_OPEN.finditer(text):
        tag = match["tag"]
        closing = f"</{tag}>" if tag else "```"
        if match.start() < position or closing in never_closed:
            continue
        end = -1
        if tag in _PRINTED_BY_A_TOOL:
            # What a tool prints may hold its own closing tag: the block ends at the last one before the next block.
            following = _BLOCK_OPEN.search(text, match.end())
            end = text.rfind(closing, match.end(), following.start() if following else len(text))
        if end < 0:
            end = text.find(closing, match.end())
        if end < 0:
            never_closed.add(closing)
            continue
        kept.append(text[position : match.start()])
        position = end + len(closing)
    kept.append(text[position:])
    return "".join(kept)


def _last_box(text: str) -> str | None:
    """Content of the complete box that ends last: of nested boxes the outer one. `\\{` and `\\}` do not count.

    Boxes joined by nothing but "and", "or" or a comma are one answer of several values.
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
    values = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if start - end > MAX_JOINT_CHARS or not _JOINT.fullmatch(text, end, start):
            break
        values.append(content)
    return ", ".join(reversed(values))
