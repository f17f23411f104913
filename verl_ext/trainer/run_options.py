"""The options of a run's config that its trainer calls or tells of events, made and checked when the run starts."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.events import Observer
from verl_ext.fleet.modes import getter, in_sentences
from verl_ext.ledger.prompts import PromptLedger
from verl_ext.runs.journal import StepJournal
from verl_ext.settings import (
    AdaptiveN,
    Curriculum,
    EarlyStop,
    HealthSettings,
    LightValidation,
    Retool,
    ValidationSchedule,
)
from verl_ext.settings.cautions import cautions
from verl_ext.settings.checks import check, read_settings
from verl_ext.settings.domains import RunDomain, read_domains
from verl_ext.settings.objects import load_object
from verl_ext.trainer.adaptive_n import AdaptiveSampling
from verl_ext.trainer.advantages import OF_GROUPS
from verl_ext.trainer.early_stop import EarlyStopWatch
from verl_ext.trainer.exclusions import ExclusionWatch
from verl_ext.trainer.mini_batches import check_rows
from verl_ext.trainer.objective import check_objective
from verl_ext.trainer.run_records import check_recorder
from verl_ext.trainer.validation import ValidationPlan

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

SAMPLER = "Set verl_ext.trainer.sampler.DapoReplayBuffer under trainer.v1.sampler.custom_sampler."


def check_run(config: DictConfig) -> None:
    """Refuse a config before verl reads it, and warn of what is dubious in it.

    Raises:
        ValueError: a setting of `retool` is unknown, missing or out of range; or an option or the recorder is on, but
            the rest of the config leaves it without effect.
    """
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


@dataclass
class Options:
    """The options that are on; None: off.

    Attributes:
        domains: the table `retool.domains`.
        curriculum: chooses which problems come again.
        sampling: chooses the number of responses of each prompt.
        plan: chooses when to validate, and on how much.
        watch: says when the run should end.
        ledger: knows each prompt's end.
        observers: those of them that listen, and the watch of exclusions.
    """

    domains: dict[str, RunDomain] = field(default_factory=dict)
    curriculum: Curriculum | None = None
    sampling: AdaptiveSampling | None = None
    plan: ValidationPlan | None = None
    watch: EarlyStopWatch | None = None
    ledger: PromptLedger | None = None
    observers: list[Observer] = field(default_factory=list)

    @property
    def group_sizes(self) -> dict[str, int]:
        """Return domain -> responses per prompt, of the domains with a number of their own."""
        return {name: domain.n for name, domain in self.domains.items() if domain.n is not None}


def make_options(config: DictConfig, sampler: Any, other: str, updates_per_step: Callable[[], int]) -> Options:
    """Make the options of a run that trains.

    Args:
        sampler: the run's `DapoReplayBuffer`; None if it has another one, whose class is called `other`.
        updates_per_step: of the actor.
    Raises:
        ValueError: as `check_run`.
    """
    options, folder = Options(read_domains(config)), Path(config.trainer.default_local_dir)
    options.curriculum = read_settings(config, "curriculum", Curriculum)
    if sampler:
        reward_model = config.reward.reward_model
        if reward_model.enable and not reward_model.enable_resource_pool:
            raise ValueError(
                "reward.reward_model.enable=true with enable_resource_pool=false scores after a batch is sampled, "
                f"but {type(sampler).__name__} chooses by score. Set enable_resource_pool=true."
            )
        options.ledger = PromptLedger(folder)
        options.observers += [ExclusionWatch(StepJournal(folder / "exclusions.jsonl")), options.ledger]
    elif read_settings(config, "fleet.health", HealthSettings):
        raise ValueError(
            f"retool.fleet.health needs a sampler that looks at servers while it waits; got {other}. {SAMPLER}"
        )
    agent = OmegaConf.select(config, "retool.agent") or {}
    if agent.get("run") and agent["max_rows"] > 1:
        check_rows(config, updates_per_step())
    if adaptive_n := read_settings(config, "adaptive_n", AdaptiveN):
        _check_group_sizes("retool.adaptive_n", config, sampler, other, updates_per_step())
        options.sampling = AdaptiveSampling(adaptive_n, StepJournal(folder / "pass_rates.jsonl"))
        options.observers.append(options.sampling)
    _check_domains(options, config, sampler, other, updates_per_step())
    schedule = read_settings(config, "validation_schedule", ValidationSchedule)
    light = read_settings(config, "light_validation", LightValidation)
    early_stop = read_settings(config, "early_stop", EarlyStop)
    if (light or early_stop) and not schedule and config.trainer.test_freq <= 0:
        raise ValueError(
            f"trainer.test_freq is {config.trainer.test_freq}, so the run never validates. For "
            "retool.light_validation and retool.early_stop, set it above 0, or use retool.validation_schedule."
        )
    if schedule or light:
        options.plan = ValidationPlan(config.trainer.test_freq, schedule, light)
    if early_stop:
        options.watch = EarlyStopWatch(early_stop, StepJournal(folder / "early_stop.jsonl"))
        options.observers.append(options.watch)
    return options


def _check_domains(options: Options, config: DictConfig, sampler: Any, other: str, updates: int) -> None:
    """Refuse a table of domains or a curriculum that the rest of the run cannot have."""
    if (options.domains or options.curriculum) and not sampler:
        raise ValueError(
            f"retool.domains and retool.curriculum need a sampler that counts by domain; got {other}. {SAMPLER}"
        )
    if sizes := ", ".join(options.group_sizes):
        if options.sampling:
            raise ValueError(
                "retool.adaptive_n chooses the responses of every prompt, but retool.domains also gives a number n to "
                f"{sizes}. Set retool.adaptive_n.enable=false, or remove n."
            )
        _check_group_sizes("n of retool.domains", config, sampler, other, updates)
    aged = ", ".join(name for name, domain in options.domains.items() if domain.max_staleness is not None)
    if aged and sampler.settings.resample:
        raise ValueError(
            f"retool.domains gives {aged} a max_staleness, and sampler_kwargs.resample is {sampler.settings.resample}: "
            "too few responses could be left. Remove one of them."
        )


def _check_group_sizes(option: str, config: DictConfig, sampler: Any, other: str, updates: int) -> None:
    """Refuse groups of unequal sizes, which an option makes, if the rest of the run cannot have them."""
    if not sampler or config.algorithm.adv_estimator not in OF_GROUPS:
        raise ValueError(
            f"{option} needs GRPO's baselines and a sampler that reports how groups end; got algorithm."
            f"adv_estimator={config.algorithm.adv_estimator} and {other}. {SAMPLER}"
        )
    if not config.actor_rollout_ref.actor.use_dynamic_bsz and updates > 1:
        raise ValueError(
            f"{option} with actor.use_dynamic_bsz=false allows one update per step, got {updates}: an "
            "update could consist only of padding. Set actor_rollout_ref.actor.use_dynamic_bsz=true, or "
            "ppo_mini_batch_size to the size of the train batch."
        )


def own_observers(trainer: Any) -> Iterator[Observer]:
    """Make the observers that `retool.observers` names, each of the trainer.

    Raises:
        ValueError: one cannot be loaded, or is no `Observer`: it would miss an event in the middle of the run.
    """
    for where in OmegaConf.select(trainer.config, "retool.observers") or ():
        try:
            make = load_object(where)
        except (ImportError, OSError, AttributeError, ValueError) as error:
            raise ValueError(
                f"retool.observers names {where!r}, which cannot be loaded: {error}. Expected FILE.py:NAME or "
                "package.module:NAME of what takes the trainer and makes a verl_ext.events.Observer."
            ) from error
        observer = make(trainer)
        if not isinstance(observer, Observer):
            raise ValueError(
                f"retool.observers names {where!r}, which gave a {type(observer).__name__}. Expected a subclass of "
                "verl_ext.events.Observer, which has a method for each event."
            )
        yield observer


def warn_of_a_smaller_mean(config: DictConfig, parameter_sync_step: int) -> None:
    """Warn if a mean over the tokens of a batch would be over those of an update."""
    unit = OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.unit")
    if parameter_sync_step > 1 and unit == "batch":
        logger.warning(
            "policy_loss.unit=batch with parameter_sync_step=%d: verl computes advantages of one update at a time, "
            "so the mean is over the tokens of an update. With trainer_mode=sync or colocate_async, over a step's.",
            parameter_sync_step,
        )
