"""Whether the composed configuration says what verl will do."""

import difflib
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.names import did_you_mean
from verl_ext.doctor.run import Run
from verl_ext.doctor.schema import (
    KEYS_WITHOUT_EFFECT,
    OPEN_SECTIONS,
    has_type_of,
    is_field_of_own_class,
    is_known,
    is_open,
    is_within,
    leaves,
    schema,
)
from verl_ext.settings import CONFIGS, compose_run

topic = Topic("config")
SIMILAR = 0.8  # of a misspelt section


def check_config(run: Run) -> Iterator[Finding]:
    """Unknown keys, keys without effect, values of another type, and what is not set."""
    reference = schema(run.entry)
    composed = leaves(OmegaConf.to_container(run.config, resolve=False))
    defaults = leaves(reference)
    problems = chain(
        check_references(run),
        check_required(run, defaults),
        check_keys(run, composed, reference),
        check_effect(composed, defaults),
        check_types(composed, defaults),
        check_own_section(run),
    )
    text = f"verl 0.9.1 knows all {len(composed)} keys, and none that is set is without effect"
    yield from topic.all_well(problems, text)


def check_references(run: Run) -> Iterator[Finding]:
    try:
        OmegaConf.to_container(run.config, resolve=True)
    except OmegaConfBaseException as error:
        yield topic.fail(f"a reference cannot be resolved: {error}", "Correct the ${...} of that key.")


def check_required(run: Run, defaults: dict) -> Iterator[Finding]:
    for key in sorted(run.required):
        value = OmegaConf.select(run.config, key)
        if value is None or value == defaults.get(key):
            yield topic.fail(
                f"{key} is not set; verl would take its own default, {defaults.get(key)!r}",
                f"Set it: {key}=..., or use the launcher, which takes it from a variable (--help).",
            )


def check_keys(run: Run, composed: dict, reference: dict) -> Iterator[Finding]:
    known = [*leaves(reference), *OPEN_SECTIONS]
    sections = [*reference, "retool", "hydra", *(path.name for path in CONFIGS.iterdir() if path.is_dir())]
    for key, value in composed.items():
        if key not in known and value not in (None, {}) and any(is_within(name, key) for name in known):
            yield topic.fail(f"{key} is {value!r}, but it is a section", f"Set a key of it, {key}.NAME=...")
        elif not (is_open(key) or is_known(key, reference) or is_field_of_own_class(key, run.config)):
            own = not difflib.get_close_matches(key.partition(".")[0], sections, n=1, cutoff=SIMILAR)
            hint = "Remove it." if own else did_you_mean(key, [*known, *sections], "Remove it.")
            yield (topic.warn if own else topic.fail)(f"verl does not know {key}; it would do nothing", hint)


def explain(error: Exception, name: str, folder: Path) -> Finding:
    """Why a run cannot be composed: what Hydra says, without its search path, and which name was meant."""
    text = " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__
    hint = ""
    if quoted := re.search(r"(?:Could not \w+|primary config) .*?'([^']+)'", text):
        known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
        try:
            known += leaves(OmegaConf.to_container(compose_run(name, folder=folder)))
        except (HydraException, OmegaConfBaseException):  # the YAML itself is wrong, or not there
            pass
        hint = did_you_mean(quoted[1], known)
    return topic.fail(f"{name} cannot be composed: {text}", hint or "Correct the YAML or the override.")


def check_effect(composed: dict, defaults: dict) -> Iterator[Finding]:
    for key, value in composed.items():
        for section, use in KEYS_WITHOUT_EFFECT.items():
            if is_within(key, section) and value != defaults.get(key):
                yield topic.warn(f"{key}={value} has no effect in verl 0.9.1's v1 trainer", f"Instead: {use}.")


def check_types(composed: dict, defaults: dict) -> Iterator[Finding]:
    for key, value in composed.items():
        default = defaults.get(key)
        if key in ("trainer.save_freq", "trainer.test_freq") and value == "after_each_epoch":
            continue
        if value is not None and not is_open(key) and not has_type_of(value, default):
            kind = type(default).__name__
            yield topic.warn(
                f"{key} is {value!r} ({type(value).__name__}), but verl's default is a {kind}", "Correct it."
            )


def check_own_section(run: Run) -> Iterator[Finding]:
    """Keys of `retool` (RL), `data.retool` (SFT); their names and numbers are told by names.py and values.py."""
    for problem in run.own_problems():
        if problem.kind == "unknown":
            yield topic.fail(problem.message, did_you_mean(problem.key, problem.known, "Remove it."))
        elif problem.kind == "missing":
            yield topic.fail(problem.message, "Set it as in configs/qwen2-32b_dapo.yaml.")


def check_reward(run: Run) -> Iterator[Finding]:
    """`reward.reward_kwargs`, by the class that reads it. Imports verl."""
    if not run.is_rl or "verl_ext" not in str(run.get("reward.reward_manager.module.path", "")):
        return
    from verl_ext.reward.manager import RewardOptions

    try:
        options = RewardOptions.from_config(OmegaConf.to_container(run.config, resolve=True))
    except (ValueError, TypeError) as error:
        yield topic.fail(str(error), "Correct reward.reward_kwargs.")
        return
    parts = ["+1 / -1"]
    parts += [f"overlong shaping over the last {options.overlong_buffer} tokens"] * bool(options.overlong_buffer)
    parts += [f"length penalty {options.length_penalty}"] * bool(options.length_penalty)
    parts += ["tool bonus of the published run"] * options.tool_bonus
    yield topic.ok(f"reward: {', '.join(parts)}")
