"""A run's trainer: verl's v1 trainers, which tell observers of events and call the options of `retool.*`.

`run_validation.py` validates without samples that infrastructure failed; `run_updates.py` turns a batch into updates.
With all options off and no failure, every method here does what verl's own does. Line numbers refer to
trainer/ppo/v1/trainer_base.py of verl 0.9.1.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

from verl_ext.events import Drawn, Ended, Finished, Observers, Saved, Started
from verl_ext.fleet import balancer, weight_update
from verl_ext.fleet.client import FleetClient
from verl_ext.fleet.members import Members
from verl_ext.fleet.recovery import Fleet, FleetCheckpointManager
from verl_ext.outcome import PromptEnd
from verl_ext.records.problem import problem_of
from verl_ext.rollout.client import AsyncTurnClient, TurnClient
from verl_ext.rollout.liveness import AgentLoops
from verl_ext.settings import FailedSamples, HealthSettings, RecorderSettings
from verl_ext.settings.checks import read_settings
from verl_ext.settings.domains import use_files
from verl_ext.trainer.adaptive_n import PASS_RATE_COLUMN
from verl_ext.trainer.loader import DomainLoader
from verl_ext.trainer.objective import make_shares
from verl_ext.trainer.prompt_limits import check_prompts
from verl_ext.trainer.queue import clear_leftovers, prompts_in_queue, share_cut, sources_in_queue
from verl_ext.trainer.repeatable import make_repeatable, move_measured
from verl_ext.trainer.run_domains import check_rows, drop_state_of_domains, make_domains, make_loader
from verl_ext.trainer.run_options import Options, check_run, make_options, own_observers, warn_of_a_smaller_mean
from verl_ext.trainer.run_records import RunRecords
from verl_ext.trainer.run_updates import RunUpdates
from verl_ext.trainer.run_validation import RunValidation
from verl_ext.trainer.skipped_updates import SkippedUpdates

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class SavesAreEvents(CheckpointCallback):
    """Tells the observers of each complete checkpoint, then calls the run's own callback."""

    def __init__(self, observers: Observers, own: CheckpointCallback):
        super().__init__()
        self._observers, self._own = observers, own

    def on_save(self, trainer: Any, global_step: int, **kwargs: Any) -> None:
        self._observers.tell(Saved(global_step))
        self._own.on_save(trainer=trainer, global_step=global_step, **kwargs)


