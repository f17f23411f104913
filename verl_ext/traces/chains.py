"""Chains of documents of a corpus, in which each leads to the next: by a link, by its title, or by a shared name.

In: the index of a corpus, environments/corpus.py. Out: chains, whose last document has what may be an answer. The
corpus stays on disk, and so does the table of its titles.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from posixpath import basename, dirname, join, normpath, splitext

from verl_ext.environments.corpus import Corpus
from verl_ext.traces.mentions import Mention, answers, markup_links, names, possible_titles, words_of

MAX_WAYS = 4  # from a document to others that are tried
MAX_NAMES = 12  # of a document that are looked up
MAX_ANSWERS = 20  # of a chain that are looked at
_TITLES = """
CREATE TEMP TABLE titles AS SELECT title, number FROM documents WHERE title != '';
CREATE INDEX temp.by_title ON titles (title, number);
"""


@dataclass(frozen=True)
class Document:
    """A document; `text` is the part that is used, `number` its place in the corpus, from 1."""

    number: int
    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Step:
    """From a document to the next one of its chain.

    Attributes:
        mention: in the document's text.
        is_shared: both documents mention a name that no third one has; else the mention is the next one's title, or
            a link to it.
    """

    document: Document
    mention: Mention
    is_shared: bool


@dataclass(frozen=True)
class Chain:
    """Documents that lead from one to the next; `answer` is mentioned by the last one."""

    steps: tuple[Step, ...]
    last: Document
    answer: Mention

    @property
    def documents(self) -> list[Document]:
        return [*(step.document for step in self.steps), self.last]

    @property
    def mentions(self) -> list[Mention]:
        """Return what is to be found in each document."""
        return [*(step.mention for step in self.steps), self.answer]


class Documents:
    """The documents of a corpus, with what links them.

    Args:
        max_chars: of a text from its start that are used.
    """

    def __init__(self, corpus: Corpus, max_chars: int):
        self._max_chars = max_chars
        self._index = corpus.connect()
        self._index.executescript(_TITLES)
        self.count: int = self._index.execute("SELECT count(*) FROM documents").fetchone()[0]

    def __enter__(self) -> "Documents":
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()

    def get(self, number: int) -> Document:
        sql = "SELECT number, id, title, substr(text, 1, ?) FROM documents WHERE number = ?"
        return Document(*self._index.execute(sql, (self._max_chars, number)).fetchone())

    def order(self, seed: int) -> Iterator[int]:
        """Yield all numbers in an order that the seed decides; none is held."""
        rng = random.Random(seed)
        start, step = rng.randrange(self.count), rng.randrange(self.count) or 1
        while gcd(step, self.count) > 1:
            step += 1
        yield from ((start + place * step) % self.count + 1 for place in range(self.count))

    def having(self, *phrases: str, most: int) -> list[int]:
        """Return the numbers of at most `most` documents that have all phrases, by the index: stems, case ignored."""
        query = " AND ".join(f'"{words_of(phrase)}"' for phrase in phrases if words_of(phrase))
        if not query:
            return []
        found = self._index.execute("SELECT rowid FROM words WHERE words MATCH ? LIMIT ?", (query, most))
        return [number for (number,) in found]

    def chains(self, start: int, hops: int, rng: random.Random) -> Iterator[Chain]:
        """Yield chains of `hops` documents from a document, in an order that `rng` decides.

        A start without a title has none: nothing could name it.
        """
        first = self.get(start)
        if not words_of(first.title) or len(self._titled(first.title)) != 1:
            return
        for steps, last in self._walks(first, hops, rng, {start}):
            found = [each for each in answers(last.text) if words_of(each.name) not in words_of(last.title)]
            for answer in rng.sample(found, min(MAX_ANSWERS, len(found))):
                yield Chain(steps, last, answer)

    def _walks(
        self, document: Document, hops: int, rng: random.Random, seen: set[int]
    ) -> Iterator[tuple[tuple[Step, ...], Document]]:
        if hops == 1:
            yield (), document
            return
        ways = [way for way in self._ways(document) if way[1] not in seen]
        for step, number in rng.sample(ways, min(MAX_WAYS, len(ways))):
            for steps, last in self._walks(self.get(number), hops - 1, rng, seen | {number}):
                yield (step, *steps), last

    def _ways(self, document: Document) -> list[tuple[Step, int]]:
        """Return how to come from a document to others, the first way to each."""
        found: dict[int, Step] = {}
        for mention, number in [*self._linked(document), *self._named(document)]:
            if number != document.number:
                found.setdefault(number, Step(document, mention, False))
        for mention, number in self._sharing(document):
            found.setdefault(number, Step(document, mention, True))
        return [(step, number) for number, step in found.items()]

    def _linked(self, document: Document) -> Iterator[tuple[Mention, int]]:
        for mention in markup_links(document.text):
            numbers = self._titled(mention.target) or self._at(document.id, mention.target)
            if len(numbers) == 1 and words_of(mention.name):
                yield mention, numbers[0]

    def _named(self, document: Document) -> Iterator[tuple[Mention, int]]:
        links, covered = markup_links(document.text), 0
        for candidates in possible_titles(document.text):
            if candidates and candidates[0].start < covered:
                continue
            for mention in candidates:
                numbers = self._titled(mention.name)
                if numbers:
                    covered = mention.end
                    if len(numbers) == 1 and not any(_overlap(mention, link) for link in links):
                        yield mention, numbers[0]
                    break

    def _sharing(self, document: Document) -> Iterator[tuple[Mention, int]]:
        """Yield names that one other document mentions, and which."""
        taken = markup_links(document.text)
        looked_up: dict[str, Mention] = {}
        for mention in names(document.text):
            is_own = words_of(mention.name) in words_of(document.title)
            if not (is_own or self._titled(mention.name) or any(_overlap(mention, each) for each in taken)):
                looked_up.setdefault(mention.name, replace(mention, target=mention.name))
        for name, mention in list(looked_up.items())[:MAX_NAMES]:
            others = [number for number in self.having(name, most=3) if number != document.number]
            if len(others) == 1 and any(each.name == name for each in names(self.get(others[0]).text)):
                yield mention, others[0]

    def _titled(self, title: str) -> list[int]:
        """Return the numbers of at most two documents with a title."""
        found = self._index.execute("SELECT number FROM titles WHERE title = ? LIMIT 2", (title,))
        return [number for (number,) in found]

    def _at(self, id: str, path: str) -> list[int]:
        """Return the number of the document that a path in the document `id` leads to."""
        path = path.partition("#")[0]
        near = normpath(join(dirname(id), path))
        ids = (path, near, splitext(basename(near))[0])
        found = self._index.execute("SELECT number FROM documents WHERE id IN (?, ?, ?) LIMIT 2", ids)
        return [number for (number,) in found]


def _overlap(one: Mention, other: Mention) -> bool:
    return one.start < other.end and other.start < one.end
