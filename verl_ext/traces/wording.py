"""How a chain of documents becomes a question: by a template, or by a teacher who sees a sentence of each document."""

import hashlib
import re

from verl_ext.traces.chains import Chain
from verl_ext.traces.mentions import clue, sentence

ENDING = "What is ({gap}), as it is written there?"
SYSTEM = (
    "You write questions for a search engine's test. A question asks for something that is found by going from one "
    "document to the next."
)
USER = """Each sentence below is from another document. The first document is about {title}. What stands between ** \
leads to the next document; the last one is the answer.

{sentences}

Write one question in one or two sentences that has this answer.
1. Name {title}, word for word.
2. Do not write any of the words between **. Describe them by how the sentences connect them.
3. Only one answer may be right: say exactly what of the last document is asked for.

Answer with the question and nothing else."""


def templated(chain: Chain) -> str | None:
    """Return the question by the template: a clause of each document, with a number for each thing that is to be found.

    None if a clause is too short, or if more than one place in its document fits it.
    """
    lines = []
    for gap, (document, mention) in enumerate(zip(chain.documents, chain.mentions, strict=True), 1):
        found = clue(document.text, mention, f"({gap})")
        if found is None:
            return None
        if gap == 1:
            where = f"The document about {document.title}"
        elif chain.steps[gap - 2].is_shared:
            where = f"The other document that names ({gap - 1})"
        else:
            where = f"The document about ({gap - 1})"
        lines.append(f'{where} says "{_with_gaps(found, chain)}".')
    return " ".join([*lines, ENDING.format(gap=len(lines))])


def _with_gaps(text: str, chain: Chain) -> str:
    """Return a text with its number in place of each thing that leads to a document: often a text repeats its title."""
    names = [(step.mention.name, gap) for gap, step in enumerate(chain.steps, 1)]
    names += [(chain.documents[gap].title, gap) for gap, step in enumerate(chain.steps, 1) if not step.is_shared]
    for name, gap in sorted(names, key=lambda each: -len(each[0])):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", f"({gap})", text) if name else text
    return text


def request(chain: Chain) -> list[dict[str, str]]:
    """Return the conversation that asks a teacher for the question of a chain."""
    lines = []
    for number, (document, mention) in enumerate(zip(chain.documents, chain.mentions, strict=True), 1):
        text, raw = sentence(document.text, mention), mention.name
        lines.append(f"{number}. {text.replace(raw, f'**{raw}**', 1)}")
    user = USER.format(title=chain.documents[0].title, sentences="\n".join(lines))
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def digest() -> str:
    """Return a hash of the template for teachers."""
    return hashlib.sha256(f"{SYSTEM}\n{USER}".encode()).hexdigest()[:16]


def key(messages: list[dict[str, str]]) -> str:
    """Return a hash of a request."""
    return hashlib.sha256(messages[-1]["content"].encode()).hexdigest()[:32]
