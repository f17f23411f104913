"""Score stored episodes of a run again, without a model: by the evidence that an environment kept, or by the text.

An environment scores again what its first score kept (`Environment.score_again`); the verifier of a domain reads the
model's own text, as in training. So a run shows whether its tests and verifiers are repeatable, or what a change of
theirs would change.
In: a run's records. Out: an `Again` for each episode.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.environments.base import Environment
from verl_ext.environments.by_name import Combined, Environments
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import Score
from verl_ext.records import store
from verl_ext.records.trajectories import scored_text
from verl_ext.reward.verifiers import Verifiers, verify_response
from verl_ext.settings.domains import of_whole_run, read_domains

COLUMNS = ("uid", "session", "step", "validate", "id", "domain", "ability", "task", "ground_truth", "opening")
COLUMNS += ("turns", "acc", "evidence")
ATTEMPTS = 3  # if infrastructure fails


@dataclass(frozen=True)
class Again:
    """An episode and its two scores.

    Attributes:
        before, after: shares that are right; `after` is None if it could not be scored again.
        why: how it was scored, or why it could not be.
    """

    name: str
    domain: str
    before: float
    after: float | None
    why: str

    @property
    def verdict(self) -> str:
        if self.after is None:
            return "not possible"
        return "equal" if abs(self.after - self.before) < 1e-9 else "changed"


class Reverifier:
    """Scores rows of a run's records again.

    Args:
        config: the run's.
        tools: of the run's tool YAML and file of functions.
    Raises:
        ValueError: an environment or a verifier cannot be made.
    """

    def __init__(self, config: Any, tools: Sequence[Any] = ()):
        domains = {None: of_whole_run(config), **read_domains(config)}
        self._environments = {name: Environments(each.environment, config, tools) for name, each in domains.items()}
        self._verifiers = Verifiers.of_run(config)

    async def again(self, record: Mapping[str, Any]) -> Again:
        """Score a row of `judged`. Nothing is raised: `Again.why` has what was."""
        kind = "validation" if record["validate"] else "step"
        name = f"{kind} {record['step']}, {record['id'] or record['uid']}, response {record['session']}"
        score, why = None, ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                score = await self._score(record)
                why = score.method if score else "it has no evidence, and its environment scores by its own state"
                break
            except ToolUnavailable as error:
                why = f"{error} ({attempt} of {ATTEMPTS} attempts)"
            except Exception as error:  # of whoever wrote environment or verifier
                why = f"{type(error).__name__}: {error}"
                break
        return Again(name, record["domain"] or "", record["acc"], score.acc if score else None, why)

    async def _score(self, record: Mapping[str, Any]) -> Score | None:
        environments = self._environments.get(record["domain"], self._environments[None])
        row, environment = task_of(record), environments.make()
        try:
            if evidence := record.get("evidence"):
                return await environment.score_again(row, base64.b64decode(evidence))
            if _scores_itself(environment):
                return None
        finally:
            await environment.close()
        verifier = self._verifiers.find(row["data_source"], row["ability"])
        return await verify_response(verifier, scored_text(record["turns"]), row["reward_model"]["ground_truth"], row)


def judged(run: Path, *, step: int | None = None, domain: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's records that have a score, of one step and domain or of all."""
    for file, table in store.tables(run, "trajectories", COLUMNS):
        if step not in (None, file.step):
            continue
        for row in table.to_pylist():
            if row["acc"] is not None and row["turns"] and domain in (None, row["domain"]):
                yield row | {"step": file.step}


def task_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the data set that a record's episode was about, as far as the record has it."""
    task = json.loads(record["task"] or "{}")
    opening = json.loads(record["opening"] or "{}")
    return {
        "data_source": record["domain"] or "",
        "ability": record["ability"] or "",
        "raw_prompt": opening.get("messages") or [],
        "reward_model": {"ground_truth": task.pop("ground_truth", record["ground_truth"])},
        **task,
    }


def _scores_itself(environment: Environment) -> bool:
    parts = environment.parts if isinstance(environment, Combined) else [environment]
    return any(type(part).score is not Environment.score for part in parts)
