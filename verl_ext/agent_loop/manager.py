"""verl's agent-loop workers, with less work per rollout. Named by `rollout.agent.agent_loop_manager_class`.

verl 0.9.1 builds every rollout's loop through `hydra.utils.instantiate`, asks a load-balancer actor for a server
before every turn, and sends every rollout to a reward actor: work that outweighs the
rollout itself when it is short.
"""

from typing import Any

import ray
from hydra.utils import get_class
from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.profiler import simple_timer
from verl.workers.rollout.llm_server import LLMServerClient


class LeanAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """Instantiates agent loops directly, skips the load balancer where it has nothing to balance, and scores rollouts
    itself.

    The last where the reward manager is ours: it has `score_rollout`, and runs verifiers outside of this process's
    event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._loop_classes: dict[str, tuple[type, dict]] = {}
        if self.config.trainer.v1.trainer_mode == "sync" and number_of_replicas(self.config) == 1:
            skip_load_balancer(self.llm_client)
        reward_manager = (
            None if self.config.reward.reward_model.enable else load_reward_manager(self.config, self.tokenizer)
        )
        self._score_rollout = getattr(reward_manager, "score_rollout", None)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = False,
        **kwargs: Any,
    ) -> None:
        """As verl/experimental/agent_loop/agent_loop.py:660 (0.9.1), which v1 always calls with `trace=False`.

        Raises:
            KeyError: no loop of that name is registered.
        """
        if agent_name not in self._loop_classes:
            if agent_name not in _agent_loop_registry:
                raise KeyError(
                    f"Agent loop {agent_name!r} is not registered; there are {sorted(_agent_loop_registry)}."
                )
            settings = dict(_agent_loop_registry[agent_name])
            settings.pop("name", None)
            self._loop_classes[agent_name] = (get_class(settings.pop("_target_")), settings)
        loop_class, settings = self._loop_classes[agent_name]
        agent_loop = loop_class(
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
            **settings,
        )
        output = await agent_loop.run(sampling_params, **kwargs)
        return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None:
        """As verl/experimental/agent_loop/agent_loop.py:967 (0.9.1), without the trip to a reward worker."""
        final = outputs[-1]
        if self._score_rollout is None or final.reward_score is not None:
            return await super()._compute_score(outputs, kwargs)
        timing: dict[str, float] = {}
        with simple_timer("compute_score", timing):
            sample = {**kwargs, "tool_extra_fields": final.extra_fields}
            result = await self._score_rollout(final.response_ids, sample)
        final.reward_score = result["reward_score"]
        final.extra_fields["reward_extra_info"] = result["reward_extra_info"]
        final.metrics.compute_score = timing["compute_score"]


class LeanAgentLoopManager(AgentLoopManagerTQ):
    """`AgentLoopManagerTQ` with `LeanAgentLoopWorker`s."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LeanAgentLoopWorker)


def number_of_replicas(config: DictConfig) -> int:
    """vLLM servers of a colocated run: GPUs over GPUs per server."""
    rollout = config.actor_rollout_ref.rollout
    per_server = (
        rollout.tensor_model_parallel_size * rollout.get("pipeline_model_parallel_size", 1) * rollout.data_parallel_size
    )
    return config.trainer.nnodes * config.trainer.n_gpus_per_node // per_server


def skip_load_balancer(client: LLMServerClient) -> None:
    """Make `client` ask for its server once and keep it."""
    server: list[tuple] = []
    acquire = client._acquire_server

    async def acquire_once(request_id: str, **extra: Any) -> tuple:
        if not server:
            server.append(await acquire(request_id, **extra))
        return server[0]

    client._acquire_server = acquire_once
    client._release_server = lambda server_id, request_id=None: None