class Timers(dict):
    """A step's timers, name -> seconds, to which verl adds as each ends; and `intervals`, when that was."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals: list[dict[str, Any]] = []

    def __setitem__(self, name: str, seconds: float) -> None:
        if (took := seconds - self.get(name, 0)) > 0:
            end = time.time()
            self.intervals.append({"what": name, "start_s": end - took, "end_s": end})
        super().__setitem__(name, seconds)


class RunTrainer(RunUpdates, RunValidation):
    """Base class, together with a trainer of verl, of the classes that `extend_trainers` makes.

    Raises:
        ValueError: `check_run` or `make_options` refuses the config.
    """

    # Of verl's trainer for `separate_async` only:
    _enable_hybrid_replicas: bool
    standalone_server_manager: LLMServerManager
    current_mode: HybridEngineMode
    switch_to_trainer: Callable[[], None]

    def __init__(self, config: DictConfig):
        check_run(config)
        from verl_ext.trainer.sampler import DapoReplayBuffer  # not above: verl's import of its samplers imports this

        weight_update.install(config)
        balancer.install(config)
        super().__init__(config)
        warn_of_a_smaller_mean(config, self.parameter_sync_step)
        self._is_repeatable = bool(OmegaConf.select(config, "retool.repeatable"))
        if self._is_repeatable:
            make_repeatable(self)
        buffer = self.replay_buffer
        self._sampler = buffer if isinstance(buffer, DapoReplayBuffer) else None
        self.fleet: Fleet | None = None  # if servers are watched
        self.members: Members | None = None  # if servers come and go
        self._failed_samples = FailedSamples.from_config(config)
        # Such a run validates any checkpoint, perhaps alongside the run that trains: it keeps that run's files, and
        # takes none of its commands.
        self._only_validates = config.trainer.get("val_only", False)
        self._options = Options()
        if not self._only_validates:
            self._options = make_options(config, self._sampler, type(buffer).__name__, self._updates_per_step)
            if self._sampler:
                self._sampler.domains = make_domains(config, self._options.domains)
        self.observers = Observers(self._options.observers)
        self.checkpoint_callback = SavesAreEvents(self.observers, self.checkpoint_callback)

    @property
    def timing_raw(self) -> Timers:
        """The timers of the step, which verl sets to {} as the step begins (line 469)."""
        return self._timers

    @timing_raw.setter
    def timing_raw(self, timers: dict[str, float]) -> None:
        self._timers = Timers()
        self._timers.update(timers)

    def init(self) -> None:
        """Start the recorder before the workers that look for it."""
        if settings := read_settings(self.config, "recorder", RecorderSettings):
            self.observers.add(RunRecords(settings, self.config))
        for observer in own_observers(self):
            self.observers.add(observer)
        precision = OmegaConf.select(self.config, "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype")
        self.observers.add(SkippedUpdates(precision))  # after the others: it may end the run
        super().init()
        if self.trainer_mode == "separate_async" and not self._enable_hybrid_replicas and not self._only_validates:
            self.members = Members(self.standalone_server_manager, self.standalone_checkpoint_manager)

    def _init_dataloader(self) -> None:
        """Call verl's (line 708), then check all prompts: no worker has been started yet. With domains or a curriculum,
        another loader draws them."""
        use_files(self.config)
        super()._init_dataloader()
        datasets = {"train": self.train_dataset, "val": self.val_dataset}
        check_prompts(self.config, self.tokenizer, datasets)
        check_rows(self.config, datasets)
        if (sampler := self._sampler) and (self._options.domains or self._options.curriculum):
            self.train_dataloader, pools = make_loader(
                self.config,
                self.train_dataloader,
                sampler.domains,
                lambda: sampler.choose_domain(self.global_steps),
                self._options.curriculum,
            )
            if pools:
                self.observers.add(pools)

    def _setup(self) -> None:
        """Call verl's (line 226), then watch the servers, which are up but have no weights yet."""
        super()._setup()
        drop_state_of_domains(self.train_dataloader)
        if limits := read_settings(self.config, "fleet.health", HealthSettings):
            manager, verls = self.standalone_server_manager, self.standalone_checkpoint_manager
            weights = FleetCheckpointManager(verls.config, verls.actor_wg, verls.replicas)
            self.standalone_checkpoint_manager = weights
            folder = Path(self.config.trainer.default_local_dir)
            self.fleet = Fleet.of_run(None if self._only_validates else folder, limits, weights, manager)
            self.fleet.watch()
            if self._sampler:
                self._sampler.checks.append(weights.check)

    def get_llm_client(self) -> LLMServerClient:
        if limits := read_settings(self.config, "fleet.health", HealthSettings):
            return self.standalone_server_manager.get_client(client_cls=FleetClient, limits=limits)
        if self.trainer_mode == "separate_async":
            return self.standalone_server_manager.get_client(client_cls=AsyncTurnClient)
        client = TurnClient if self.trainer_mode == "sync" else AsyncTurnClient
        return self.llm_server_manager.get_client(client_cls=client)

    def _rollout_server_managers(self) -> list[Any]:
        if self.fleet:
            weights = self.standalone_checkpoint_manager
            living = [each for each in weights.replicas if each not in weights.dead]
            self.standalone_server_manager.rollout_replicas = living
        return super()._rollout_server_managers()

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """Train as verl does, called once the checkpoint is loaded; a run that was stopped early stays stopped."""
        if self._sampler:
            loops = AgentLoops(getattr(agent_loop_manager, "agent_loop_workers", ()))  # verl's managers have them
            self._sampler.checks.append(loops.check)
        waiting: dict[str, PromptEnd] = {}
        if self._sampler and (ledger := self._options.ledger):
            clear_leftovers()
            waiting = ledger.resume(self.global_steps, prompts_in_queue())
            self._sampler.seen_before = waiting
            if self._options.domains:
                self._sampler.domains.in_queue |= sources_in_queue()
        if not self._only_validates:
            self.observers.tell(Started(self.global_steps, waiting, decode=self.tokenizer.decode))
        try:
            if (watch := self._options.watch) and (reason := watch.reason()):
                logger.warning(
                    "early stop: this run ended at step %d because %s. To continue training, set "
                    "retool.early_stop.enable=false or change its limits.",
                    *(self.global_steps, reason),
                )
                self._shutdown_dump_executor()
                return
            folder = Path(self.config.trainer.default_local_dir)
            with self.members.obeying(folder) if self.members else nullcontext():
                super().fit(agent_loop_manager)
        finally:
            if self.fleet:
                self.fleet.close()
            self.observers.close()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        make_shares(metrics)
        step = self.global_steps
        ended = self._sampler.take_ended(step, metrics) if self._sampler else Ended(step, metrics=metrics)
        metrics.update(self.observers.tell(ended))
        if self._is_repeatable:
            move_measured(metrics)
        return batch

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        if self.fleet:
            self.fleet.actor_waits(is_exact=self.local_trigger_step == 0)

    def on_sample_end(self) -> None:
        if self.fleet:
            self.fleet.actor_works()
        super().on_sample_end()

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        """Finish a step, after its checkpoint and its validation.

        `clip_ratio` is replaced: verl's counts the responses as long as the batch's longest (metric_utils.py:576).
        """
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        if (share := share_cut(batch)) is not None:
            metrics |= dict.fromkeys(("response_length/clip_ratio", "response_length_non_aborted/clip_ratio"), share)
        self.observers.tell(Finished(self.global_steps, metrics, self.timing_raw.intervals))

    def _add_batch_to_generate(self) -> None:
        """Begin a step of the mode `sync` with fewer prompts, by the number of groups that wait for it."""
        if not self._sampler or not self._sampler.num_kept:
            return super()._add_batch_to_generate()
        missing = self._sampler.num_to_submit(self.config.data.train_batch_size)
        if missing:
            self._add_prompts_to_generate(missing)

    def _fetch_one_gen_batch(self) -> TensorDict:
        """Call verl's (line 1466), and tell the loader of domains the prompt's name."""
        batch = super()._fetch_one_gen_batch()
        if isinstance(self.train_dataloader, DomainLoader):
            (uid,) = _column(batch, "uid")
            self.train_dataloader.name(uid)
        return batch

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        uids, problems, sources = _column(batch, "uid"), _problems_of(batch), _column(batch, "data_source")
        own, usual = self._options.group_sizes, int(self.config.actor_rollout_ref.rollout.n)
        numbers = [own.get(source, usual) for source in sources]
        if sampling := self._options.sampling:
            numbers = sampling.assign(self.global_steps, uids, problems, _column(batch, PASS_RATE_COLUMN))
        generated = self._sampler.settings.generated_for_one if self._sampler else 1
        if sampling or own or generated > 1:
            numbers = [generated * number for number in numbers]
            tu.assign_non_tensor_stack(batch, "__rollout_n__", numbers)  # read by verl's worker, agent_loop_tq.py:115
        domains = dict(zip(uids, sources, strict=True)) if self._options.domains else {}
        self.observers.tell(Drawn(self.global_steps, dict(zip(uids, problems, strict=True)), numbers, domains))
        return super()._submit_batch_to_rollout(batch)

    def on_step_end(self) -> None:
        """Decide whether to validate: the last hook before line 494 tests `global_steps % trainer.test_freq == 0`."""
        with self.members.weights_change() if self.members else nullcontext():
            super().on_step_end()
        if plan := self._options.plan:
            never = self.global_steps + 1
            self.config.trainer.test_freq = 1 if plan.is_due(self.global_steps) else never

    def on_train_end(self) -> None:
        """Save a run that ends before its last step; verl calls this with `global_steps` already incremented."""
        super().on_train_end()
        last_step, watch = self.global_steps - 1, self._options.watch
        if not watch or not watch.reason():
            return
        if self.config.trainer.save_freq > 0 and watch.last_saved < last_step:
            self._free_rollout_memory()
            self.global_steps = last_step
            self._save_checkpoint()
        logger.warning("early stop: ended at step %d; the last checkpoint is of step %d.", last_step, watch.last_saved)

    def _free_rollout_memory(self) -> None:
        """Free the memory that vLLM holds, as before an update: the actor may need it."""
        if hasattr(self, "switch_to_trainer"):  # separate_async
            if self.current_mode == HybridEngineMode.ROLLOUT:
                self.switch_to_trainer()
            return
        if self.trainer_mode != "sync":
            self.checkpoint_manager.abort_replicas()  # pyright: ignore[reportUnusedCoroutine]  # verl's @auto_await waits
        self.checkpoint_manager.sleep_replicas()  # pyright: ignore[reportUnusedCoroutine]  # it waits


def _problems_of(batch: TensorDict) -> list[str]:
    """Return the problem of each row of a batch of prompts."""
    columns = {name: _column(batch, name) for name in ("data_source", "extra_info", "raw_prompt", "reward_model")}
    return [problem_of(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _column(batch: TensorDict, name: str) -> list[Any]:
    """Return a column of a batch of prompts as plain values; None in every row if the data set lacks the column."""
    if name not in batch:
        return [None] * len(batch)
    value = batch.get(name)
    return [value.data] * len(batch) if isinstance(value, NonTensorData) else value.tolist()
