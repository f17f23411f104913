"""The life of an environment in an episode: opened once, closed in any case, within its time.

What may be repeated: `open`, because nothing has happened yet, and `score`. A call is repeated only in a validation,
and only if the environment has no state. What an environment does not answer in time is the infrastructure's failure;
a turn, or an episode, whose calls run for too long is the model's.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from verl_ext.environments.base import Environment, Opening
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import CallResult, Episode, Score
from verl_ext.outcome import UNVERIFIED_VERDICT, RolloutEnd
from verl_ext.protocols.base import Call
from verl_ext.protocols.tool_schemas import schemas_of
from verl_ext.reward.verifiers import checked_score
from verl_ext.rollout.ways import Way

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

T = TypeVar("T")

ATTEMPTS = 3  # of `open` and `score`
ANSWER_S = 600.0  # within which an environment must open, reply or score
CLOSE_S = 30.0  # within which it must close
BY_ENVIRONMENT = "environment: "  # how the method of a score begins that an environment failed to give
RETRY_PAUSE_S = 2.0  # before something that failed outside the model is tried again; each pause is longer by this much


class Life:
    """An environment of one episode.

    Args:
        way: makes the environment, and has the limits of its calls.
    Attributes:
        opening: what the model sees first.
        failure: why the environment could not be opened; None if it could.
        is_over_time: whether the calls ran for longer, all together, than `turn_s` or `episode_s` allows; waiting does
            not count.
    """

    def __init__(self, way: Way):
        self._schemas = way.environments.schemas
        self._make, self._turn_s, self._episode_s = way.environments.make, way.limits.turn_s, way.limits.episode_s
        self._ran_s = 0.0
        self.opening, self.failure, self.is_over_time = Opening([], {}), None, False
        self._environment: Environment

    @asynccontextmanager
    async def opened(self, task: Mapping[str, Any]) -> AsyncIterator["Life"]:
        """Open an environment for the block, in ATTEMPTS objects at most, and close each."""
        for attempt in range(1, ATTEMPTS + 1):
            self._environment = self._make()
            try:
                try:
                    opening, self.failure = await _in_time(self._environment.open(task)), None
                    tools = {name: self._shown(name, schema) for name, schema in opening.tools.items()}
                    self.opening = Opening(opening.messages, tools)
                except ToolUnavailable as error:
                    self.opening, self.failure = Opening(list(task["raw_prompt"]), dict(self._schemas)), str(error)
                    if attempt < ATTEMPTS:
                        continue
                yield self
                return
            finally:
                await _close(self._environment)
                if self.failure and attempt < ATTEMPTS:
                    await asyncio.sleep(RETRY_PAUSE_S * attempt)

    def _shown(self, name: str, schema: dict) -> dict:
        """Return a tool's schema as a prompt shows it (`Environments.schemas`)."""
        return self._schemas.get(name) or schemas_of([schema])[name]

    async def run(self, calls: Sequence[Call], retries: int) -> list[tuple[CallResult, float]]:
        """Return what the tools say to the calls of a turn, and after how many seconds.

        Args:
            retries: how often a call that infrastructure failed is made again, if the environment has no state.
        """
        running = [asyncio.ensure_future(self._run(call, retries)) for call in calls]
        try:
            ran = await asyncio.gather(*running)
        finally:  # if one raised, no other runs on in an environment that is about to be closed
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        turn_s = sum(result.run_s for result, _ in ran)
        self._ran_s += turn_s
        limits = ((turn_s, self._turn_s), (self._ran_s, self._episode_s))
        self.is_over_time = any(limit is not None and seconds > limit for seconds, limit in limits)
        return ran

    async def _run(self, call: Call, retries: int) -> tuple[CallResult, float]:
        """The response stays as it is if its call is repeated: sampling it anew would, with a dead sandbox, favour
        responses without calls."""
        started = time.perf_counter()
        result = await self._environment.call(call)
        for number in range(1, retries * self._environment.is_stateless + 1):
            if not result.failure:
                break
            logger.warning("a tool failed; calling it again (%d of %d): %s", number, retries, result.failure)
            await asyncio.sleep(RETRY_PAUSE_S * number)
            lost_s, attempts = time.perf_counter() - started, result.attempts
            again = await self._environment.call(call)
            result = replace(again, attempts=attempts + again.attempts, queue_s=again.queue_s + lost_s)
        return result, time.perf_counter() - started

    async def reply(self, text: str) -> tuple[list[dict[str, Any]] | None, RolloutEnd | None]:
        """Return what the environment says to a turn without a call; or None, and why the episode ends."""
        try:
            messages = await _in_time(self._environment.reply(text))
        except ToolUnavailable as error:
            logger.warning("an environment failed to reply: %s", error)
            return None, RolloutEnd.SANDBOX_FAILURE
        return messages, None if messages is not None else RolloutEnd.ANSWER

    async def score(self, episode: Episode) -> Score | None:
        """Return the environment's score, "unknown" if it fails to give one; None if it leaves that to a verifier.

        Raises:
            BrokenReward: the score is none, or its `acc` is no finite number in [0, 1].
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                score = await _in_time(self._environment.score(episode))
                if score is None:
                    return None
                score = checked_score(type(self._environment).__name__, score)
                return replace(score, method=BY_ENVIRONMENT + score.method) if score.is_unverified else score
            except ToolUnavailable as error:
                logger.warning("an environment failed to score (%d of %d): %s", attempt, ATTEMPTS, error)
                why = str(error)
            if attempt < ATTEMPTS:
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
        return Score(None, "", UNVERIFIED_VERDICT, f"{BY_ENVIRONMENT}{why}")


async def _in_time(answer: Awaitable[T]) -> T:
    """Return an environment's answer.

    Raises:
        ToolUnavailable: there is none within ANSWER_S.
    """
    limit = asyncio.timeout(ANSWER_S)
    try:
        async with limit:
            return await answer
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ToolUnavailable(f"no answer within {ANSWER_S:g} s") from error


async def _close(environment: Environment) -> None:
    """Close an environment, also if the episode raised or was cancelled. One that is too slow, or raises, is logged,
    and costs no episode."""
    try:
        await asyncio.wait_for(asyncio.shield(environment.close()), CLOSE_S)
    except TimeoutError:
        logger.warning("An environment was not closed in %g s.", CLOSE_S)
    except Exception:  # of whoever wrote it
        logger.exception("An environment could not be closed.")
