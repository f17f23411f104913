"""The schemas of tools in OpenAI's form, as a prompt shows them: the same text in SFT, rollouts and evaluation.

A schema is shown whole, with `items`, `anyOf`, `default` and the rest. Only the order of its keys is ours, because
files and servers have them in any order: verl's order for the keys that verl's schemas know, then the others by name.
"""

import json
from collections.abc import Mapping
from typing import Any

from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL

_FIRST = ("type", "name", "description", "enum", "parameters", "strict", "properties", "required")
_OF_FUNCTION = ("name", "description", "parameters", "strict")  # the description of a returned value is not shown
_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # whose keys are names
_VALUES = ("default", "const", "enum", "examples")  # which hold no schemas


def schemas_of(tools: Any) -> dict[str, dict]:
    """Return name -> schema of tools in OpenAI's form, a list or JSON text; of the interpreter if there are none.

    A null counts as no key: in a Parquet column every object has every key of the column.

    Raises:
        ValueError: they are not in that form.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the tools are no JSON: {error}") from None
    tools = without_nulls(plain(tools))
    if not tools:
        return {CODE_TOOL: CODE_SCHEMA}
    try:
        return {schema["function"]["name"]: schema for schema in map(_shown, tools)}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"expected tools in OpenAI's form, but found {str(tools)[:200]} ({error})") from None


def plain(value: Any) -> Any:
    """Return `value` with lists in place of the arrays that pandas gives, at any depth."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


def without_nulls(value: Any) -> Any:
    """Return `value` without the keys of its dicts that are None, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    for name in ("name", "description"):
        if not isinstance(function.get(name), str):
            raise ValueError(f"{name} is {function.get(name)!r:.80}; expected a text")
    parameters = function.get("parameters", {"type": "object"})
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if parameters.get("type") != "object" or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        raise ValueError(
            f"parameters of {function['name']} are {parameters!r:.200}; expected the JSON schema of an object"
        )
    if not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        raise ValueError(f"required of {function['name']} is {required!r:.80}; expected a list of names")
    shown = {name: function[name] for name in _OF_FUNCTION if name in function}
    return {"type": "function", "function": _ordered(shown)}


def _ordered(schema: Any, *, of_names: bool = False) -> Any:
    """Return a schema with its keys in order; `of_names`: a mapping of names to schemas, whose order stays."""
    if isinstance(schema, list):
        return [_ordered(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if of_names:  # `true` accepts anything, as {} does
        return {name: _ordered({} if each is True else each) for name, each in schema.items()}
    names = sorted(schema, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    return {
        name: schema[name] if name in _VALUES else _ordered(schema[name], of_names=name in _NAMES) for name in names
    }
