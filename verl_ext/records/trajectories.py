"""A rollout as a row of the records (schema.TRAJECTORIES): `problem_columns` of its group and `rollout_columns`.

An agent-loop worker (rollout/workers.py) fills in what it knows of the row. The recorder adds the prompt's fate.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from verl_ext.outcome import INFRASTRUCTURE_FAILURES, Fault, RolloutEnd, rollout_end
from verl_ext.records.problem import canonical, id_of, problem_of
from verl_ext.runs import jsonl

Row = Mapping[str, Any]
MAX_OUTPUT = 2**15  # characters kept of a call's stdout, and as many of its stderr; the model sees fewer


def problem_columns(sample: Row, *, validate: bool) -> dict[str, Any]:
    """Return the columns that a group's rollouts share; `sample`: the data set's row, with `uid` and `global_steps`."""
    index = sample.get("index")
    index = index.item() if hasattr(index, "item") else index
    truth = (sample.get("reward_model") or {}).get("ground_truth")
    return {
        "uid": sample["uid"],
        "step": sample.get("global_steps"),
        "validate": validate,
        "index": index if type(index) is int else None,  # some data sets have a text there
        "problem": problem_of(sample),
        "id": text_of(id_of(sample) or None),
        "domain": text_of(sample.get("data_source")),
        "ability": text_of(sample.get("ability")),
        "ground_truth": None if truth is None else text_of(canonical(truth)),
    }


def rollout_columns(
    session: int, trajectory: Row, extra_fields: Row, *, score: float | None = None, **times: Any
) -> dict[str, Any]:
    """Return what is known of a rollout when it has ended.

    Args:
        session: its number in the group.
        trajectory: `prompt` and `turns` as the agent loop recorded them; empty if another project's loop ran.
        extra_fields: the rollout's, with the reward manager's `reward_extra_info`.
        times: `score_s`, `started_s`, `ended_s`.
    """
    info = dict(extra_fields.get("reward_extra_info") or {})
    end = rollout_end({"finish_reason": extra_fields.get("finish_reason"), **info})
    use = extra_fields.get("tool_use") or {}
    spans = extra_fields.get("version_spans") or ()
    turns, calls = _turns_and_calls(trajectory.get("turns", ()))
    return {
        "session": session,
        "prompt": trajectory.get("prompt"),
        "turns": turns,
        "calls": calls,
        "version_spans": [dict(zip(("start", "end", "version"), span, strict=True)) for span in spans],
        "end_reason": str(end),
        "exception": _exception(end, calls, info.get("verdict"), extra_fields.get("lost_servers") or ()),
        "fault": str(_ENDS[end].fault) if end in _ENDS else None,
        "score": None if end in INFRASTRUCTURE_FAILURES else _number(score),
        "acc": None if end in INFRASTRUCTURE_FAILURES else _number(info.get("acc")),
        "reward_parts": _json(info),
        "verdict": {name: text_of(info.get(key) or None) for name, key in _VERDICT},
        "response_tokens": sum(turn["tokens"] for turn in turns),
        "model_tokens": sum(turn["tokens"] for turn in turns if turn["role"] == "model"),
        "timings": {name: use.get(name) for name in ("queue_s", "generate_s", "tool_s")} | times,
        "sampling": _json({"seeds": trajectory.get("seeds"), **(trajectory.get("sampling") or {})}),
        "tool_use": _json(use),
    }


def _exception(end: Any, calls: Sequence[Row], verdict: Any, lost_servers: Sequence[str]) -> str | None:
    """Return the infrastructure's message about its failure."""
    if end == RolloutEnd.UNVERIFIED:
        return text_of(verdict or None)
    if end == RolloutEnd.ABORTED and lost_servers:
        return text_of(f"no answer of {', '.join(lost_servers)}")
    return next((call["stderr"] for call in calls if call["fault"] == Fault.INFRASTRUCTURE), None)


def raised_columns(session: int, error: BaseException, **times: float) -> dict[str, Any]:
    """Return what is known of a rollout that raised, which is stored nowhere else. `times`: `started_s`, `ended_s`."""
    return {
        "session": session,
        "end_reason": str(RolloutEnd.RAISED),
        "exception": text_of(f"{type(error).__name__}: {error}"),
        "fault": str(RolloutEnd.RAISED.fault),
        "timings": times,
    }


_ENDS = {str(end): end for end in RolloutEnd}
_encode = msgspec.json.Encoder(enc_hook=lambda value: value.item() if hasattr(value, "item") else str(value)).encode
_VERDICT = (("extracted", "pred"), ("normalised", "normalised"), ("rule", "method"), ("text", "verdict"))
_OF_TURN = ("text", "tokens", "start", "server", "started_s", "generate_s")


def _turns_and_calls(turns: Sequence[Row]) -> tuple[list[dict], list[dict]]:
    rows: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for turn in turns:
        first = len(calls) if turn["calls"] else None
        calls += [_call(call, len(rows)) for call in turn["calls"]]
        rows.append({"role": "model", "call": first} | {name: turn.get(name) for name in _OF_TURN})
        if (reply := turn.get("reply")) and reply["tokens"]:
            rows.append({"role": "tool", "call": first, **reply})
    return rows, calls


def _call(call: Row, turn: int) -> dict[str, Any]:
    row = {"turn": turn, "tool": call.get("tool"), "code": None, "stdout": None, "stderr": None, "fault": None}
    if "malformed" in call:
        said = text_of(call["output"])
        return row | {"status": f"malformed:{call['malformed']}", "stdout": said, "fault": str(Fault.MODEL)}
    arguments = call["arguments"]
    row["code"] = text_of(arguments["code"] if arguments.keys() == {"code"} else arguments)
    if "attempts" not in call:
        return row | {"status": "not_run"}
    row |= {name: call[name] for name in ("queue_s", "run_s", "attempts", "exit_code", "started_s")}
    if call["failure"]:
        return row | {"status": "failure", "stderr": text_of(call["failure"]), "fault": str(Fault.INFRASTRUCTURE)}
    said = call["output"] if call["stdout"] is None else call["stdout"]
    fault = str(Fault.MODEL) if call["error"] else None
    texts = {"stdout": cut(text_of(said)), "stderr": cut(text_of(call["stderr"]))}
    return row | texts | {"status": call["error"] or "ok", "fault": fault}


def cut(text: str | None) -> str | None:
    """Return the part of an output that is kept: its two ends if it is longer than MAX_OUTPUT. It may be a MB."""
    if text is None or len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are not recorded]\n{text[-half:]}"


def _number(value: Any) -> float | None:
    """Return a reward manager's value as a number. Other values raise here, where they cost a group and not a file."""
    return None if value is None else float(value)


def _json(value: Row) -> str:
    """Return what `json.dumps` would, in a fifth of its time: every rollout has three of them."""
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, default=str)


def text_of(value: Any) -> str | None:
    """Return text as it is, and other values as JSON. Lone surrogates, which a model can write and no file of records
    takes, are spelled out."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return value if value is None else jsonl.dumps(value, default=str)
