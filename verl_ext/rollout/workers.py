"""verl's agent-loop workers, with less work per rollout. `rollout.agent.agent_loop_manager_class` names them.

verl 0.9.1 builds the loop of every rollout through `hydra.utils.instantiate`. It asks a load-balancer actor for a
server before every turn, and sends every rollout to a reward actor, then to the data storage, one at a time. For a
short rollout this is more work than the rollout itself.
"""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import ray
import torch
import transfer_queue as tq
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

import verl_ext.environments.toolbox  # noqa: F401 (before verl's worker loads tools: `_keep_schemas_whole`)
from verl_ext.episode import Episode, EpisodeKey
from verl_ext.outcome import STOPS_RUN, RolloutEnd
from verl_ext.reward.numbers import BrokenReward
from verl_ext.rollout import recorder_actor
from verl_ext.rollout.client import AsyncTurnClient, TurnClient
from verl_ext.rollout.group_reports import GroupReports, RunningGroup
from verl_ext.rollout.rows import to_outputs
from verl_ext.rollout.scored import ScoredEpisodes
from verl_ext.settings import FailedSamples

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

# Groups that end within this time are one message to the recorder, which must precede the end of the step that takes
# them. In the mode `sync` no group runs then, and the last one sends those that wait; in the others, steps are longer.
SEND_AFTER_S = {"sync": 5.0, "colocate_async": 0.25, "separate_async": 0.25}

STATUS_PAUSES_S = (1.0, 5.0, 25.0)  # before each try to store the status of a prompt that could not be stored


