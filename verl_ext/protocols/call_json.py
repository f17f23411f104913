"""Read the JSON of a hermes call in a way that withstands any text of a model, and check its arguments by its schema.

Python's decoder accepts more than JSON has (NaN, a key twice), and returns values that later code cannot handle: a
thousand nested lists, which no encoder can write, or half of a surrogate pair, which no file name can have.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64  # brackets within brackets
MAX_DIGITS = 300  # of an integer, which a float can still hold
_JSON_TYPES = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def loads(text: str, *, strict: bool = True) -> Any:
    """Return the value of a JSON text, which can be encoded again.

    Args:
        strict: as in json.loads; False accepts raw control characters in strings.
    Raises:
        ValueError: it is not JSON, is nested deeper than MAX_DEPTH, has a key twice in an object, or has a number that
            is not finite or has more than MAX_DIGITS digits.
    """
    try:
        value = json.loads(
            text,
            strict=strict,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"brackets are nested more than {MAX_DEPTH} deep") from None
    _check_depth(value)
    return value


def short(value: Any) -> str:
    """Return a value of `loads` in at most 80 characters, for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def what_is_wrong(arguments: Mapping[str, Any], parameters: Mapping[str, Any], name: str) -> tuple[str, str] | None:
    """Return kind (of MALFORMED_KINDS) and message if an argument is missing or violates the schema; None otherwise.

    `type`, `nullable`, `enum`, `required`, `properties` and `items` count, at any depth; what else a schema says is the
    tool's to check. So are arguments that it does not have: code runs whatever the model adds to it.

    Args:
        parameters: those of the tool's schema.
        name: the tool's name.
    """
    properties = parameters.get("properties") or {}
    for argument in parameters.get("required") or []:
        if argument not in arguments:
            return "missing_argument", f"{name} needs the argument {argument!r}"
    for argument, value in arguments.items():
        if told := _violation(value, properties.get(argument), repr(argument)):
            return "missing_argument", f"{name}: {told}"
        if not is_plain(argument) or not is_plain(value):
            return "bad_json", f"{name}: {argument!r} has a character that is not valid in text, got {short(value)}"
    return None


def _violation(value: Any, schema: Any, where: str) -> str | None:
    """Return what is wrong with a value, in words; `where`: its place in the call."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):  # transformers' `int | None`
        return None
    kind, allowed = schema.get("type"), schema.get("enum")
    if not _has_type(value, kind):
        return f"{where} must be {kind}, got {short(value)}"
    if allowed and value not in allowed:
        return f"{where} must be one of {allowed}, got {short(value)}"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        inner = [(each, schema.get("items"), f"{where}[{i}]") for i, each in enumerate(value)]
    elif isinstance(value, dict):
        if missing := [name for name in schema.get("required") or [] if name not in value]:
            return f"{where} needs {missing[0]!r}, got {short(value)}"
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        inner = [(each, known.get(name, others), f"{where}[{name!r}]") for name, each in value.items()]
    return next(filter(None, (_violation(*each) for each in inner)), None)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {short(twice)} appears twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {short(text)} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, more than {MAX_DIGITS}")
    return int(text)


def _check_depth(value: Any) -> None:
    containers = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [each for each in containers if isinstance(each, dict | list)]
        if not containers:
            return
        containers = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(f"brackets are nested more than {MAX_DEPTH} deep")


def _has_type(value: Any, kind: Any) -> bool:
    kinds = [_JSON_TYPES[name] for name in ([kind] if isinstance(kind, str) else kind or []) if name in _JSON_TYPES]
    if isinstance(value, bool):  # Python counts it as an int
        return not kinds or bool in kinds
    return not kinds or any(isinstance(value, each) for each in kinds)


def is_plain(value: Any) -> bool:
    """Return whether all strings can be encoded and are free of NUL, which file names and program arguments forbid."""
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, dict):
        return all(is_plain(item) for pair in value.items() for item in pair)
    return all(map(is_plain, value)) if isinstance(value, list) else True
