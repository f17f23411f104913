"""The environment `search`: tools that look up words in a local corpus and read its documents; see corpus.py.

retool.environment: {name: search, corpus: corpus.jsonl, top: 5}
"""

from typing import Any

from verl_ext.environments.base import Environment, tool
from verl_ext.environments.corpus import Corpus, open_corpus


class Search(Environment):
    """An episode that may search a corpus, which all episodes share and none can change.

    Args:
        corpus: a JSONL or Parquet file with `id`, `title` (optional) and `text`; or a folder of text files, whose ids
            are their paths. A relative path starts at the current folder.
        top: documents that a search lists, 1 to 100.
        page_chars: characters of a page that `read` shows, at least 100. `retool.max_tool_response_tokens` must have
            room for them, or the page's middle is cut.
    Raises:
        ValueError: a setting is out of range, or the corpus cannot be used.
    """

    is_stateless = True

    def __init__(self, config: Any = None, *, corpus: str, top: int = 5, page_chars: int = 1500):
        super().__init__(config)
        self._corpus, self._top, self._page_chars = _opened(corpus, top, page_chars), top, page_chars

    @classmethod
    def schemas(cls, config: Any = None, **settings: Any) -> dict[str, dict]:
        """Return the schemas of `search` and `read`. The index is built here: when the run starts."""
        cls(config, **settings)
        return super().schemas(config)

    @tool
    def search(self, query: str) -> str:
        """Find documents by their words. Returns the ids and titles of the best ones, each with a part of its text.

        Args:
            query: the words to look for.
        """
        found = self._corpus.search(query, self._top)
        lines = [f"{n}. [{each.id}] {each.title}\n{each.snippet}" for n, each in enumerate(found, 1)]
        return "\n".join(lines) or "No document has any of these words."

    @tool
    def read(self, id: str, page: int = 1) -> str:
        """Read a document.

        Args:
            id: the id of the document, as `search` shows it.
            page: the number of the page, from 1.
        """
        found = self._corpus.read(id, page, self._page_chars)
        return f"{found.title} (page {page} of {found.pages})\n{found.text}"


def _opened(corpus: str, top: int, page_chars: int) -> Corpus:
    """Return the corpus, once the settings are checked."""
    for name, value, least, most in (("top", top, 1, 100), ("page_chars", page_chars, 100, 10**6)):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"search: {name} is {value!r}; expected a whole number from {least} to {most}.")
    return open_corpus(str(corpus))