# Ray's type of an actor class hides the class that it was made of.
class LeanAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # pyright: ignore[reportAttributeAccessIssue]
    """Instantiates agent loops directly, skips the load balancer if it has nothing to balance, scores rollouts itself,
    and stores a prompt's rollouts together when the last has ended.

    It scores rollouts only if the reward manager has `score_episode`. Ours does: it runs verifiers outside this
    process's event loop. Text only: no images, no teacher model.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.distillation_enabled or self.processor is not None:
            raise NotImplementedError(
                "LeanAgentLoopWorker supports neither images nor a teacher model, but the model has a processor for "
                "images or distillation is on. Use verl's own workers: rollout.agent.agent_loop_manager_class=null and "
                "retool.recorder.enable=false."
            )
        self.loops: dict[str, AgentLoopBase] = {}  # those that all episodes of a name share
        self.stored_columns = ["uid", "data_source", "reward_model"]  # what verl's trainer selects (trainer_base.py)
        score = None  # verl's reward workers score
        if self.config.reward.reward_model.enable:
            self.stored_columns.append("raw_prompt")
        else:
            score = getattr(load_reward_manager(self.config, self.tokenizer), "score_episode", None)
        retries = FailedSamples.from_config(self.config).retries
        self.scored = ScoredEpisodes(score, super()._compute_score, retries)
        mode, self.reports = self.config.trainer.v1.trainer_mode, None
        if mode == "sync" and number_of_slots(self.config) == 1:
            self.llm_client.keep_server()
        if self.config.retool.recorder.enable and (recorder := recorder_actor.find()):
            self.reports = GroupReports(recorder, SEND_AFTER_S[mode])

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Do as verl/trainer/ppo/v1/agent_loop_tq.py:104 (0.9.1), which sets the prompt's status when this returns.

        Nobody reads what this method raises, and the trainer waits for the status. A status that could not be stored
        is stored as a failure in further tries. If all fail, the process ends, and the run with it.
        """
        rollout = self.config.actor_rollout_ref.rollout
        n = (rollout.val_kwargs if trajectory["validate"] else rollout).n
        group = RunningGroup(running=prompt.get("__rollout_n__", n), validate=trajectory["validate"])
        if self.reports:
            self.reports.begin(group)
        try:
            await super()._run_prompt(prompt | {"running_group": group}, sampling_params, trajectory, trace)
        except Exception:  # of TransferQueue, whatever it is
            logger.exception("Error in _run_prompt: the status of the prompt %s could not be stored", prompt["uid"])
            await self._store_failure(prompt["uid"], "val" if trajectory["validate"] else "train")
        finally:
            if self.reports:
                self.reports.drop(group)

    async def _store_failure(self, uid: str, partition_id: str) -> None:
        for pause_s in STATUS_PAUSES_S:
            await asyncio.sleep(pause_s)
            try:
                await tq.async_kv_put(key=uid, partition_id=partition_id, tag={"status": "failure"})
                return
            except Exception:
                logger.exception("The status of the prompt %s could not be stored", uid)
        logger.critical("The trainer would wait forever for the prompt %s, so this process exits.", uid)
        os._exit(1)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        running_group: RunningGroup,
        trace: bool = False,
        **sample: Any,
    ) -> None:
        """Do as verl/experimental/agent_loop/agent_loop.py:660 (0.9.1), which v1 always calls with `trace=False`.

        Raises:
            KeyError: no loop of that name is registered.
        """
        agent_loop = self.loops.get(agent_name) or self.make_loop(agent_name)
        group, validate, started = running_group, trajectory["validate"], time.time()
        key = EpisodeKey(sample["uid"], sample["session_id"])
        episode = None  # if this task is cancelled
        try:
            episode = await self.scored.take(agent_loop, sampling_params, key, sample, validate=validate)
            episode.started_s = started
            self._add_rows(group, episode, sample)
        except Exception as error:  # whatever it is: it is recorded and passed on to verl
            why = f"{type(error).__name__}: {error}"
            episode = Episode(key, finish_reason=RolloutEnd.RAISED, exception=why, started_s=started)
            if isinstance(error, BrokenReward):  # before the status of the prompt, by which the trainer looks for it
                cause = getattr(error, "cause", error)  # Ray's or it
                tag = {"status": "failure", STOPS_RUN: str(cause)}
                await tq.async_kv_put(key=str(key), partition_id="val" if validate else "train", tag=tag)
            raise
        finally:
            if self.reports and episode:
                episode.ended_s = time.time()
                group.episodes.append(episode)
            group.running -= 1
            if self.reports and group.running == 0 and group.episodes:
                self.reports.end(group, sample)
            if group.running == 0 and group.keys:  # even if this one raised: validation counts the others
                rows = list_of_dict_to_tensordict(group.rows)
                partition = "val" if validate else "train"
                await tq.async_kv_batch_put(keys=group.keys, fields=rows, tags=group.tags, partition_id=partition)

    def make_loop(self, agent_name: str) -> AgentLoopBase:
        if agent_name not in _agent_loop_registry:
            raise KeyError(f"There is no agent loop {agent_name!r}; expected one of {sorted(_agent_loop_registry)}.")
        agent_loop = instantiate(
            _agent_loop_registry[agent_name],
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        if getattr(agent_loop, "shared", False):
            self.loops[agent_name] = agent_loop
        return agent_loop

    def _add_rows(self, group: RunningGroup, episode: Episode, sample: dict[str, Any]) -> None:
        """Do as verl/trainer/ppo/v1/agent_loop_tq.py:156 (0.9.1), except that the outputs are already scored, the rows
        wait for their group, and data columns that nothing reads later are left out: the actor would fetch each.
        """
        for number, output in enumerate(to_outputs(episode)):
            row = output.as_dict() | {name: sample[name] for name in self.stored_columns if name in sample}
            row.pop("multi_modal_data", None)
            row["loss_mask"] = row["response_mask"]
            row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
            row["position_ids"] = torch.arange(len(row["input_ids"]))
            group.keys.append(str(replace(episode.key, row=number)))
            group.rows.append(row)
            group.tags.append(
                {
                    "status": "success",
                    "prompt_len": len(row["prompts"]),
                    "response_len": len(row["responses"]),
                    "seq_len": len(row["input_ids"]),
                    "global_steps": sample["global_steps"],
                    "min_global_steps": output.extra_fields.get("min_global_steps"),
                    "max_global_steps": output.extra_fields.get("max_global_steps"),
                }
            )


class LeanAgentLoopManager(AgentLoopManagerTQ):
    """`AgentLoopManagerTQ` with `LeanAgentLoopWorker`s."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LeanAgentLoopWorker)


class InServerAgentLoopManager(AgentLoopManagerTQ):
    """Runs the agent loops in the event loop of the one vLLM server, so that a turn needs no message between actors.

    For short rollouts these messages are most of the work. For long rollouts, or many servers, take
    `LeanAgentLoopManager`, which leaves the server's event loop to vLLM. A server that dies takes its rollouts with it,
    and the run ends: `retool.fleet.health` is refused, and so are other servers (fleet/modes.py).

    Raises:
        ValueError: there is more than one server, `rollout.agent.num_workers` is not 1, or servers are watched, whose
            dead engines hand requests back to a client that goes elsewhere.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        found = {
            "rollout.agent.num_workers": self.rollout_config.agent.num_workers,
            "vLLM servers": number_of_replicas(self.config),
            "retool.fleet.health.enable": bool(OmegaConf.select(self.config, "retool.fleet.health.enable")),
        }
        if list(found.values()) != [1, 1, False]:
            raise ValueError(
                f"InServerAgentLoopManager needs one agent-loop worker and one unwatched vLLM server, got {found}. "
                "Set rollout.agent.agent_loop_manager_class to verl_ext.rollout.workers.LeanAgentLoopManager."
            )

    async def _init_agent_loop_workers(self) -> None:
        server_id, server = await self.llm_client._acquire_server("agent_loops")
        self.llm_client._release_server(server_id, "agent_loops")
        await server.__ray_call__.remote(_start_agent_loops, server_id, self.config, self.reward_loop_worker_handles)
        generate = SimpleNamespace(remote=lambda batch: server.__ray_call__.remote(_generate_sequences, batch))
        # The two methods of an actor's handle that verl and liveness.py call.
        self.agent_loop_workers = [SimpleNamespace(generate_sequences=generate, __ray_ready__=server.__ray_ready__)]


def _start_agent_loops(
    server: Any, server_id: str, config: DictConfig, reward_loop_worker_handles: list | None
) -> None:
    """Start an agent-loop worker in the server's process; its client calls the server directly."""

    handle = SimpleNamespace(generate=SimpleNamespace(remote=server.generate))

    async def start() -> None:
        # The client reads its settings for every turn, which is slow from a DictConfig.
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        is_sync = config.trainer.v1.trainer_mode == "sync"
        client_class = TurnClient if is_sync else AsyncTurnClient
        settings = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        client = client_class(cast(DictConfig, settings))
        client.keep_server(server_id, handle)
        server.agent_loop_worker = LeanAgentLoopWorker(config, client, None, reward_loop_worker_handles)

    _run_in_event_loop(server, start())


def _generate_sequences(server: Any, batch: TensorDict) -> None:
    """Start the rollouts in the server's process."""
    _run_in_event_loop(server, server.agent_loop_worker.generate_sequences(batch))


def _run_in_event_loop(server: Any, coroutine: Coroutine) -> None:
    """Run a coroutine in the event loop of the actor's HTTP server and engine: Ray runs `__ray_call__` in a thread."""
    asyncio.run_coroutine_threadsafe(coroutine, server._server_task.get_loop()).result()


def number_of_replicas(config: DictConfig) -> int:
    """Return the number of vLLM servers: GPUs over GPUs per server, from a separate pool in `separate_async`."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    per_server = (
        rollout.tensor_model_parallel_size * rollout.get("pipeline_model_parallel_size", 1) * rollout.data_parallel_size
    )
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    if OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async":
        gpus = rollout.nnodes * rollout.n_gpus_per_node + gpus * config.actor_rollout_ref.hybrid_engine
    return gpus // per_server


def number_of_slots(config: DictConfig) -> int:
    """Return how many targets the router of a colocated run chooses between: servers, or their data-parallel ranks."""
    is_ring = OmegaConf.select(config, "retool.fleet.routing") == "ring"
    return number_of_replicas(config) * (config.actor_rollout_ref.rollout.data_parallel_size if is_ring else 1)
