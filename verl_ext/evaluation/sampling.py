"""Take an evaluation's samples: training's agent loop on every problem, n times, scored by the reward manager.

A sample that an infrastructure failure (sandbox, server, verifier) ended is in no figure, and the next start retries
it. Everything here runs in one event loop.
"""

import functools
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from verl_ext.datasets.rows import DataError, progress_bar
from verl_ext.environments.base import selected
from verl_ext.environments.shared_client import shared_client
from verl_ext.environments.toolbox import load_tools
from verl_ext.episode import Episode, EpisodeKey, TokenRow, ToolUse
from verl_ext.evaluation.meter import Meter
from verl_ext.evaluation.samples import failure_of
from verl_ext.evaluation.store import Store
from verl_ext.outcome import UNVERIFIED, RolloutEnd
from verl_ext.records.trajectories import problem_columns, to_record, turns_of
from verl_ext.reward.rewarder import Rewarder
from verl_ext.rollout.base import EpisodeLoop
from verl_ext.rollout.lives import BY_ENVIRONMENT
from verl_ext.rollout.seeds import seed_of
from verl_ext.rollout.servers import Server, ServerFailure
from verl_ext.rollout.standalone import make_loop
from verl_ext.runs.workers import run_together
from verl_ext.settings import START, FailedSamples, registered_loops
from verl_ext.usage import USAGE

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 16  # samples in a row that failed because of sandbox or server
_JUDGED = ("end_reason", "exception", "fault", "score", "acc", "reward_parts", "verdict")  # columns of a verdict


class InfrastructureDown(RuntimeError):
    """GIVE_UP_AFTER samples in a row failed because of sandbox or server."""


@dataclass(frozen=True)
class Task:
    """One sample to take: a problem and its number among the problem's n."""

    row: dict[str, Any]
    number: int
    seed: int

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.row["uid"], self.number)


def make_tasks(rows: Sequence[dict[str, Any]], n: int, seed: int) -> list[Task]:
    """Return tasks for one sample of every problem, then for the second, ...: early results cover all problems."""
    return [Task(row, number, seed_of(seed, row["uid"], number)) for number in range(n) for row in rows]


def pending(tasks: Sequence[Task], there: Mapping[EpisodeKey, Mapping[str, Any]]) -> list[Task]:
    """Return the tasks without a judged row."""
    return [task for task in tasks if task.key not in there or failure_of(there[task.key])]


def is_judged_again(row: Mapping[str, Any] | None) -> bool:
    """Tell whether a recorded sample only lacks its verdict, and the response is still there to be judged."""
    if row is None or failure_of(row) != UNVERIFIED:
        return False
    return not ((row["verdict"] or {}).get("rule") or "").startswith(BY_ENVIRONMENT)  # its world is gone


