"""What a text mentions: links, names, numbers and dates; and the words around a mention, with a gap in its place."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CHARS = 80  # of a mention
MAX_TITLE_WORDS = 6
SIDE_WORDS = 12  # of a clue, before and after its gap
MIN_CLUE_WORDS = 2  # of three letters or more

_WIKI = re.compile(r"\[\[([^\[\]|#\n]+)(?:#[^\[\]|\n]*)?(?:\|([^\[\]\n]+))?\]\]")
_MARKDOWN = re.compile(r"(?<!!)\[([^\[\]\n]+)\]\(<?([^()\s>]+)>?\)")
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATES = re.compile(rf"\b(?:\d{{1,2}} (?:{_MONTHS})|(?:{_MONTHS}) \d{{1,2}},) \d{{4}}\b|\b\d{{4}}-\d\d-\d\d\b")
_NUMBERS = re.compile(r"(?<![\w.,/:-])\d+(?:[.,]\d+)*(?![\w/:-]|[.,]\d)")
_SENTENCE_ENDS = re.compile(r"[.!?]['\"’”)\]]*\s|\n|\s\||\|\s")
_CLAUSE_ENDS = re.compile(r"[.!?,;:]['\"’”)\]]*(?:\s|\Z)|[\n()]|\s\||\|\s|\s[–—-]\s")


@dataclass(frozen=True)
class Mention:
    """Where a text mentions something.

    Attributes:
        start, end: of what stands there, markup included.
        name: the words to search for.
        target: what a link leads to: a title, or the path of a document; of other mentions, the name.
    """

    start: int
    end: int
    name: str
    target: str


def markup_links(text: str) -> list[Mention]:
    """Return the wiki and markdown links of a text."""
    wiki = [Mention(m.start(), m.end(), _plain(m[1]), _plain(m[1])) for m in _WIKI.finditer(text)]
    return wiki + [Mention(m.start(), m.end(), _plain(m[1]), m[2]) for m in _MARKDOWN.finditer(text)]


def names(text: str) -> list[Mention]:
    """Return the runs of capitalised words that do not begin a sentence, where a word is capitalised anyhow."""
    return [
        Mention(run[0].start(), run[-1].end(), _plain(text[run[0].start() : run[-1].end()]), "")
        for run in _runs(text)
        if not _begins_sentence(text, run[0].start()) and run[-1].end() - run[0].start() <= MAX_CHARS
    ]


def possible_titles(text: str) -> Iterator[list[Mention]]:
    """Yield, for each place where a title may begin, what may be one, the longest first.

    A part of a longer name is none: of "New Karst Bridge", neither "Karst" nor "Karst Bridge" is yielded.
    """
    words = list(_WORD.finditer(text))
    for first, word in enumerate(words):
        if not word[0][0].isupper() or _continues_name(text, words, first):
            continue
        found = []
        for last in range(min(first + MAX_TITLE_WORDS, len(words)) - 1, first - 1, -1):
            start, end = word.start(), words[last].end()
            if end - start <= MAX_CHARS and not _is_joined(text, words, last):
                found.append(Mention(start, end, _plain(text[start:end]), _plain(text[start:end])))
        yield found


def answers(text: str) -> list[Mention]:
    """Return the dates, numbers and names of a text, none within a date or within markup."""
    dates = [Mention(m.start(), m.end(), m[0], m[0]) for m in _DATES.finditer(text)]
    taken = [(each.start, each.end) for each in [*dates, *markup_links(text)]]
    others = [Mention(m.start(), m.end(), m[0], m[0]) for m in _NUMBERS.finditer(text)] + names(text)
    free = [each for each in others if not any(each.start < end and start < each.end for start, end in taken)]
    return sorted([*dates, *free], key=lambda each: each.start)


def clue(text: str, mention: Mention, gap: str) -> str | None:
    """Return the clause of a mention with `gap` in its place, without markup.

    None if too few words surround it, or if another place of the text fits them as well.
    """
    for ends in (_CLAUSE_ENDS, _SENTENCE_ENDS):
        before, after = _around(text, mention, ends)
        if sum(len(word) > 2 for word in _WORD.findall(f"{before} {after}")) >= MIN_CLUE_WORDS:
            break
    else:
        return None
    pattern = rf"{re.escape(before)}(?=(.{{1,{MAX_CHARS}}}?){re.escape(after)})"
    if len(re.findall(pattern, text, re.DOTALL)) != 1 and before:
        return None
    if not before and text.count(after) != 1:
        return None
    return without_markup(f"{before}{gap}{after}").replace('"', "'")


def sentence(text: str, mention: Mention) -> str:
    """Return the sentence of a mention, without markup."""
    before, after = _around(text, mention, _SENTENCE_ENDS, words=4 * SIDE_WORDS)
    return without_markup(f"{before}{text[mention.start : mention.end]}{after}")


def without_markup(text: str) -> str:
    """Return a text as a reader sees it, on one line."""
    text = _MARKDOWN.sub(r"\1", _WIKI.sub(lambda found: found[2] or found[1], text))
    return _plain(re.sub(r"[\[\]*`]", "", text))  # brackets are left if a clause ends within a link


def has_words(text: str, part: str) -> bool:
    """Return whether the words of `part` stand one after the other in a text; case and punctuation do not count."""
    return f" {words_of(part)} " in f" {words_of(text)} "


def words_of(text: str) -> str:
    """Return the words of a text in small letters, with one blank between them."""
    return " ".join(re.findall(r"[^\W_]+", text)).casefold()


def _plain(text: str) -> str:
    return " ".join(text.split())


def _runs(text: str) -> Iterator[list[re.Match[str]]]:
    run: list[re.Match[str]] = []
    for word in _WORD.finditer(text):
        is_capital = word[0][0].isupper()
        if run and not (is_capital and text[run[-1].end() : word.start()] == " "):
            yield run
            run = []
        if is_capital:
            run.append(word)
    if run:
        yield run


def _is_joined(text: str, words: list[re.Match[str]], left: int) -> bool:
    """Return whether a capitalised word is followed by one, with a blank between them."""
    if not 0 <= left < len(words) - 1:
        return False
    one, other = words[left], words[left + 1]
    return one[0][0].isupper() and other[0][0].isupper() and text[one.end() : other.start()].isspace()


def _continues_name(text: str, words: list[re.Match[str]], number: int) -> bool:
    return _is_joined(text, words, number - 1) and not _begins_sentence(text, words[number - 1].start())


def _begins_sentence(text: str, start: int) -> bool:
    before = text[max(0, start - 40) : start].rstrip(" \t\"'“‘(*#>-")
    return not before or before[-1] in ".!?:\n"


def _around(text: str, mention: Mention, ends: re.Pattern[str], words: int = SIDE_WORDS) -> tuple[str, str]:
    """Return what stands before and after a mention up to the ends of its clause or sentence."""
    before, after = text[max(0, mention.start - 400) : mention.start], text[mention.end : mention.end + 400]
    before = before[max((found.end() for found in ends.finditer(before)), default=0) :]
    found = ends.search(after)
    after = after[: found.start()] if found else after
    starts = [word.start() for word in re.finditer(r"\S+", before)]
    stops = [word.end() for word in re.finditer(r"\S+", after)]
    before = before[starts[-words] :] if len(starts) > words else before.lstrip()
    after = after[: stops[words - 1]] if len(stops) > words else after.rstrip()
    return before, after
