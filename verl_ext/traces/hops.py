"""Whether a question needs all documents of its chain, and whether the tools of `search` lead from one to the next."""

import re
from collections.abc import Callable
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

from verl_ext.environments.search import Search
from verl_ext.environments.tool_errors import ToolError
from verl_ext.traces.chains import Chain, Documents
from verl_ext.traces.mentions import has_words, words_of

MAX_PAGES = 3  # that are read of a document
MIN_PART_WORDS = 2  # of a part of a question that is searched for by itself
_QUOTED = re.compile(r'"([^"]+)"')
_ENDS = re.compile(r"[.?!,;:()\n]+|\b(?:that|which|who|whose|where)\b")


class Drop(StrEnum):
    """Why a candidate is no question, in the order of the table."""

    NO_CHAIN = "no_chain"  # a document from which no chain of that length begins
    ANSWER_AMBIGUOUS = "answer_ambiguous"  # another document has it too
    NO_CLUE = "no_clue"  # the words around what is to be found in a document are too few, or fit elsewhere in it, too
    SHORTCUT = "shortcut"  # a document names one that is not the next
    PATH_BROKEN = "path_broken"  # the tools do not lead from each document to the next
    REFUSED = "refused"  # the teacher would not, or was cut off
    NO_START = "no_start"  # the teacher's question does not name the first document
    GIVES_AWAY = "gives_away"  # the question has the answer, or what is to be found on the way
    SINGLE_DOCUMENT = "single_document"  # a document has the answer, and names where to begin
    ONE_SEARCH = "one_search"  # searching the question, or a part of it, lists the document with the answer
    TOO_MANY = "too_many"  # questions with this last document, or this question is there already
    NOT_ASKED = "not_asked"  # the teacher did not answer; the next start asks again


class Dropped(Exception):
    """A candidate is dropped."""

    def __init__(self, reason: Drop):
        super().__init__(str(reason))
        self.reason = reason


class Told(NamedTuple):
    """A call of a tool, and what it said."""

    name: str
    arguments: dict[str, str | int]
    output: str


def check_chain(chain: Chain, documents: Documents) -> None:
    """Raise Dropped unless the answer stands in the last document only, and no document names one beyond the next."""
    if documents.having(chain.answer.name, most=2) != [chain.last.number]:
        raise Dropped(Drop.ANSWER_AMBIGUOUS)
    for (i, earlier), (j, later) in combinations(enumerate(chain.documents), 2):
        names = [later.title, chain.steps[j - 1].mention.name]
        if j - i > 1 and any(words_of(name) and has_words(earlier.text, name) for name in names):
            raise Dropped(Drop.SHORTCUT)


def gold_path(chain: Chain, search: Search, page_chars: int) -> list[Told]:
    """Return the calls that lead to the answer: each search has words that are known by then.

    Raises:
        Dropped: a search does not list the document, or no page shows what is to be found in it.
    """
    told: list[Told] = []
    queries = [chain.steps[0].document.title, *(step.mention.name for step in chain.steps)]
    for query, document, mention in zip(queries, chain.documents, chain.mentions, strict=True):
        told.append(Told("search", {"query": query}, _said(search.search, query)))
        if not is_listed(document.id, told[-1].output):
            raise Dropped(Drop.PATH_BROKEN)
        last_page = 1 + mention.start // page_chars
        for page in range(1, last_page + 1):
            arguments = {"id": document.id} | ({"page": page} if page > 1 else {})
            told.append(Told("read", arguments, _said(search.read, document.id, page)))
        if document.text[mention.start : mention.end] not in told[-1].output:  # also if a page ends in its middle
            raise Dropped(Drop.PATH_BROKEN)
    return told


def check_question(question: str, chain: Chain, documents: Documents) -> None:
    """Raise Dropped unless a question names the first document and nothing else of its chain, and no single document
    has both what it names and the answer."""
    first = chain.documents[0]
    if not has_words(question, first.title):
        raise Dropped(Drop.NO_START)
    found = [chain.answer.name, *(step.mention.name for step in chain.steps)]
    found += [document.title for document in chain.documents[1:]]
    if any(words_of(name) and has_words(question, name) for name in found):
        raise Dropped(Drop.GIVES_AWAY)
    if documents.having(chain.answer.name, *first.title.split(), most=1):
        raise Dropped(Drop.SINGLE_DOCUMENT)


def check_searches(question: str, chain: Chain, search: Search) -> None:
    """Raise Dropped if one search with words of the question lists the last document. Any thread may call it."""
    if any(is_listed(chain.last.id, _said(search.search, query)) for query in queries_of(question, chain)):
        raise Dropped(Drop.ONE_SEARCH)


def queries_of(question: str, chain: Chain) -> list[str]:
    """Return what one may search for who has nothing but the question: all of it, what it names, it without that, each
    of its parts, and what it names with the last part. Its parts are what it quotes, or else its clauses."""
    title = chain.documents[0].title
    rest = re.sub(re.escape(title), " ", question, flags=re.IGNORECASE)
    parts = [part for part in _QUOTED.findall(rest) or _ENDS.split(rest) if len(_long_words(part)) >= MIN_PART_WORDS]
    return [question, title, rest, *parts, *(f"{title} {part}" for part in parts[-1:])]


def is_listed(id: str, output: str) -> bool:
    """Return whether a search's output lists a document."""
    return re.search(rf"^\d+\. \[{re.escape(id)}\] ", output, re.MULTILINE) is not None


def _said(tool: Callable[..., str], *arguments: str | int) -> str:
    try:
        return tool(*arguments)
    except ToolError:
        return ""


def _long_words(text: str) -> list[str]:
    return [word for word in words_of(text).split() if len(word) > 2]
