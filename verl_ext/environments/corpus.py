"""An index of a local corpus for full-text search, by SQLite's FTS5: ranking by bm25, English stems, no server.

In: a JSONL or Parquet file with `id`, `title` (optional) and `text`, or a folder of text files. Out: ranked documents,
and documents by pages. The index is a file in a cache folder, named after the corpus's digest, so that the processes of
a machine build it once and share it.
"""

import fcntl
import functools
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from verl_ext.environments.tool_errors import ToolError, ToolUnavailable
from verl_ext.runs import jsonl, parquet

FORM = 1  # of the index; part of its file's name
MAX_WORDS = 64  # of a query that count
SEARCH_S = 5.0  # of work for a query, after which it is the model's error: common words in a large corpus
SNIPPET_WORDS = 24
TEXT_SUFFIXES = (".txt", ".md")
CACHE_VARIABLE = "RETOOL_CACHE"  # environment variable with the folder of the indexes

# What stands between blanks, control characters and ASCII's punctuation; FTS5 splits it further, as it does the texts.
_WORD = re.compile(r"[^\x00-/:-@\[-`{-\x7f\s]+")
_COLUMNS = ("id", "title", "text")
STEPS = 10_000  # of SQLite's machine between two looks at the clock
_OF_THE_DISK = ("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_NOMEM", "SQLITE_CORRUPT", "SQLITE_NOTADB")
SCHEMA = """
CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(
    title, text, content='documents', content_rowid='number', tokenize='porter unicode61');
"""
_SEARCH = f"""
SELECT id, documents.title, snippet(words, 1, '', '', ' ... ', {SNIPPET_WORDS})
FROM words JOIN documents ON number = words.rowid
WHERE words MATCH ? AND rank MATCH 'bm25(2.0, 1.0)' ORDER BY rank LIMIT ?
"""


@dataclass(frozen=True)
class Found:
    """A document that a query found; `snippet` is a part of its text around the words of the query."""

    id: str
    title: str
    snippet: str


@dataclass(frozen=True)
class Page:
    """A page of a document, from 1 to `pages`."""

    title: str
    text: str
    pages: int


@functools.cache
def open_corpus(path: str) -> "Corpus":
    """Return the index of a corpus, which is built if the cache has none; once in a process for each path.

    Raises:
        ValueError: there is no such corpus, a document is not as expected, or SQLite has no full-text search.
    """
    source = Path(path).expanduser()
    if not source.exists():
        raise ValueError(f"The corpus {path!r} does not exist here ({Path.cwd()}). Name a JSONL or Parquet file.")
    index = _cache() / f"{_digest(source)}.{FORM}.sqlite"
    index.parent.mkdir(parents=True, exist_ok=True)
    with open(index.with_suffix(".lock"), "w") as lock:  # other processes wait, and find the index
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not index.exists():
            _build(source, index)
    return Corpus(index)


