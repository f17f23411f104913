"""The problems of an evaluation: AIME by name, or any file in verl's columns."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.datasets.problems import BUILT_IN, read_problems
from verl_ext.datasets.rows import DataError, field, read_rows
from verl_ext.datasets.text import PROMPTS, bare_problem
from verl_ext.records.problem import problem_of

NAMES = tuple(sorted(path.stem for path in BUILT_IN.glob("*.jsonl")))


def read_sets(
    sources: Sequence[str], *, protocol: str, of_domains: Mapping[str, str] | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return rows in verl's columns, with additional `uid` ("aime_2025:7"), `problem` (its name) and `raw_prompt`.

    The name is that of `problem_of`, but without the instructions that a known data set puts around the last user
    message, so that a problem keeps its name with another protocol's instructions.

    Args:
        sources: names of built-in sets, or paths of parquet or JSONL files in verl's columns.
        protocol: as `retool.protocol`, for the instructions around a built-in problem; a file has its own.
        of_domains: name of a built-in set -> its own protocol.
        limit: take at most this many problems of each set, from its start.
    Raises:
        DataError: there is no such set, two have the same name, or a row lacks prompt, data source or ground truth.
    """
    rows: list[dict[str, Any]] = []
    names = [Path(source).stem for source in sources]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise DataError(
            f"Two sets are called {sorted(repeated)[0]}. Rename a file, because samples are named after it."
        )
    for source, name in zip(sources, names, strict=True):
        found = _built_in(source, (of_domains or {}).get(source, protocol)) if source in NAMES else _from_file(source)
        found = found[:limit]
        if not found:
            raise DataError(f"{source} has no rows.")
        for index, row in enumerate(found):
            problem = problem_of(row | {"raw_prompt": bare_prompt(row["raw_prompt"])})
            rows.append(row | {"uid": f"{name}:{index}", "index": index, "problem": problem})
    return rows


def bare_prompt(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt without the instructions that a known data set puts around the last user message."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    bare = messages[last] | {"content": bare_problem(messages[last]["content"])}
    return [bare if message is messages[last] else message for message in messages]


def fingerprint(rows: Sequence[dict[str, Any]]) -> str:
    """Return the SHA-256 of the rows: equal for the same problems in the same order, wherever the file lies."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _built_in(name: str, protocol: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": name,
            "raw_prompt": [{"role": "user", "content": PROMPTS[protocol].format(problem=problem.text)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"id": problem.id},
        }
        for problem in read_problems(str(BUILT_IN / f"{name}.jsonl"))
    ]


def _from_file(source: str) -> list[dict[str, Any]]:
    if not Path(source).expanduser().exists():
        raise DataError(f"{source} is neither a built-in set ({', '.join(NAMES)}) nor a file.")
    rows = []
    for where, row in read_rows(source):
        try:
            field(row, "data_source", where)
            truth = field(row, "reward_model.ground_truth", where, object)
            messages = field(row, "prompt", where, list)
            for i in range(max(1, len(messages))):
                for name in ("role", "content"):
                    field(row, f"prompt.{i}.{name}", where)
            if truth is None:
                raise DataError(f"{where}, column reward_model.ground_truth: it is empty.")
            info = row.get("extra_info")
            info = {} if info is None else field(row, "extra_info", where, dict)
            has_kwargs = info.get("tools_kwargs") is not None
            tools_kwargs = field(row, "extra_info.tools_kwargs", where, dict) if has_kwargs else {}
        except DataError as error:
            raise DataError(
                f"{error} An evaluation needs verl's columns; data/prepare_jsonl.py makes them from your problems."
            ) from None
        # As verl's data set does
        rows.append(row | {"raw_prompt": messages, "extra_info": info, "tools_kwargs": tools_kwargs})
    return rows
