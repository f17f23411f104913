"""Whether the composed configuration says what verl will do."""

import difflib
from collections.abc import Iterator

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.run import Run
from verl_ext.doctor.schema import (
    KEYS_WITHOUT_EFFECT,
    has_type_of,
    is_field_of_own_class,
    is_known,
    is_open,
    is_within,
    leaves,
    own_yaml,
    schema,
)

topic = Topic("config")
REFERENCE = "qwen2-32b_dapo"  # its `retool` section has every key
SFT_REFERENCE = "qwen2-32b_sft"


def check_config(run: Run) -> Iterator[Finding]:
    """Unknown keys, keys without effect, values of another type, and what is not set."""
    reference = schema(REFERENCE if run.is_rl else SFT_REFERENCE)
    composed = leaves(OmegaConf.to_container(run.config, resolve=False))
    defaults = leaves(reference)
    problems = [
        *check_references(run),
        *check_required(run, defaults),
        *check_keys(run, composed, reference),
        *check_effect(composed, defaults),
        *check_types(composed, defaults),
        *check_own_section(run),
    ]
    yield from problems
    if not problems:
        yield topic.ok(f"verl 0.9.1 knows all {len(composed)} keys, and none that is set is without effect")


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
    known = list(leaves(reference))
    for key in composed:
        if not (is_open(key) or is_known(key, reference) or is_field_of_own_class(key, run.config)):
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else "Remove it."
            say = topic.fail if key.partition(".")[0] in reference else topic.warn  # a section of the user's own
            yield say(f"verl does not know {key}; it would do nothing", hint)


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
    """`retool` (RL), `data.retool` (SFT): as many keys as the reference has."""
    if run.is_rl:
        section, reference = "retool", own_yaml(REFERENCE)["retool"]
    else:
        section, reference = "data.retool", own_yaml(SFT_REFERENCE)["data"]["retool"]
    own, known = leaves(run.get(section, {})), leaves(reference)
    for key in own.keys() - known.keys() - {"sandbox.queue_timeout_s"}:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"Did you mean {section}.{close[0]}?" if close else "Remove it."
        yield topic.fail(f"{section}.{key} is none of verl_ext's settings; it would do nothing", hint)
    if run.is_rl:
        for key in known.keys() - own.keys():
            yield topic.fail(f"{section}.{key} is missing, and verl_ext reads it", f"Set it as in {REFERENCE}.yaml.")
    if run.protocol not in ("code", "hermes"):
        yield topic.fail(f"{section}.protocol is {run.protocol!r}", "Set it to code or hermes.")


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