class Corpus:
    """A built index. Each call opens the file anew, so that any number of threads may use it and nothing stays open."""

    def __init__(self, index: Path):
        self._index = index.resolve().as_uri() + "?mode=ro&immutable=1"

    def connect(self) -> sqlite3.Connection:
        """Open the index to read its tables, see SCHEMA; the caller closes it."""
        return sqlite3.connect(self._index, uri=True)

    def search(self, query: str, top: int) -> list[Found]:
        """Return the best `top` documents that have a word of the query; any text is a query.

        Raises:
            ToolError: the query has no word, or takes more than SEARCH_S of its thread's time.
            ToolUnavailable: the index cannot be read.
        """
        words = list(dict.fromkeys(_WORD.findall(_encodable(query))))[:MAX_WORDS]
        if not words:
            raise ToolError("the query has no word; write the words to look for")
        return [Found(*row) for row in self._rows(_SEARCH, (" OR ".join(f'"{word}"' for word in words), top))]

    def read(self, id: str, page: int, page_chars: int) -> Page:
        """Return a page of a document.

        Raises:
            ToolError: there is no such document or page.
            ToolUnavailable: the index cannot be read.
        """
        start = "SELECT title, substr(text, ?, ?), length(text) FROM documents WHERE id = ?"
        first = 1 + (min(max(page, 1), 2**31) - 1) * page_chars
        rows = self._rows(start, (first, page_chars, _encodable(id)))
        if not rows:
            raise ToolError(f"there is no document {id[:80]!r}; `search` shows the ids")
        ((title, text, length),) = rows
        pages = max(1, -(-length // page_chars))
        if not 1 <= page <= pages:
            raise ToolError(f"{id} has the pages 1 to {pages}, not {page}" if pages > 1 else f"{id} has one page")
        return Page(title, text, pages)

    def _rows(self, statement: str, values: tuple) -> list[tuple]:
        deadline = time.thread_time() + SEARCH_S
        try:
            with closing(self.connect()) as index:
                index.set_progress_handler(lambda: time.thread_time() > deadline, STEPS)
                return index.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorname == "SQLITE_INTERRUPT":
                raise ToolError(f"the search took more than {SEARCH_S:g} s; use fewer and rarer words") from None
            if error.sqlite_errorname.startswith(_OF_THE_DISK):
                raise ToolUnavailable(f"the index {self._index} cannot be read: {error}") from error
            raise


def _cache() -> Path:
    folder = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "verl-retool")
    return Path(folder).expanduser() / "corpora"


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        if source.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"The corpus {source} is neither *.jsonl nor *.parquet nor a folder. Convert it.")
        return [source]
    files = sorted(file for file in source.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise ValueError(
            f"The corpus {source} is a folder without {' or '.join(TEXT_SUFFIXES)}. Name another, or a file."
        )
    return files


def _digest(source: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(source):
        digest.update(repr((str(file.relative_to(source)), file.stat().st_size)).encode())
        with open(file, "rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _build(source: Path, index: Path) -> None:
    """Write the index under another name, and rename it when it is whole."""
    part = index.with_suffix(f".{os.getpid()}.tmp")
    part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part)) as database, database:
            database.execute("PRAGMA journal_mode = OFF")
            try:
                database.executescript(SCHEMA)
            except sqlite3.OperationalError as error:
                raise ValueError(
                    f"The SQLite of this Python ({sqlite3.sqlite_version}) has no full-text search: {error}. Use a "
                    "Python whose SQLite has FTS5, as python.org's and Debian's have."
                ) from error
            insert = "INSERT INTO documents (id, title, text) VALUES (?, ?, ?)"
            try:
                database.executemany(insert, _documents(source))
            except sqlite3.IntegrityError as error:
                raise ValueError(
                    f"The corpus {source} has an id twice: {error}. Give each document its own."
                ) from error
            database.execute("INSERT INTO words (words) VALUES ('rebuild')")
            if not database.execute("SELECT count(*) FROM documents").fetchone()[0]:
                raise ValueError(f"The corpus {source} has no document. Add some, or name another.")
        part.rename(index)
    finally:
        part.unlink(missing_ok=True)


def _documents(source: Path) -> Iterator[tuple[str, str, str]]:
    if source.is_dir():
        for file in _files(source):
            name = str(file.relative_to(source))
            yield _encodable(name), _encodable(file.stem), file.read_text(encoding="utf-8", errors="replace")
        return
    rows: Iterable[dict] = parquet.stream(source) if source.suffix == ".parquet" else jsonl.read(source)
    for number, row in enumerate(rows, 1):
        document = {"title": "", **{name: value for name, value in row.items() if value is not None}}
        wrong = [name for name in _COLUMNS if not isinstance(document.get(name), str)]
        if wrong or not document["id"] or not document["text"].strip():
            raise ValueError(
                f"{source}, document {number}: expected texts in id, title (optional) and text, got {row!r:.200}."
            )
        name, title, text = (_encodable(document[name]) for name in _COLUMNS)
        yield name, title, text


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which SQLite refuses."""
    return text.encode("utf-8", "replace").decode()
