"""The bytes of a body: what counts as JSON, and how much of it is allowed before parsing."""

import json
import random

import pytest

from verl_ext.sandbox.server import body
from verl_ext.sandbox.server.body import check_number_of_values, parse

REQUEST = '{"code": "print(\'é\')", "language": "python"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (REQUEST.encode("utf-16"), "UTF-8"),
        (REQUEST.encode("utf-16-le"), "JSON|Expecting|UTF-8"),
        (REQUEST.encode("utf-32"), "UTF-8"),
        (REQUEST.encode("latin-1"), "UTF-8: invalid continuation byte at byte 17"),
        (b'{"code": "\xed\xa0\x80"}', "UTF-8"),  # a lone surrogate
        (b'{"code": "\xf4\x90\x80\x80"}', "UTF-8"),  # beyond U+10FFFF
        (b'{"code": "\xc0\x80"}', "UTF-8"),  # NUL in two bytes
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [Infinity]}', "Infinity is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"code": "1", "code": "2"}', "same key twice"),
        (b'{"a": [{"b": 1, "\\u0062": 2}]}', "same key twice"),
        (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
        (b"[" * 20_000 + b"]" * 20_000, "nested too deeply"),
        (b'{"":' * 11_000 + b"1" + b"}" * 11_000, "nested too deeply"),
        (b"", "Expecting value"),
        (b'{"a": 1} {}', "Extra data"),
        (b'{"a": "\n"}', "control character"),
    ],
)
def test_what_is_no_json_is_a_value_error(content, message):
    with pytest.raises(ValueError, match=message):
        parse(bytearray(content))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_json_in_utf_8_is_parsed_as_json_loads_does(encoding):
    assert parse(bytearray(REQUEST.encode(encoding))) == json.loads(REQUEST)
    assert parse(bytearray(b'{"code": "\\ud800", "n": 1e400}')) == {"code": "\ud800", "n": float("inf")}


VALUES = {
    "arrays": b"[],",
    "objects": b"{},",
    "numbers": b"0,",
    "strings": b'"",',
    "strings without commas": b'""',  # not JSON, and as slow to scan
    "brackets": b"[",
    "members": b'"a":1,',
    "escapes": rb'"\"\\\\\"",',
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_too_many_values_are_refused_before_they_are_parsed(monkeypatch, value):
    monkeypatch.setattr(body.json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ValueError, match="at most 16384 values"):
        parse(bytearray(b'{"x": [' + value * 70_000 + b"0]}"))


@pytest.mark.parametrize(
    "text",
    ["[{,:" * 50_000, '"[{,' * 50_000, "\\" * 200_001, '\\",' * 50_000, "é\n\t\\n," * 50_000],
    ids=["signs", "quotes", "backslashes", "both", "escapes"],
)
def test_what_a_text_holds_is_no_value(text):
    request = {"code": text, "stdin": text, "files": {text[:100]: None}}
    assert parse(bytearray(json.dumps(request).encode())) == request
    assert parse(bytearray(json.dumps(request, ensure_ascii=False).encode())) == request


def test_the_count_is_between_that_of_the_values_and_three_times_as_much(monkeypatch):
    """For any JSON, no value escapes the count, and none counts more than three times."""
    monkeypatch.setattr(body, "MAX_VALUES", 60)
    draw = random.Random(0)

    def value(depth: int) -> object:
        kind = draw.randrange(7 if depth else 5)
        text = "".join(draw.choice('ab"\\[{,:é\n') for _ in range(draw.randrange(6)))
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randrange(8))]
        if kind == 6:
            return {f"{text}{i}": value(depth - 1) for i in range(draw.randrange(8))}
        return [text, draw.random(), None, True, -3][kind]

    def count(value: object) -> int:
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return 1 + sum(map(count, inner))

    refused = 0
    for _ in range(2000):
        content = value(4)
        try:
            check_number_of_values(bytearray(json.dumps(content).encode()))
            assert count(content) <= 60 + 1
        except ValueError:
            refused += 1
            assert count(content) > 60 / 3
    assert 50 < refused < 1900
