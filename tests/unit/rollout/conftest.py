"""The last turn of most responses, and the rollouts of a prompt by a real worker."""

import asyncio
from typing import Any

import pytest
from omegaconf import OmegaConf


@pytest.fixture
def answer(encode, tokenizer):
    """The last turn, with its end token."""
    return encode("\\boxed{2}") + [tokenizer.eos_token_id]


@pytest.fixture
def roll_out_prompt(monkeypatch: pytest.MonkeyPatch):
    """The real `_run_prompt` of a worker, over a loop whose samples are the functions given; returns what it stored.

    `uids` are rolled out at once, each with these samples.
    """
    import transfer_queue

    from verl_ext.episode import Episode, EpisodeKey, Reward, TokenRow, ToolUse, Turn
    from verl_ext.rollout.group_reports import GroupReports
    from verl_ext.rollout.scored import ScoredEpisodes
    from verl_ext.rollout.workers import LeanAgentLoopWorker
    from verl_ext.settings import FailedSamples

    stored: list[tuple[str, Any]] = []
    asked: list[int | None] = []  # of the loop, as `call_retries`

    async def put(key: str, partition_id: str, tag: dict) -> None:
        stored.append((f"{partition_id}:{key}", tag["status"] if len(tag) == 1 else tag))

    async def batch_put(keys: list[str], fields: Any, tags: list[dict], partition_id: str) -> None:
        await asyncio.sleep(0.01)  # others end meanwhile
        stored.append((f"{partition_id}:{keys}", (fields, tags)))

    monkeypatch.setattr(transfer_queue, "async_kv_put", put)
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", batch_put)

    class Loop:
        def __init__(self, samples: list) -> None:
            self.samples = samples

        async def roll_out(self, sampling_params: dict, uid: str, session_id: int, **kwargs: Any) -> Episode:
            asked.append(kwargs.get("call_retries"))
            response = await self.samples[session_id]()
            response, info = response if isinstance(response, tuple) else (response, {})
            ids, length = list(response), len(response)
            spans = [(0, 1, 6), (1, length, 7)] if length > 1 else [(0, length, 6)]
            return Episode(
                EpisodeKey(uid, session_id),
                rows=[TokenRow([1, 2], ids, [1] * length, None, [(0, length)], spans)],
                use=ToolUse(),
                reward=None if info is None else Reward(float(length), info),
                turns=[Turn("x" * length, length, 0, None, 1.0, 0.5)],
                prompt="1+1?",
            )

    class Worker(LeanAgentLoopWorker):
        """Without a model: verl's constructor loads one."""

        def __init__(self, config: Any, loop: Loop, score: Any, recorder: Any) -> None:
            self.config, self.loops = config, {"retool_code": loop}
            self.stored_columns, self.reward_loop_worker_handles = ["uid", "reward_model"], None
            self.scored = ScoredEpisodes(score, self._compute_score, FailedSamples.from_config(config).retries)
            self.reports = GroupReports(recorder, 5.0) if recorder else None

    def run(
        samples: list,
        recorder: Any = None,
        validate: bool = False,
        retool: dict | None = None,
        score: Any = None,
        uids: tuple[str, ...] = ("p",),
        **prompt: Any,
    ) -> list[tuple[str, Any]]:
        rollout = {"n": len(samples), "val_kwargs": {"n": 1}}
        if validate:
            rollout["val_kwargs"]["n"] = len(samples)
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "retool": retool or {}})
        worker = Worker(config, Loop(samples), score, recorder)
        prompt = {"agent_name": "retool_code", "global_steps": 7, "reward_model": {"a": 1}} | prompt

        async def run_all() -> None:
            prompts = [prompt | {"uid": uid} for uid in uids]
            await asyncio.gather(*(worker._run_prompt(each, {}, {"validate": validate}) for each in prompts))

        asyncio.run(run_all())
        retries = ((retool or {}).get("validation") or {"retries": 2})["retries"]
        assert not asked or set(asked) == {retries if validate else None}
        return stored

    return run
