"""verl's vLLM server in each mode of `retool.fleet.weight_update`, and the replicas that start it.

verl 0.9.1 updates servers on dedicated GPUs (checkpoint_engine/base.py:510) by `abort_all_requests`, the transfer
(which ends with `clear_kv_cache` and `set_global_steps`), and `resume_generation`. The classes here change these steps.
Line numbers are of workers/rollout/vllm_rollout/vllm_async_server.py. Imports vLLM.
"""

import argparse
import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from vllm.v1.engine import EngineCoreOutputs

from verl_ext.fleet.boundaries import Boundaries
from verl_ext.fleet.watched import WatchedServer

logger = logging.getLogger(__name__)
CALLS = 65_536  # in a server at once: more than a step has; each is an asyncio task
LANDING_TIMEOUT_S = 60.0  # for requests on their way into the engine, as in verl's own gate (:77)


class FleetServer(WatchedServer):
    """A server that reports which weights sampled each token. An update interrupts its running requests (`abort`).

    verl's `abort` waits up to 60 s until every request has an output (:1043), for our agent loop its last one.
    And verl reads a request's version when the request has ended (:689), which may be after the update.
    """

    pause: Mapping[str, Any] = {"mode": "abort", "clear_cache": True}  # of vLLM's `pause_generation`, for an update

    def _post_init(self, cuda_visible_devices: str) -> None:
        """Set up state in verl's hook at the end of `__init__`."""
        super()._post_init(cuda_visible_devices)
        self.boundaries = Boundaries()
        self._landing: set[str] = set()  # admitted, but not in the engine yet
        self._beginning_again: set[str] = set()

    async def run_server(self, args: argparse.Namespace) -> None:
        await super().run_server(args)
        add = self.engine.add_request

        async def add_request(request_id: str, prompt: Any, *rest: Any, **kwargs: Any) -> Any:
            added = await add(request_id, self._prepared(prompt), *rest, **kwargs)
            self._landing.discard(request_id)
            return added

        self.engine.add_request = add_request

    def _prepared(self, prompt: Any) -> Any:
        """Return a prompt as the engine gets it."""
        return prompt

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *rest: Any, **kwargs: Any
    ) -> TokenOutput:
        """Generate as verl's (:558), with `version_runs` among the extra fields: (tokens, version), oldest first."""
        try:
            while True:
                # A copy, because verl's takes keys out of the parameters.
                output = await super().generate(prompt_ids, dict(sampling_params), request_id, *rest, **kwargs)
                if request_id not in self._beginning_again:
                    break
                self._beginning_again.discard(request_id)
            runs = self.boundaries.end(request_id, len(output.token_ids))
            output.extra_fields.setdefault("version_runs", runs)  # already set if another server decodes for this one
            return output
        finally:
            self.boundaries.forget(request_id)
            self._landing.discard(request_id)
            self._beginning_again.discard(request_id)

    async def _park_until_admitted(self, request_id: str) -> TokenOutput | None:
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self._landing.add(request_id)
            self.boundaries.admit(request_id, self.global_steps)
        return rejected

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Pause for an update (:931), or abort all requests because the server is about to leave (`reject_request`).

        Raises:
            TimeoutError: an admitted request did not reach the engine.
        """
        if self.node_rank == 0:
            self._submission_paused, self._rejecting = True, reject_request
            self._resume_event.clear()
            deadline = time.monotonic() + LANDING_TIMEOUT_S
            while self._landing:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{len(self._landing)} admitted requests did not reach vLLM's engine within "
                        f"{LANDING_TIMEOUT_S:.0f} s, so the version of their weights would be unknown. See the "
                        "server's log."
                    )
                await asyncio.sleep(0.001)
            leave = {"mode": "abort", "clear_cache": reset_prefix_cache}
            await self.engine.pause_generation(**(leave if reject_request else self.pause))
        return {"aborted_count": 0, "request_ids": []}  # nothing reads this

    async def resume_engine_generation(self) -> None:
        """Resume after an update (:1006); this is where the running requests cross it."""
        if self.node_rank == 0:
            await self._read_all_outputs()
            states = self.engine.output_processor.request_states.values()
            written = {
                each.external_req_id: each.detokenizer.num_output_tokens() for each in states if each.detokenizer
            }
            if again := self.boundaries.cross(written, self.global_steps):
                self._beginning_again.update(again)
                await self.engine.abort(again)
        await super().resume_engine_generation()

    async def _read_all_outputs(self) -> None:
        """Wait until vLLM's front end has counted every token that the engine sampled before it paused.

        The engine answered the pause after its last tokens and over the same channel, so they are already in the queue
        of the front end's only reader. An empty message put after them is taken out once all before it are counted.
        """
        queue = self.engine.engine_core.outputs_queue
        queue.put_nowait(EngineCoreOutputs())
        while not queue.empty():
            if self.engine.errored:
                raise self.engine.dead_error
            await asyncio.sleep(0.001)


class StandaloneServer(FleetServer):
    """A server whose running requests outlive an update.

    A request without a token when weights change begins again as a new one, so that all of it is of the new version.
    """

    def _post_init(self, cuda_visible_devices: str) -> None:
        """Set up as above.

        Raises:
            ValueError: the server shares its GPUs with another model, or the model takes images, whose embeddings vLLM
                caches without regard to versions.
        """
        super()._post_init(cuda_visible_devices)
        if self.rollout_mode != RolloutMode.STANDALONE or self.model_config.processor is not None:
            raise ValueError(
                f"{type(self).__name__} expects a text model on dedicated GPUs (replica mode standalone), got the mode "
                f"{self.rollout_mode} and the processor {self.model_config.processor}. "
                "Set retool.fleet.weight_update=abort."
            )


class DrainServer(StandaloneServer):
    """A server whose running requests end before an update, with the old weights."""

    pause: Mapping[str, Any] = {"mode": "wait", "clear_cache": True}


class KeepServer(StandaloneServer):
    """A server whose running requests pause during an update and then continue with their KV cache."""

    pause: Mapping[str, Any] = {"mode": "keep", "clear_cache": False}

    def _prepared(self, prompt: Any) -> Any:
        """Add a salt: vLLM shares cached blocks only among requests of the same salt, here of the same version."""
        return prompt | {"cache_salt": f"{prompt.get('cache_salt', '')}weights {self.global_steps}"}

    async def clear_kv_cache(self) -> None:
        """Keep the cache: running requests continue with it, and new ones have another salt."""

    async def wait_for_requests_to_drain(self) -> None:
        """Wait for nothing: verl's replica calls this before it frees the cache, which `keep` rules out."""


class FleetReplica(vLLMReplica):
    """Starts `server_type`; reward and teacher models keep verl's server because their weights do not change."""

    server_type = FleetServer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(self.server_type)

    @property
    def max_concurrency(self) -> int:
        """Calls that reach a server at once; Ray queues more in front of it, in their order.

        32B on one node has 4,096 rollouts on each of two servers. With verl's 1,000, the call that aborts them for new
        weights (checkpoint_engine/base.py:484) would wait until all but 1,000 have been generated. vLLM has its own
        queue, and still runs `max_num_seqs` at once.
        """
        return max(super().max_concurrency, CALLS)


class DrainReplica(FleetReplica):
    server_type = DrainServer


class KeepReplica(FleetReplica):
    server_type = KeepServer
