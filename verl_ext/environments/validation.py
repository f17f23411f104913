"""Whether the rows of a data set can be scored: what is right for a row must score 1, and nothing at all less.

What is right is the reference solution that a row's environment knows (`Environment.solve`), or the response that its
verifier gives as right. `retool environments validate` checks many rows in parallel, the doctor a sample.
In: rows. Out: a `Checked` for each.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext.environments.base import gold_calls
from verl_ext.environments.by_name import Environments
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import Episode, EpisodeKey, Score, TokenRow, ToolUse
from verl_ext.outcome import RolloutEnd
from verl_ext.reward.verifiers import HasGold, Verifiers
from verl_ext.settings.domains import of_whole_run, read_domains

EXPECTED = {"right": "1", "empty": "0", "untouched": "below 1"}  # "untouched": nothing was done in the environment
ATTEMPTS = 3  # of an episode that infrastructure failed
ROW_S = 900.0  # of an attempt


@dataclass
class Checked:
    """What became of a row.

    Attributes:
        where: file and number of the row.
        scores: kind of answer, of EXPECTED -> what each try scored, or None if that could not be decided.
        said: kind of answer -> how it was scored, and the end of what the tests printed.
        error: what was raised: a broken row, or a failure of the infrastructure.
    """

    where: str
    row: Mapping[str, Any]
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def name(self) -> str:
        info = self.row.get("extra_info") or {}
        return str(info.get("id") or info.get("index") or "")

    @property
    def group(self) -> tuple[str, str, str]:
        """Return domain, kind and difficulty; "" for what the row does not say."""
        info = self.row.get("extra_info") or {}
        return str(self.row.get("data_source") or ""), str(info.get("kind") or ""), str(info.get("difficulty") or "")

    @property
    def wrong(self) -> list[str]:
        """Return what is not as it must be; nothing if all is well."""
        found = [self.error] if self.error else []
        for kind, scores in self.scores.items():
            if bad := [score for score in scores if not is_expected(kind, score)]:
                of = f" in {len(bad)} of {len(scores)} tries" if len(scores) > 1 else ""
                what = "state" if kind == "untouched" else "answer"
                found.append(f"the {kind} {what} scores {bad[0]}, expected {EXPECTED[kind]}{of}")
        return found


class Validator:
    """Checks rows of a run's domains.

    Args:
        environments: by `data_source`; None: of other rows.
        prompt_key: the column of a row's messages.
        repeat: how often the right answer is tried.
        row_s: seconds that an attempt at an answer may take.
    """

    def __init__(
        self,
        environments: Mapping[str | None, Environments],
        verifiers: Verifiers,
        *,
        prompt_key: str = "prompt",
        repeat: int = 1,
        row_s: float = ROW_S,
    ):
        self._environments, self._verifiers, self._prompt_key = environments, verifiers, prompt_key
        self._repeat, self._row_s = repeat, row_s

    @classmethod
    def of_run(cls, config: Any, tools: Sequence[Any] = (), **options: Any) -> "Validator":
        """Return the validator of a run's config.

        Args:
            tools: of the run's tool YAML and file of functions.
        Raises:
            ValueError: an environment or a verifier cannot be made.
        """
        domains = {None: of_whole_run(config), **read_domains(config)}
        environments = {name: Environments(each.environment, config, tools) for name, each in domains.items()}
        return cls(environments, Verifiers.of_run(config), **options)

    async def check(self, where: str, row: Mapping[str, Any]) -> Checked:
        """Check a row. Nothing is raised: `Checked.error` has an exception."""
        checked = Checked(where, row)
        try:
            await self._by_environment(checked)
        except Exception as error:  # of whoever wrote environment, verifier or row
            checked.error = f"{type(error).__name__}: {error}"
        return checked

    async def check_all(self, rows: Sequence[tuple[str, Mapping[str, Any]]], *, at_once: int) -> AsyncIterator[Checked]:
        """Yield the rows' results as they end."""
        free = asyncio.Semaphore(at_once)

        async def one(where: str, row: Mapping[str, Any]) -> Checked:
            async with free:
                return await self.check(where, row)

        running = [asyncio.ensure_future(one(*each)) for each in rows]
        try:
            for each in asyncio.as_completed(running):
                yield await each
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _by_environment(self, checked: Checked) -> None:
        gold_calls(checked.row)  # which may be of another form, although a verifier scores
        name = checked.row.get("data_source")
        environments = self._environments.get(name, self._environments[None])
        task = {**checked.row, "raw_prompt": checked.row[self._prompt_key], "uid": "validate", "session_id": 0}
        for kind in ("untouched", *["right"] * self._repeat):
            score, said = await self._episode(environments, kind, task)
            if score is None and kind == "untouched":
                return await self._by_verifier(checked)
            if score is not None:
                checked.scores.setdefault(kind, []).append(score.acc)
                checked.said[kind] = f"{score.method}\n{said}".strip()
        return None

    async def _episode(
        self, environments: Environments, kind: str, task: Mapping[str, Any]
    ) -> tuple[Score | None, str]:
        """Return the score of an episode in which all that is right was done, or nothing; None if the row has no
        reference solution, or a verifier scores. In ATTEMPTS at most, if infrastructure fails."""
        for attempt in range(1, ATTEMPTS + 1):
            environment = environments.make()
            try:
                async with asyncio.timeout(self._row_s):
                    if kind == "untouched":
                        await environment.open(task)
                    elif not await environment.solve(task):
                        return None, ""
                    return await environment.score(_ended()), getattr(environment, "tests_said", "")
            except ToolUnavailable:
                if attempt == ATTEMPTS:
                    raise
            finally:
                await environment.close()
        raise AssertionError  # the last attempt returns or raises

    async def _by_verifier(self, checked: Checked) -> None:
        row = checked.row
        verifier = self._verifiers.find(str(row.get("data_source") or ""), str(row.get("ability") or ""))
        truth = (row.get("reward_model") or {}).get("ground_truth")
        gold = (row.get("extra_info") or {}).get("gold_response")
        if gold is None and isinstance(verifier, HasGold):
            gold = verifier.gold(truth)
        sample = {**row, "raw_prompt": row.get(self._prompt_key)}
        for kind, text in (("empty", ""), ("right", gold)):
            if text is not None:
                score = await verifier.verify(text, truth, sample)
                checked.scores[kind], checked.said[kind] = [score.acc], score.method


def is_expected(kind: str, acc: float | None) -> bool:
    """Return whether the score of a kind of answer is as EXPECTED says; None never is."""
    return acc is not None and {"right": acc == 1.0, "empty": acc == 0.0, "untouched": acc < 1.0}[kind]


def _ended() -> Episode:
    return Episode(EpisodeKey("validate", 0), rows=[TokenRow()], use=ToolUse(), finish_reason=RolloutEnd.ANSWER)
