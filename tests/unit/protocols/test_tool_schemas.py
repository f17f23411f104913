"""A tool's schema is shown whole, and in one form whoever wrote it."""

import json

import numpy as np
import pytest

from verl_ext.protocols.base import CODE_SCHEMA
from verl_ext.protocols.tool_schemas import schemas_of

PLACE = {"type": "object", "properties": {"zip": {"type": "integer"}, "city": {"type": "string"}}, "required": ["city"]}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"$ref": "#/$defs/Place"},
                "tags": {"type": "array", "description": "some", "items": {"type": "string"}},
                "limit": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": 5},
            },
            "required": ["where"],
            "$defs": {"Place": PLACE},
            "additionalProperties": False,
        },
    },
}


def test_a_schema_is_shown_whole():
    assert schemas_of([LOOK]) == {"look": LOOK} and schemas_of([LOOK["function"]]) == {"look": LOOK}


def test_keys_have_one_order_whoever_wrote_them_but_names_and_values_stay():
    form = LOOK["function"]["parameters"]
    arguments = {
        "where": form["properties"]["where"],
        "tags": {"items": {"type": "string"}, "description": "some", "type": "array"},
        "limit": {"default": 5, "anyOf": [{"minimum": 1, "type": "integer"}, {"type": "null"}]},
    }
    place = {name: PLACE[name] for name in ("required", "properties", "type")}
    other = {"additionalProperties": False, "$defs": {"Place": place}, "required": ["where"], "properties": arguments}
    function = {"parameters": other | {"type": "object"}, "description": "Look.", "name": "look"}
    assert json.dumps(schemas_of([{"function": function, "type": "function"}])) == json.dumps({"look": LOOK})
    given = {"type": "object", "properties": {"it": {"default": {"b": 1, "a": {"type": 1, "items": 2}}}}}
    assert json.dumps(given) in json.dumps(schemas_of(json.dumps([LOOK["function"] | {"parameters": given}])))


def test_what_parquet_adds_is_taken_away():
    padded = {**LOOK, "function": {**LOOK["function"], "strict": None}}
    assert schemas_of(np.array([padded])) == {"look": LOOK}
    assert schemas_of(None) == schemas_of(np.array([])) == {"code_interpreter": CODE_SCHEMA}


def test_a_tool_without_arguments_and_one_that_takes_anything():
    bare = {"name": "now", "description": "Tell the time.", "parameters": {"type": "object"}}
    anything = bare | {"parameters": {"type": "object", "properties": {"it": True}}}
    assert schemas_of([bare])["now"]["function"] == bare
    assert schemas_of([anything])["now"]["function"]["parameters"]["properties"] == {"it": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name is 3; expected a text"),
        ({"description": None}, "description is None; expected a text"),
        ({"parameters": {"type": "string"}}, "parameters of look are {'type': 'string'}"),
        ({"parameters": {"properties": {}}}, "expected the JSON schema of an object"),
        ({"parameters": {"type": "object", "properties": {"a": "integer"}}}, "expected the JSON schema of an object"),
        ({"parameters": {"type": "object", "properties": ["a"]}}, "expected tools in OpenAI's form"),
        ({"parameters": {"type": "object", "required": "a"}}, "required of look is 'a'"),
    ],
)
def test_what_is_no_schema_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        schemas_of([LOOK["function"] | change])
    with pytest.raises(ValueError, match="expected tools in OpenAI's form"):
        schemas_of(["look"])
    with pytest.raises(ValueError, match="the tools are no JSON"):
        schemas_of("[")
