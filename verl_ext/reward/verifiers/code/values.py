"""Plain data as JSON, between the program that holds a test and the one that holds the solution. Sent there as source.

None, bool, int, float and str stay as they are; containers, arrays and a few types of the standard library become
[name, items], such as ["list", [...]]. An instance of a class that is derived from such a type counts as one.
"""

import base64
import datetime
import json
import sys
import zlib
from collections import Counter, deque
from decimal import Decimal
from fractions import Fraction
from itertools import chain

SCALARS = {int: int.__int__, float: float.__float__, str: str.__str__}
KINDS = {  # name -> type, its items, and how it is made of their list
    "list": (list, list.__iter__, list),
    "tuple": (tuple, tuple.__iter__, tuple),
    "Counter": (Counter, lambda value: [dict(dict.items(value))], lambda items: Counter(*items)),
    "dict": (
        dict,
        lambda value: chain(*dict.items(value)),
        lambda items: dict(zip(items[::2], items[1::2], strict=True)),
    ),
    "set": (set, set.__iter__, set),
    "frozenset": (frozenset, frozenset.__iter__, frozenset),
    "complex": (complex, lambda value: (value.real, value.imag), lambda items: complex(*items)),
    "bytes": (bytes, lambda value: [memoryview(value).hex()], lambda items: bytes.fromhex(*items)),
    "bytearray": (bytearray, lambda value: [memoryview(value).hex()], lambda items: bytearray.fromhex(*items)),
    "dict_keys": (type({}.keys()), list, lambda items: dict.fromkeys(items).keys()),
    "dict_values": (type({}.values()), list, lambda items: dict(enumerate(items)).values()),
    "dict_items": (type({}.items()), list, lambda items: dict(items).items()),
    "range": (range, lambda value: (value.start, value.stop, value.step), lambda items: range(*items)),
    "deque": (deque, lambda value: (list(value), value.maxlen), lambda items: deque(*items)),
    "Fraction": (Fraction, lambda value: [str(value)], lambda items: Fraction(*items)),
    "Decimal": (Decimal, lambda value: [str(value)], lambda items: Decimal(*items)),
    "timedelta": (
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda items: datetime.timedelta(*items),
    ),
}
for _kind in (datetime.datetime, datetime.date, datetime.time):
    KINDS[_kind.__name__] = (
        _kind,
        lambda value: [value.isoformat()],
        lambda items, kind=_kind: kind.fromisoformat(*items),
    )
ARRAY_KINDS = "biufcU"  # of numpy: booleans, numbers and strings


def encode(value, encode_other):
    """Return `value` as JSON; `encode_other(value)` encodes what is not plain data.

    Raises:
        RecursionError: the value is too deep, or a cycle.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind, content in SCALARS.items():
        if issubclass(type(value), kind):
            return content(value)
    for name, (kind, take_items, _) in KINDS.items():
        if issubclass(type(value), kind):
            items = [encode(item, encode_other) for item in take_items(value)]
            return [name, sorted(items, key=json.dumps) if name in ("set", "frozenset") else items]
    numpy = sys.modules.get("numpy")
    if numpy and issubclass(type(value), (numpy.generic, numpy.ndarray)) and value.dtype.kind in ARRAY_KINDS:
        if issubclass(type(value), numpy.generic):
            return encode(value.item(), encode_other)
        return ["array", [value.dtype.str, list(value.shape), value.ravel().tolist()]]
    return encode_other(value)


def decode(data, decode_other):
    """Return the value of JSON made by `encode`; `decode_other(data)` decodes what is not plain data."""
    if not isinstance(data, list):
        return data
    if data[0] in KINDS:
        return KINDS[data[0]][2]([decode(item, decode_other) for item in data[1]])
    if data[0] == "array":
        import numpy

        kind, shape, items = data[1]
        return numpy.array(items, dtype=kind).reshape(shape)
    return decode_other(data)


def pack(value):
    """Return JSON as one line of text: the sandbox keeps a million bytes of output."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def unpack(line):
    return json.loads(zlib.decompress(base64.b64decode(line)))
