"""Whether the composed configuration says what verl will do."""

import difflib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.doctor import schema as of
from verl_ext.doctor.finding import Finding, all_well, fail, ok, warn
from verl_ext.doctor.run import Run
from verl_ext.doctor.suggest import did_you_mean
from verl_ext.evaluation.store import flatten
from verl_ext.settings import CONFIGS, compose_run
from verl_ext.settings.domains import read_domains

SIMILAR = 0.8  # of a misspelt section


def check_config(run: Run) -> Iterator[Finding]:
    """Report unknown keys, keys without effect, values of another type, and keys that are not set."""
    composed = flatten(run.tree(resolve=False))
    text = f"verl 0.9.1 knows all {len(composed)} keys, and every key that is set has an effect"
    yield from all_well(_problems(run, composed), text)


def _problems(run: Run, composed: dict) -> Iterator[Finding]:
    reference = of.schema(run.entry)
    defaults = flatten(reference)
    try:
        run.tree(resolve=True)
    except OmegaConfBaseException as error:
        yield fail(f"a reference cannot be resolved: {error} -> Correct the ${{...}} in its value.")
    for key in sorted(run.required):
        if run.get(key) in (None, defaults.get(key)):
            yield fail(f"""{key} is not set; verl would use its own default, {defaults.get(key)!r}
                -> Set {key}=..., or use the launcher, which reads it from an environment variable (--help).""")
    known = [*defaults, *of.OPEN_SECTIONS]
    sections = [*reference, "retool", "hydra", *(path.name for path in CONFIGS.iterdir() if path.is_dir())]
    for key, value in composed.items():
        if key not in known and value not in (None, {}) and any(of.is_within(name, key) for name in known):
            yield fail(f"{key} is {value!r}, but it is a section -> Set a key in it: {key}.NAME=...")
        elif not (of.is_open(key) or of.is_known(key, reference) or of.is_field_of_own_class(key, run.config)):
            own = not difflib.get_close_matches(key.partition(".")[0], sections, n=1, cutoff=SIMILAR)
            hint = "Remove it." if own else did_you_mean(key, [*known, *sections], "Remove it.")
            yield (warn if own else fail)(f"verl does not know {key}, so it would have no effect -> {hint}")
    unread = of.unread_keys(run.entry)
    for key, value in composed.items():
        if value == defaults.get(key):
            continue
        if use := [use for section, use in of.KEYS_WITHOUT_EFFECT.items() if of.is_within(key, section)]:
            yield warn(f"{key}={value} has no effect in verl 0.9.1's v1 trainer -> {use[0]}")
        elif key in unread:
            yield warn(f"""{key}={value} has no effect: no code that a run executes in verl 0.9.1 or verl_ext reads it
                -> Remove it.""")
    for key, value in composed.items():
        is_word = key in ("trainer.save_freq", "trainer.test_freq") and value == "after_each_epoch"
        is_word |= key.endswith(".rollout_is_threshold") and "_" in str(value)  # an interval, such as 0.5_2.0
        if not (is_word or value is None or of.is_open(key) or of.has_type_of(value, defaults.get(key))):
            kinds = type(value).__name__, type(defaults[key]).__name__
            yield warn(f"{key} is {value!r}, of type {kinds[0]}, but verl's default has type {kinds[1]} -> Correct it.")
    if run.has_own_reward:
        yield from _unknown_of_reward(run.get("reward.reward_kwargs", {}))
    for problem in run.own_problems("unknown", "missing"):
        hint = "Set it as configs/shared/ does (retool.yaml; for SFT sft.yaml; for checkpoints every_run.yaml)."
        if problem.kind == "unknown":
            hint = did_you_mean(problem.key, problem.known, "Remove it.")
        yield fail(f"{problem.message} -> {hint}")


def _unknown_of_reward(section: dict) -> Iterator[Finding]:
    """Report what RewardOptions would refuse, before the import of torch that it needs."""
    known = [f"reward.reward_kwargs.{key}" for key in of.reward_keys()]
    for prefix, part in (("", section), ("overlong_buffer_cfg.", section.get("overlong_buffer_cfg"))):
        for key in (f"reward.reward_kwargs.{prefix}{name}" for name in part or ()):
            if key not in known:
                hint = did_you_mean(key, known, "Remove it.")
                yield fail(f"{key} is not a setting of verl_ext's reward manager, which would refuse it -> {hint}")


def explain(error: Exception, name: str, folder: Path) -> Finding:
    """Say why a run cannot be composed: Hydra's message without its search path, and which name was meant."""
    text = " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__
    hint = ""
    if quoted := re.search(r"(?:Could not \w+|primary config) .*?'([^']+)'", text):
        known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
        with suppress(HydraException, OmegaConfBaseException):  # the YAML itself is wrong or missing
            known += flatten(cast(dict, OmegaConf.to_container(compose_run(name, folder=folder))))
        hint = did_you_mean(quoted[1], known)
    return fail(f"{name} cannot be composed: {text} -> {hint or 'Correct the YAML or the override.'}")


def check_verifiers(run: Run) -> Iterator[Finding]:
    """Check that the verifiers under `reward.reward_kwargs` can be imported, by importing them."""
    if not run.has_own_reward:
        return
    from verl_ext.reward.verifiers import Verifiers  # 0.1 s

    try:
        read_domains(run.config)
    except ValueError as error:
        yield fail(f"{error} -> Correct the table.")
        return
    try:
        Verifiers.of_run(run.config)
    except Exception as error:  # from whatever a verifier's author wrote
        yield fail(f"{error} -> Correct reward.reward_kwargs.verifiers, or the module that it names.")


def check_reward(run: Run) -> Iterator[Finding]:
    """Check the values of `reward.reward_kwargs` with the class that reads them. Imports verl and torch."""
    if not run.has_own_reward:
        return
    from verl_ext.reward.options import RewardOptions

    try:
        options = RewardOptions.from_config(run.tree(resolve=True))
    except (ValueError, TypeError) as error:
        yield fail(f"{error} -> Correct reward.reward_kwargs.")
        return
    parts = ["+1 / -1"]
    parts += [f"overlong shaping over the last {options.overlong_buffer} tokens"] * bool(options.overlong_buffer)
    parts += [f"length penalty {options.length_penalty}"] * bool(options.length_penalty)
    parts += ["tool bonus of the published run"] * options.tool_bonus
    parts += [f"{term.weight:g} x {term.name}" for term in options.terms]
    yield ok(f"reward: {', '.join(parts)}")
