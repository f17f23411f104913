"""What a section of a run's YAML may contain: the interval of a number, the names of a text, the required keys.

A section is a dataclass whose fields are made by `key`. `problems` says what is wrong with one, `check` raises it.
"""

import difflib
import functools
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from omegaconf import DictConfig

SectionT = TypeVar("SectionT", bound="DataclassInstance")
OptionT = TypeVar("OptionT", bound="Option")


def key(
    default: Any = MISSING, *, within: str = "", about: str = "", among: Collection[str] = (), table_of: Any = None
) -> Any:
    """Make a field of a section.

    Args:
        within: the interval of a number, `(0, 1]`.
        about: what the number is, with its unit.
        among: the names that a text can be.
        table_of: the dataclass of the sections of a table, whose names are free.
    """
    metadata = {"within": within, "about": about, "among": among, "table_of": table_of}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """A section with one more key, `enable`, which does nothing unless that is true."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a key of a section."""

    key: str  # dotted
    kind: str  # unknown, missing, name (a text that is not one of the names), value
    message: str
    known: tuple[str, ...] = ()  # keys or names that were expected

    def __str__(self) -> str:
        if self.kind == "name":
            return f"{self.message}; expected one of {', '.join(self.known)}."
        near = difflib.get_close_matches(self.key, self.known, n=1)
        return f"{self.message}." + (f" Did you mean {near[0]}?" if near else "")


_hints = functools.cache(typing.get_type_hints)


def _kinds(schema: type, name: str) -> tuple[type, ...]:
    """Return `(int, NoneType)` for a field `int | None`."""
    hint = _hints(schema)[name]
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _below(schema: type, name: str) -> "type[DataclassInstance] | None":
    """Return the dataclass of a field that is a section."""
    return next((kind for kind in _kinds(schema, name) if is_dataclass(kind)), None)


def known_keys(schema: "type[DataclassInstance]", name: str) -> Iterator[str]:
    """Yield the dotted keys of a section that is called `name`, at all levels."""
    if issubclass(schema, Option):
        yield f"{name}.enable"
    for each in fields(schema):
        below = _below(schema, each.name)
        yield from known_keys(below, f"{name}.{each.name}") if below else [f"{name}.{each.name}"]


def problems(section: Any, schema: "type[DataclassInstance]", name: str) -> Iterator[Problem]:
    """Yield what is wrong with a section of a config: keys, names and numbers.

    An option that is off may lack keys and have any values; its keys must be right, because a misspelt one may be
    `enable`.

    `section` consists of plain containers; a reference that is not resolved yet, `${...}`, may stand for any value.
    """
    if not isinstance(section, Mapping):
        yield Problem(name, "value", f"{name} is {section!r}, but it is a section")
        return
    is_option = issubclass(schema, Option)
    of = {each.name: each for each in fields(schema)}
    for unknown in sorted(section.keys() - of.keys() - ({"enable"} if is_option else set())):
        text = f"{name}.{unknown} is not a setting of verl_ext and would have no effect"
        yield Problem(f"{name}.{unknown}", "unknown", text, tuple(known_keys(schema, name)))
    if is_option and "enable" not in section:
        yield _missing(f"{name}.enable")
    is_on = bool(section.get("enable", True))
    wrong = []
    for each in of.values():
        path, below, needed = f"{name}.{each.name}", _below(schema, each.name), is_on and each.default is MISSING
        if each.name not in section:
            wrong += [] if not needed else problems({}, below, path) if below else [_missing(path)]
        elif below:
            yield from problems(section[each.name], below, path) if section[each.name] is not None else ()
        elif (of_table := each.metadata.get("table_of")) and isinstance(section[each.name], Mapping):
            for name_in_table, row in section[each.name].items():
                yield from problems(row, of_table, f"{path}.{name_in_table}")
        elif is_on:
            wrong += _wrong_value(section[each.name], schema, each, path)
    yield from wrong
    if is_on and not wrong and hasattr(schema, "__post_init__"):
        try:
            schema(**{each: value for each, value in section.items() if each in of})
        except (ValueError, TypeError) as error:  # TypeError: phases are not a list of lists
            yield Problem(name, "value", str(error).rstrip("."))


def _missing(path: str) -> Problem:
    return Problem(path, "missing", f"{path} is missing, but verl_ext reads it")


def _wrong_value(value: Any, schema: type, of: Field, path: str) -> list[Problem]:
    """Return a list of one problem, or an empty one."""
    kinds, within, among = _kinds(schema, of.name), of.metadata.get("within"), of.metadata.get("among")
    if (value is None and types.NoneType in kinds) or (isinstance(value, str) and value.startswith("${")):
        return []
    if among:
        return [] if value in among else [Problem(path, "name", f"{path} is {value!r}", tuple(sorted(among)))]
    if any(_is_a(value, kind) for kind in kinds) and (not within or is_in(typing.cast(float, value), within)):
        return []
    expected = " or ".join(_WORDS[kind] for kind in kinds if kind in _WORDS)
    where = f" in {within}: it is {of.metadata['about']}" if within else ""
    return [Problem(path, "value", f"{path} is {value!r}, expected {expected}{where}")]


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a section",
}


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)


def is_in(number: float, interval: str) -> bool:
    """Tell whether a number is in an interval such as `(0, 1]`."""
    low, high = map(float, interval[1:-1].split(","))
    return low < number < high or (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)


def check(section: "DictConfig | Mapping[str, Any]", schema: "type[DataclassInstance]", name: str = "retool") -> None:
    """Raise an error for whatever `problems` finds in a section; called when a run starts.

    Raises:
        ValueError: names every key that is wrong.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    plain = section
    if OmegaConf.is_config(section):
        try:
            plain = OmegaConf.to_container(section, resolve=True)
        except InterpolationResolutionError:  # an environment variable that this command may do without
            plain = OmegaConf.to_container(section)
    if found := [*problems(plain, schema, name)]:
        raise ValueError(" ".join(map(str, found)))


@typing.overload
def read_settings(config: "DictConfig", name: str, settings_class: type[OptionT]) -> OptionT | None: ...
@typing.overload
def read_settings(config: "DictConfig", name: str, settings_class: type[SectionT]) -> SectionT: ...
def read_settings(config: "DictConfig", name: str, settings_class: "type[DataclassInstance]") -> Any:
    """Return the settings `retool.<name>` of a run; None for an option that is off or absent. Raises as `check`."""
    from omegaconf import OmegaConf

    found = OmegaConf.select(config, f"retool.{name}")
    section = {} if found is None else typing.cast(dict[str, Any], OmegaConf.to_container(found, resolve=True))
    if issubclass(settings_class, Option) and not section.get("enable"):
        return None
    check(section, settings_class, f"retool.{name}")
    return settings_class(**{each: value for each, value in section.items() if each != "enable"})


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
    """Return the value of the last phase that has begun at `step`."""
    return next(value for start, value in reversed(phases) if start <= step)
