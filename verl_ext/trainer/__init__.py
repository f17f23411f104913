"""One RL run: what it trains on, when it validates and ends. Subclasses of verl 0.9.1's sampler and v1 trainers.

`sampler.py` takes batches from `queue.py`, and logs `step_counts.py`. Its part `ended_groups.py` judges what came back
by `group_rules.py`; `exclusions.py` watches what they leave out.
`domains.py` divides prompts and batches among domains; `loader.py` draws the prompts, and `curriculum.py` leaves some
out; `run_domains.py` makes them from a run's config.
`run_trainer.py`, with `run_updates.py` and `run_validation.py`, tells observers of events (verl_ext/events.py), and
calls the options that `run_options.py` makes: `adaptive_n.py`, `validation.py`, `failed_samples.py`, `early_stop.py`;
`repeatable.py` removes chance.
`run_records.py` and, in the actor's processes, `token_notes.py` report to the recorder (verl_ext/records).
`objective.py` and `advantages.py` register what verl_ext/objectives has, and check that a run's keys fit it.
`skipped_updates.py` ends a run all of whose updates verl skips; `tracking.py` hears what both trainers log.
`rollout_weights.py` fixes a metric of verl's weights against the rollout engine.
`lr_schedule.py` and `wsd_engine.py` add a learning-rate schedule, `limits.py` sets what ranks and servers wait for;
`prompt_limits.py` refuses prompts that verl would cut.
`shared_prompt.py` with `linear_log_probs.py`, and `gradient_accumulation.py` make an update of the actor cheaper.
In: rollouts in verl's queue, `retool.*`, `trainer.v1.sampler.*`, `optim.*`. Out: batches, metrics, a run's journals.
"""

from types import ModuleType

from verl_ext.versions import VERL, require_versions


def extend_trainers(v1: ModuleType) -> None:
    """Put our subclass of every trainer in verl's registry, under the trainer's own name.

    `verl.trainer.ppo.v1.register_trainer` accepts only new names, and verl takes a trainer with a new name for an
    asynchronous one (trainer_base.py:153, 731, 902, 912, 1004, 1499 in 0.9.1), so the entries are replaced.

    Args:
        v1: the imported package `verl.trainer.ppo.v1`.
    Raises:
        RuntimeError: verl has another version than the one whose trainers are extended.
    """
    require_versions(VERL, "verl_ext/trainer/run_trainer.py")
    from verl_ext.trainer import advantages, skipped_updates
    from verl_ext.trainer.run_trainer import RunTrainer

    advantages.replace_in(v1.trainer_base)
    skipped_updates.replace_in(v1.trainer_base)
    registry = v1.trainer_base.TRAINER_REGISTRY
    for name, trainer in registry.items():
        if not issubclass(trainer, RunTrainer):
            namespace = {"__doc__": trainer.__doc__, "__module__": RunTrainer.__module__}
            registry[name] = type(f"Run{trainer.__name__}", (RunTrainer, trainer), namespace)
