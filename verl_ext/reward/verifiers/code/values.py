"""Values as JSON, between the program that holds the tests and the one that holds the solution. Sent there as source.

Only data passes: None, bool, int, float, str as they are; ["list", [...]], and so on, for exact built-in types; a few
types of the standard library and arrays as ["made", kind, data]; anything else as ["object", number, type name], a
handle. An instance of a class derived from a built-in type is a handle that also carries its content.
"""

import importlib
import json
import sys

sys.set_int_max_str_digits(0)
CONTENT = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}
TYPES = {name.__name__: name for name in (*CONTENT, bool, bytearray, type(None), range, object, type)}
MADE = {  # name of a type -> its data, and how the type makes a value of the data
    "builtins.range": (lambda value: (value.start, value.stop, value.step), lambda kind, data: kind(*data)),
    "collections.deque": (lambda value: (list(value), value.maxlen), lambda kind, data: kind(*data)),
    "collections.defaultdict": (dict, lambda kind, data: kind(None, data)),
    "datetime.timedelta": (
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda kind, data: kind(*data),
    ),
}
MADE |= dict.fromkeys(["collections.Counter", "collections.OrderedDict"], (dict, lambda kind, data: kind(data)))
MADE |= dict.fromkeys(["fractions.Fraction", "decimal.Decimal"], (str, lambda kind, data: kind(data)))
MADE |= dict.fromkeys(
    [f"datetime.{name}" for name in ("date", "time", "datetime")],
    (lambda value: value.isoformat(), lambda kind, data: kind.fromisoformat(data)),
)
ARRAY_KINDS = "biufcU"  # of numpy: booleans, numbers and strings


def encode(value, to_handle):
    """Return `value` as JSON; `to_handle(value, content)` encodes all but plain data.

    Raises:
        RecursionError: the value is too deep, or a cycle.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [kind.__name__, [encode(item, to_handle) for item in value]]
    if kind in (set, frozenset):  # sorted, because their order differs between processes
        return [kind.__name__, sorted((encode(item, to_handle) for item in value), key=json.dumps)]
    if kind is dict:
        return ["dict", [[encode(key, to_handle), encode(item, to_handle)] for key, item in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is type and TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    made = take_apart(kind, value)
    if made is not None:
        return made[0] if made[1] is None else ["made", made[1], encode(made[0], to_handle)]
    for base, content in CONTENT.items():
        if issubclass(kind, base):
            return to_handle(value, encode(content(value), to_handle))
    return to_handle(value, None)


def take_apart(kind, value):
    """Return (data, name) for a type that is rebuilt on the other side, or (data, None) if the data is enough."""
    module, name = kind.__module__, f"{kind.__module__}.{kind.__name__}"
    if name in MADE and kind is getattr(sys.modules.get(module), kind.__name__, None):
        if getattr(value, "tzinfo", None) is None:
            return MADE[name][0](value), name
    numpy = sys.modules.get("numpy")
    if module == "numpy" and numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        if value.dtype.kind in ARRAY_KINDS:
            if isinstance(value, numpy.generic):
                return value.item(), None
            return (value.dtype.str, list(value.shape), value.ravel().tolist()), "ndarray"
    return None


def put_together(name, data):
    if name == "ndarray":
        import numpy

        return numpy.array(data[2], dtype=data[0]).reshape(data[1])
    if name not in MADE:
        raise ValueError(f"no such kind: {name!r}")
    module, _, kind = name.partition(".")
    return MADE[name][1](getattr(importlib.import_module(module), kind), data)


def decode(data, from_handle):
    """Return the value of JSON made by `encode`; `from_handle(data)` decodes all but plain data."""
    if not isinstance(data, list):
        return data
    kind = data[0]
    if kind in ("list", "tuple", "set", "frozenset"):
        return TYPES[kind](decode(item, from_handle) for item in data[1])
    if kind == "dict":
        return {decode(key, from_handle): decode(item, from_handle) for key, item in data[1]}
    if kind in ("bytes", "bytearray"):
        return TYPES[kind].fromhex(data[1])
    if kind == "complex":
        return complex(*data[1])
    if kind == "type":
        return TYPES[data[1]]
    if kind == "made":
        return put_together(data[1], decode(data[2], from_handle))
    return from_handle(data)
