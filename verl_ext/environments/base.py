"""What an episode acts in: `Environment`, one object for one episode, used once.

The agent loop (rollout/loop.py) calls `open` first, then `call` for each call of a tool and `reply` for each turn
without one, `score` when the episode has ended, and `close` in any case. Exceptions say whose fault a failure is, see
tool_errors.py: `ToolUnavailable` marks the episode as failed by the infrastructure; any other is ours, and raised.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from verl_ext.episode import CallResult, Episode, Score
from verl_ext.protocols.base import Call

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

CLOSE_S = 30.0  # within which an environment must close


@dataclass(frozen=True)
class Opening:
    """What the model sees first: the messages of the prompt, and by name the schemas of the tools that it may call."""

    messages: list[dict[str, Any]]
    tools: dict[str, dict]


class Environment(Protocol):
    """The life of one episode in its world."""

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin the episode.

        Args:
            task: the row of the data set: `raw_prompt`, `extra_info`, `tools_kwargs`, `reward_model`, ...
        Raises:
            ValueError: the row is wrong.
            ToolUnavailable: something that the episode needs did not answer, also when asked again.
        """

    async def call(self, call: Call) -> CallResult:
        """Run one call of a tool of the opening. The calls of a turn may run at the same time."""

    async def reply(self, text: str) -> list[dict[str, Any]] | None:
        """Return the user's messages that answer a turn without a call; None: the turn ends the episode.

        Args:
            text: what the model wrote, with the end token.
        """

    async def score(self, episode: Episode) -> Score | None:
        """Score the ended episode; None: the reward manager does, by the row's ground truth."""

    async def close(self) -> None:
        """Release the sessions, processes and connections of the episode. The loop may close an environment that `open`
        has not finished opening; a second close does nothing."""


@asynccontextmanager
async def closed_at_end(environment: Environment, within_s: float = CLOSE_S) -> AsyncIterator[Environment]:
    """Close an environment when the block ends, also if the episode raised or was cancelled. One that is too slow is
    logged, and holds nobody."""
    try:
        yield environment
    finally:
        try:
            await asyncio.wait_for(asyncio.shield(environment.close()), within_s)
        except TimeoutError:
            logger.warning("An environment was not closed in %g s.", within_s)
