"""Reads an option's settings, `retool.<name>` of a run's config, into a dataclass; and phases of training."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

T = TypeVar("T")


def read_settings(config: DictConfig, name: str, settings_class: type[T]) -> T | None:
    """Settings of the option `retool.<name>`, or None where its `enable` is not true or it is not there at all.

    Raises:
        ValueError: a setting that the option does not have (Hydra accepts it in a YAML without a word), one that is
            missing, or a value out of range.
    """
    section = OmegaConf.select(config, f"retool.{name}")
    if section is None or not section.get("enable"):
        return None
    values = OmegaConf.to_container(section, resolve=True)
    del values["enable"]
    known = {field.name for field in fields(settings_class)}
    needed = {field.name for field in fields(settings_class) if field.default is MISSING}
    if wrong := sorted((values.keys() - known) | (needed - values.keys())):
        raise ValueError(
            f"retool.{name} has {sorted(values)}: expected {sorted(known)}, `enable` aside. Correct {', '.join(wrong)}."
        )
    return settings_class(**values)


def check_phases(name: str, phases: Sequence[Sequence[int]], *, lowest: int) -> None:
    """Raise ValueError unless `phases` is [[0, value], [step, value], ...], steps ascending, values >= `lowest`."""
    steps = [phase[0] for phase in phases if len(phase) == 2]
    if (
        len(steps) != len(phases)
        or steps[:1] != [0]
        or sorted(set(steps)) != steps
        or any(phase[1] < lowest for phase in phases)
    ):
        raise ValueError(
            f"retool.{name}.phases is {phases!r}: expected [[0, value], [step, value], ...] with ascending steps and "
            f"values of at least {lowest}."
        )


def in_phase(phases: Sequence[Sequence[int]], step: int) -> Any:
    """The value of the last phase that has begun at `step`."""
    return next(value for start, value in reversed(phases) if start <= step)
