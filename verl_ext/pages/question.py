"""What a prompt asks, for a page: the user's last message without the instructions that data sets put around it."""

import re

from verl_ext.datasets.text import bare_problem

WORDS = 80  # characters of a question that stand for it where a problem is named
MOST = 20_000  # characters of a question; the rest is not looked at
# How chat templates begin and end the user's message: with their special tokens, and as verl's dumps have it, without.
_USER = re.compile(
    r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\n*|<start_of_turn>user\n|\[INST\]|(?:^|\n)user\n"
)
_END = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|\[/INST\]|<\|(?:im_start|start_header_id|endoftext)\|>|\nassistant\n"
)
_SPECIAL = re.compile(r"<\|\w+\|>|</?s>")


def question_of(prompt: str | None) -> str:
    """Return the problem of a prompt as a chat template rendered it, in one line; of another template the whole prompt.
    "" where there is no prompt."""
    prompt, start = prompt or "", 0
    for found in _USER.finditer(prompt):
        start = found.end()
    end = _END.search(prompt, start)
    text = _SPECIAL.sub("", prompt[start : end.start() if end else len(prompt)])
    return bare_problem(" ".join(text.split())[:MOST])


def first_words(prompt: str | None) -> str:
    """Return as many words of `question_of` as stand for it where a problem is named."""
    question = question_of(prompt)
    start, space, _ = question[: WORDS + 1].rpartition(" ")
    return question if len(question) <= WORDS else f"{start if space else question[:WORDS]} …"
