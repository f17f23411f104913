"""Prompts as tokens, encoded once for all samples of a group."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cachetools import LRUCache

from verl_ext.protocols.base import TEMPLATE_ERRORS


class EncodedPrompts:
    """Encodes prompts, and remembers the newest.

    Args:
        encode: (messages, schemas of tools) -> token ids, by the model's chat template.
    """

    def __init__(self, encode: Callable[[list[dict], list[dict] | None], Awaitable[list[int]]]):
        self._encode = encode
        self._tasks: LRUCache = LRUCache(maxsize=1024)

    async def ids(self, uid: str, messages: list[dict[str, Any]], schemas: list[dict] | None) -> list[int]:
        """Return a prompt's tokens.

        Raises:
            ValueError: the chat template rejects it; the message names `uid`.
        """
        prompt = repr((messages, schemas))  # not the uid: an environment may open differently for each episode
        if prompt not in self._tasks:
            self._tasks[prompt] = asyncio.ensure_future(self._encode(messages, schemas))
        try:
            return list(await asyncio.shield(self._tasks[prompt]))
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template rejects the prompt {uid}, {messages!r:.200}: {error}") from error