class Sampler:
    """Rolls out and scores samples as training does.

    Args:
        config: a run's, with `retool`, `data`, `reward` and `actor_rollout_ref.rollout`; sampling settings are its
            `val_kwargs`.
        hf_model_type: `model_type` of the model's config.json; None uses verl's default way to build a prompt.
    """

    def __init__(
        self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, server: Server, hf_model_type: str | None = None
    ):
        rollout = config.actor_rollout_ref.rollout
        self._tokenizer, self._server = tokenizer, server
        self._max_prompt_length, self._max_response_length = rollout.prompt_length, rollout.response_length
        self._retries = FailedSamples.from_config(config).retries
        self._params = {name: rollout.val_kwargs[name] for name in ("temperature", "top_p", "top_k")}
        own = {
            "actor_rollout_ref": {"rollout": {"prompt_length": sys.maxsize}},
            "retool": {"recorder": {"enable": True}},
        }
        config = cast(DictConfig, OmegaConf.merge(config, own))
        self._default_loop = rollout.agent.default_agent_loop
        self._protocols = registered_loops(config)
        self._sandbox = config.retool.sandbox
        tools = load_tools(rollout.multi_turn, START)
        self._make_loop = functools.partial(make_loop, config, server, tokenizer, tools, hf_model_type=hf_model_type)
        self._loops: dict[str, EpisodeLoop] = {}
        self._reward = Rewarder(config, tokenizer)
        self._failed_in_a_row: list[str] = []

    async def aclose(self) -> None:
        """Close the agent loops, and the connections to the sandbox."""
        for loop in self._loops.values():
            await loop.aclose()
        await shared_client(self._sandbox).aclose()

    async def check_prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check that all prompts can be rolled out, before any is.

        Raises:
            DataError: a prompt is longer than `data.max_prompt_length`, or leaves too little of the server's context.
        """
        for row in rows:
            loop = self._loop(row)
            way = loop.ways.of(row)
            schemas = way.protocol.schemas(selected(way.environments.schemas, row))
            prompt = way.protocol.prompt(row["raw_prompt"])
            # None is the default of `tools` in verl, whose annotation leaves it out
            ids = await loop.ct_build_initial_tokens(prompt, tools=schemas)  # pyright: ignore[reportArgumentType]
            if len(ids) > self._max_prompt_length:
                raise DataError(
                    f"The prompt of {row['uid']} has {len(ids)} tokens, but data.max_prompt_length is "
                    f"{self._max_prompt_length}. Raise it, or leave the problem out."
                )
            limit = self._server.max_model_len
            if limit and len(ids) + self._max_response_length > limit:
                raise DataError(
                    f"{row['uid']} needs {len(ids)} tokens of prompt and {self._max_response_length} of response, but "
                    f"the server's limit is {limit}. Lower --max-tokens, or raise the limit (max_model_len)."
                )

    async def run(self, tasks: Sequence[Task], store: Store, *, concurrency: int, meter: Meter | None = None) -> None:
        """Take the samples of which `store` has no judged row, and add each as it ends; begin none once `meter` has
        enough.

        Raises:
            InfrastructureDown: see there; finished samples are kept.
        """
        todo = pending(tasks, store.rows)
        waiting, accs, failed = iter(todo), [], 0
        meter = meter or Meter()
        for row in store.rows.values():
            meter.add(row)
        with progress_bar(total=len(tasks), initial=len(tasks) - len(todo), desc="samples", delay=0) as progress:

            async def work() -> None:
                nonlocal failed
                while not meter.is_spent and (task := next(waiting, None)):
                    before = store.rows.get(task.key)
                    row = await self.take(task, before)
                    store.add(row)
                    if not is_judged_again(before):  # no request was made
                        meter.add(row)
                    if failure_of(row):
                        failed += 1
                    else:
                        accs.append(row["acc"])
                    shown = {"acc": f"{sum(accs) / len(accs):.3f}"} if accs else {}
                    shown |= meter.shown() | ({"failed": failed} if failed else {})
                    progress.set_postfix(shown, refresh=False)
                    progress.update()
                    self._stop_if_down(row)

            await run_together(work, min(concurrency, len(todo)))

    async def take(self, task: Task, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Take one sample and return it as a row of the records.

        Args:
            before: an earlier attempt's row. A response that no verifier could judge is judged again, not sampled
                again: responses must not be drawn until one is easy to verify.
        """
        seed = {"seed": task.seed} if self._server.seeded else {}
        columns = task.row | {"session_id": task.number, "global_steps": 0, "call_retries": self._retries}
        if before is not None and is_judged_again(before):
            episode = self._episode_of(task.key, before)
            episode.reward = await self._reward.score_episode(episode, columns)
            after = to_record(episode)
            return dict(before) | {name: after[name] for name in _JUDGED}
        started, began = time.time(), time.perf_counter()
        try:
            episode = await self._loop(task.row).roll_out(self._params | seed, **columns)
        except ServerFailure as error:
            logger.warning("%s: %s", task.key, error)
            episode = Episode(task.key, finish_reason=RolloutEnd.ABORTED, exception=str(error))
        else:
            rolled_out = time.perf_counter()
            episode.reward = await self._reward.score_episode(episode, columns)
            episode.score_s = time.perf_counter() - rolled_out
        episode.started_s, episode.ended_s = started, started + time.perf_counter() - began
        episode.sampling = self._params | seed
        if used := episode.from_server.get(USAGE):
            episode.sampling[USAGE] = used
        return problem_columns(columns, validate=True) | {"problem": task.row["problem"]} | to_record(episode)

    def _episode_of(self, key: EpisodeKey, row: Mapping[str, Any]) -> Episode:
        """Return what the reward manager, and a term of the run's own, needs of a recorded response.

        Its text is encoded again, so the numbers of tokens may differ a little from those of the response, which
        matters only for penalties on the length.
        """
        rows = [TokenRow()]
        for turn in sorted(row["turns"], key=lambda turn: (turn.get("row") or 0, turn["start"])):
            while len(rows) <= (turn.get("row") or 0):
                rows.append(TokenRow())
            start = len(rows[-1].ids)
            rows[-1].ids += self._tokenizer.encode(turn["text"], add_special_tokens=False)
            rows[-1].model_spans += [(start, len(rows[-1].ids))] if turn["role"] == "model" else []
        finish_reason = json.loads(row["reward_parts"])["finish_reason"]
        use = msgspec.json.decode(row["tool_use"], type=ToolUse)
        known = {"turns": turns_of(row), "prompt": row["prompt"], "sampling": json.loads(row["sampling"])}
        return Episode(key, rows=rows, finish_reason=finish_reason, use=use, **known)

    def _loop(self, row: Mapping[str, Any]) -> EpisodeLoop:
        name = row.get("agent_name") or self._default_loop
        if name not in self._protocols:
            raise DataError(
                f"{row['uid']} names the agent loop {name!r}, expected one of {', '.join(self._protocols)}."
            )
        if name not in self._loops:
            self._loops[name] = self._make_loop(protocol=self._protocols[name])
        return self._loops[name]

    def _stop_if_down(self, row: Mapping[str, Any]) -> None:
        failure = failure_of(row)
        if failure in (None, UNVERIFIED):
            self._failed_in_a_row.clear()
            return
        self._failed_in_a_row.append(failure)
        if len(self._failed_in_a_row) >= GIVE_UP_AFTER:
            raise InfrastructureDown(
                f"The last {GIVE_UP_AFTER} samples failed ({', '.join(sorted(set(self._failed_in_a_row)))}): "
                f"{row['exception'] or 'the sandbox does not answer; see the warnings above'}"
            )
