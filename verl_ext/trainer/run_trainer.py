"""The options of `retool.*` in verl's v1 trainers: adaptive n, early stop, a repeatable run, records, fleet.

A rise in infrastructure failures is logged; `run_validation.py` keeps them out of validations. `run_updates.py` turns a
batch into updates. With all options off and no failure, every method here does what verl's own does. Line numbers refer
to trainer/ppo/v1/trainer_base.py of verl 0.9.1.
"""

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient

from verl_ext.fleet import balancer, weight_update
from verl_ext.fleet.client import FleetClient
from verl_ext.fleet.members import Members
from verl_ext.fleet.modes import getter, in_sentences
from verl_ext.fleet.recovery import Fleet, FleetCheckpointManager
from verl_ext.ledger.prompts import PromptLedger
from verl_ext.outcome import PromptEnd
from verl_ext.records.problem import problem_of
from verl_ext.rollout.client import AsyncTurnClient, TurnClient
from verl_ext.rollout.liveness import AgentLoops
from verl_ext.runs.journal import StepJournal
from verl_ext.settings import (
    AdaptiveN,
    EarlyStop,
    FailedSamples,
    HealthSettings,
    LightValidation,
    RecordBatches,
    RecorderSettings,
    Retool,
    ValidationSchedule,
)
from verl_ext.settings.cautions import cautions
from verl_ext.settings.checks import check, read_settings
from verl_ext.trainer.adaptive_n import PASS_RATE_COLUMN, AdaptiveSampling
from verl_ext.trainer.advantages import OF_GROUPS
from verl_ext.trainer.batch_recorder import BatchRecorder
from verl_ext.trainer.early_stop import EarlyStopWatch
from verl_ext.trainer.exclusions import ExclusionWatch
from verl_ext.trainer.objective import check_objective, make_shares
from verl_ext.trainer.prompt_limits import check_prompts
from verl_ext.trainer.queue import (
    check_while_waiting,
    clear_leftovers,
    prompts_in_queue,
    share_cut,
    stop_where_a_rollout_says_so,
)
from verl_ext.trainer.repeatable import make_repeatable, move_measured
from verl_ext.trainer.run_records import RunRecords, check_recorder
from verl_ext.trainer.run_updates import RunUpdates
from verl_ext.trainer.run_validation import RunValidation
from verl_ext.trainer.selection import StepEnds
from verl_ext.trainer.skipped_updates import SkippedUpdates
from verl_ext.trainer.validation import ValidationPlan

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class RunTrainer(RunUpdates, RunValidation):
    """Base class, together with a trainer of verl, of the classes that `extend_trainers` makes.

    Raises:
        ValueError: a setting of `retool` is unknown, missing or out of range; or an option or the recorder is on, but
            the rest of the config leaves it without effect.
    """

    def __init__(self, config: DictConfig):
        check_recorder(config)
        check(config.get("retool") or {}, Retool)
        check_objective(config)
        for caution in cautions(getter(config)):
            logger.warning(in_sentences([caution]))
        filter_groups = config.algorithm.filter_groups  # verl requires a metric if the sampler is its own
        if filter_groups and filter_groups.enable and filter_groups.metric is None:
            raise ValueError(
                "algorithm.filter_groups.enable is true with metric=null, so no group would be filtered. "
                "Expected a metric that the reward manager returns, such as acc."
            )
        from verl_ext.trainer.sampler import DapoReplayBuffer  # not above: verl's import of its samplers imports this

        weight_update.install(config)
        balancer.install(config)
        super().__init__(config)
        if self.parameter_sync_step > 1 and config.actor_rollout_ref.actor.policy_loss.get("unit") == "batch":
            logger.warning(
                "policy_loss.unit=batch with parameter_sync_step=%d: verl computes advantages of one update at a time, "
                "so the mean is over the tokens of an update. With trainer_mode=sync or colocate_async, over a step's.",
                self.parameter_sync_step,
            )
        self._is_repeatable = bool(OmegaConf.select(config, "retool.repeatable"))
        if self._is_repeatable:
            make_repeatable(self)
        precision = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
        self._skipped = SkippedUpdates(OmegaConf.select(config, precision))
        folder = Path(config.trainer.default_local_dir)
        self._sampler = self.replay_buffer if isinstance(self.replay_buffer, DapoReplayBuffer) else None
        self._records: RunRecords | None = None
        self._sampling: AdaptiveSampling | None = None
        self._plan: ValidationPlan | None = None
        self._watch: EarlyStopWatch | None = None
        self._exclusions: ExclusionWatch | None = None
        self._ledger: PromptLedger | None = None
        self._recorder: BatchRecorder | None = None
        self._fleet: Fleet | None = None  # if servers are watched
        self._members: Members | None = None  # if servers come and go
        self._failed_samples = FailedSamples.from_config(config)
        self._last_saved = 0  # step of the newest checkpoint
        # Such a run validates any checkpoint, perhaps alongside the run that trains: it keeps that run's files, and
        # takes none of its commands.
        self._only_validates = config.trainer.get("val_only", False)
        if self._only_validates:
            return

        if self._sampler:
            reward_model = config.reward.reward_model
            if reward_model.enable and not reward_model.enable_resource_pool:
                raise ValueError(
                    "reward.reward_model.enable=true with enable_resource_pool=false scores after a batch is sampled, "
                    f"but {type(self.replay_buffer).__name__} chooses by score. Set enable_resource_pool=true."
                )
            self._exclusions = ExclusionWatch(StepJournal(folder / "exclusions.jsonl"))
            self._ledger = PromptLedger(folder)
        adaptive_n = read_settings(config, "adaptive_n", AdaptiveN)
        if adaptive_n:
            self._sampling = AdaptiveSampling(adaptive_n, StepJournal(folder / "pass_rates.jsonl"))
            if not self._sampler or config.algorithm.adv_estimator not in OF_GROUPS:
                raise ValueError(
                    "retool.adaptive_n needs GRPO's baselines and a sampler that reports how groups end; got algorithm."
                    f"adv_estimator={config.algorithm.adv_estimator} and {type(self.replay_buffer).__name__}. "
                    "Set verl_ext.trainer.sampler.DapoReplayBuffer under trainer.v1.sampler.custom_sampler."
                )
            actor, updates = config.actor_rollout_ref.actor, self._updates_per_step()
            if not actor.use_dynamic_bsz and updates > 1:
                raise ValueError(
                    f"retool.adaptive_n with actor.use_dynamic_bsz=false allows one update per step, got {updates}: an "
                    "update could consist only of padding. Set actor_rollout_ref.actor.use_dynamic_bsz=true, or "
                    "ppo_mini_batch_size to the size of the train batch."
                )
            self._sampler.on_group_end = self._sampling.observe

        if record := read_settings(config, "record_batches", RecordBatches):
            self._recorder = BatchRecorder(record, config)
        schedule = read_settings(config, "validation_schedule", ValidationSchedule)
        light = read_settings(config, "light_validation", LightValidation)
        early_stop = read_settings(config, "early_stop", EarlyStop)
        if (light or early_stop) and not schedule and config.trainer.test_freq <= 0:
            raise ValueError(
                f"trainer.test_freq is {config.trainer.test_freq}, so the run never validates. For "
                "retool.light_validation and retool.early_stop, set it above 0, or use retool.validation_schedule."
            )
        if schedule or light:
            self._plan = ValidationPlan(config.trainer.test_freq, schedule, light)
        if early_stop:
            self._watch = EarlyStopWatch(early_stop, StepJournal(folder / "early_stop.jsonl"))

    def init(self) -> None:
        """Start the recorder before the workers that look for it."""
        if settings := read_settings(self.config, "recorder", RecorderSettings):
            self._records = RunRecords(settings, self.config)
        super().init()
        if self.trainer_mode == "separate_async" and not self._enable_hybrid_replicas and not self._only_validates:
            self._members = Members(self.standalone_server_manager, self.standalone_checkpoint_manager)

    def _init_dataloader(self) -> None:
        """Call verl's (line 708), then check all prompts: no worker has been started yet."""
        super()._init_dataloader()
        check_prompts(self.config, self.tokenizer, {"train": self.train_dataset, "val": self.val_dataset})

    def _setup(self) -> None:
        """Call verl's (line 226), then watch the servers, which are up but have no weights yet."""
        super()._setup()
        if limits := read_settings(self.config, "fleet.health", HealthSettings):
            manager, verls = self.standalone_server_manager, self.standalone_checkpoint_manager
            weights = FleetCheckpointManager(verls.config, verls.actor_wg, verls.replicas)
            self.standalone_checkpoint_manager = weights
            folder = Path(self.config.trainer.default_local_dir)
            self._fleet = Fleet.of_run(None if self._only_validates else folder, limits, weights, manager)
            self._fleet.watch()
            check_while_waiting(self.replay_buffer, weights.check)

    def get_llm_client(self) -> LLMServerClient:
        if limits := read_settings(self.config, "fleet.health", HealthSettings):
            return self.standalone_server_manager.get_client(client_cls=FleetClient, limits=limits)
        if self.trainer_mode == "separate_async":
            return self.standalone_server_manager.get_client(client_cls=AsyncTurnClient)
        client = TurnClient if self.trainer_mode == "sync" else AsyncTurnClient
        return self.llm_server_manager.get_client(client_cls=client)

    def _rollout_server_managers(self) -> list[Any]:
        if self._fleet:
            weights = self.standalone_checkpoint_manager
            living = [each for each in weights.replicas if each not in weights.dead]
            self.standalone_server_manager.rollout_replicas = living
        return super()._rollout_server_managers()

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """Train as verl does, called once the checkpoint is loaded; a run that was stopped early stays stopped."""
        self._last_saved = self.global_steps
        loops = AgentLoops(getattr(agent_loop_manager, "agent_loop_workers", ()))  # verl's managers have them
        check_while_waiting(self.replay_buffer, loops.check)
        stop_where_a_rollout_says_so(self.replay_buffer)
        for option in filter(None, (self._exclusions, self._sampling, self._watch)):
            option.resume(self.global_steps)
        waited: dict[str, PromptEnd] = {}
        if self._ledger:
            clear_leftovers()
            waited = self._ledger.resume(self.global_steps, prompts_in_queue())
            self._sampler.seen_before = waited
        if self._records and not self._only_validates:
            decided = {uid: end for uid, end in waited.items() if end is not PromptEnd.OPEN}
            self._records.resume(self.global_steps, decided)
        folder = Path(self.config.trainer.default_local_dir)
        try:
            if self._watch and (reason := self._watch.reason()):
                logger.warning(
                    "early stop: this run ended at step %d because %s. To continue training, set "
                    "retool.early_stop.enable=false or change its limits.",
                    *(self.global_steps, reason),
                )
                self._shutdown_dump_executor()
                return
            with self._members.obeying(folder) if self._members else nullcontext():
                super().fit(agent_loop_manager)
        finally:
            if self._fleet:
                self._fleet.close()
            if self._records:
                self._records.close()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        make_shares(metrics)
        ends = self._sampler.take_ends() if self._sampler else StepEnds()
        if self._exclusions:
            metrics.update(self._exclusions.end_step(self.global_steps, ends.ended))
        if self._sampling:
            metrics.update(self._sampling.end_step(self.global_steps))
        if self._ledger:
            in_queue, ended = len(prompts_in_queue()), ends.ended
            told = (ends.prompts, ends.waiting, in_queue, ends.fates, ended.lost, ended.raised)
            self._ledger.end_step(self.global_steps, *told)
        if self._records:
            self._records.end_step(self.global_steps, ends.prompts, ends.waiting)
        if self._is_repeatable:
            move_measured(metrics)
        self._skipped.end_step(self.global_steps, metrics)
        return batch

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self._waiting = self._span("wait")
        self._waiting.__enter__()
        if self._fleet:
            self._fleet.actor_waits(is_exact=self.local_trigger_step == 0)

    def on_sample_end(self) -> None:
        try:
            if self._fleet:
                self._fleet.actor_works()
        finally:
            self._waiting.__exit__(None, None, None)
        super().on_sample_end()

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        """Finish a step, after its checkpoint and its validation.

        `clip_ratio` is replaced: verl's counts the responses as long as the batch's longest (metric_utils.py:576).
        """
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        if (share := share_cut(batch)) is not None:
            metrics |= dict.fromkeys(("response_length/clip_ratio", "response_length_non_aborted/clip_ratio"), share)
        if self._records:
            self._records.end_round(self.global_steps)

    def _add_batch_to_generate(self) -> None:
        """Begin a step of the mode `sync` with fewer prompts, by the number of groups that wait for it."""
        if not self._sampler or not self._sampler.num_kept:
            return super()._add_batch_to_generate()
        missing = self._sampler.num_to_submit(self.config.data.train_batch_size)
        if missing:
            self._add_prompts_to_generate(missing)

    # What is submitted -----------------------------------------------------------------------------------------------

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        configured = [self.config.actor_rollout_ref.rollout.n] * len(batch)
        numbers, generated = None, self._sampler.generated_for_one if self._sampler else 1
        uids = _column(batch, "uid")
        problems = _problems_of(batch) if self._sampling or self._ledger else []
        if self._sampling:
            known_rates = _column(batch, PASS_RATE_COLUMN)
            numbers = self._sampling.assign(self.global_steps, uids, problems, known_rates)
        elif generated > 1:
            numbers = configured
        if numbers:
            numbers = [generated * number for number in numbers]
            tu.assign_non_tensor_stack(batch, "__rollout_n__", numbers)  # read by verl's worker, agent_loop_tq.py:115
        if self._ledger:
            self._ledger.draw(dict(zip(uids, problems, strict=True)), numbers or configured)
        return super()._submit_batch_to_rollout(batch)

    # Validation ------------------------------------------------------------------------------------------------------

    def on_step_end(self) -> None:
        """Decide whether to validate: the last hook before line 494 tests `global_steps % trainer.test_freq == 0`."""
        with self._span("weight_sync"), self._members.weights_change() if self._members else nullcontext():
            super().on_step_end()
        if self._plan:
            never = self.global_steps + 1
            self.config.trainer.test_freq = 1 if self._plan.is_due(self.global_steps) else never

    # Early stop ------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        with self._span("save"):
            super()._save_checkpoint()
        self._last_saved = self.global_steps
        if self._records:
            self._records.save(self.global_steps)

    def on_train_end(self) -> None:
        """Save a run that ends before its last step; verl calls this with `global_steps` already incremented."""
        super().on_train_end()
        last_step = self.global_steps - 1
        if not self._watch or not self._watch.reason():
            return
        if self.config.trainer.save_freq > 0 and self._last_saved < last_step:
            self._free_rollout_memory()
            self.global_steps = last_step
            self._save_checkpoint()
        logger.warning("early stop: ended at step %d; the last checkpoint is of step %d.", last_step, self._last_saved)

    def _free_rollout_memory(self) -> None:
        """Free the memory that vLLM holds, as before an update: the actor may need it."""
        if hasattr(self, "switch_to_trainer"):  # separate_async
            if self.current_mode == HybridEngineMode.ROLLOUT:
                self.switch_to_trainer()
            return
        if self.trainer_mode != "sync":
            self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()


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
