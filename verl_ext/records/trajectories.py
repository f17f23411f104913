"""An episode as a row of the records (schema.TRAJECTORIES): `problem_columns` of its group and `to_record`.

An agent-loop worker (rollout/workers.py) makes them when a group has ended. The recorder adds the prompt's fate.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, overload

import msgspec

from verl_ext.episode import MAX_EVIDENCE, CallResult, Episode, Reply, Reward, Turn, TurnCall
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, Fault, RolloutEnd
from verl_ext.records.problem import canonical, id_of, problem_of
from verl_ext.runs import jsonl

Row = Mapping[str, Any]
MAX_OUTPUT = 2**15  # characters kept of a call's stdout, and as many of its stderr; the model sees fewer


def problem_columns(sample: Row, *, validate: bool) -> dict[str, Any]:
    """Return the columns that a group's rollouts share; `sample`: the data set's row, with `uid` and `global_steps`."""
    index = sample.get("index")
    index = index.item() if index is not None and hasattr(index, "item") else index
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
        "task": _task(sample),
    }


def _task(sample: Row) -> str:
    """Return `extra_info` and `tools_kwargs` of the row, and its ground truth if that is no text, as JSON."""
    reward, kwargs = sample.get("reward_model") or {}, sample.get("tools_kwargs")
    found = {"extra_info": sample.get("extra_info")} | ({"tools_kwargs": kwargs} if kwargs else {})
    if not isinstance(reward.get("ground_truth"), str | None):
        found["ground_truth"] = reward["ground_truth"]
    return text_of(canonical(found))


def to_record(episode: Episode) -> dict[str, Any]:
    """Return what is known of an episode when it has ended, or raised."""
    reward, end, use = episode.reward or Reward(None), episode.end, episode.use
    info, is_judged = reward.info, end not in INFRASTRUCTURE_FAILURES
    times = {"score_s": episode.score_s, "started_s": episode.started_s, "ended_s": episode.ended_s}
    if end == RolloutEnd.RAISED:
        known = {"session": episode.key.session, "exception": text_of(episode.exception), "timings": times}
        return known | {"end_reason": str(end), "fault": str(RolloutEnd.RAISED.fault)}
    turns, calls = _turns_and_calls(episode.turns)
    if use:
        times |= {name: getattr(use, name) for name in ("queue_s", "generate_s", "tool_s")}
    return {
        "session": episode.key.session,
        "prompt": episode.prompt,
        "opening": text_of(_json(episode.opening)) if episode.opening else None,
        "protocol": episode.protocol,
        "turns": turns,
        "calls": calls,
        "version_spans": [
            {"start": start, "end": end, "version": version, "row": number}
            for number, row in enumerate(episode.rows)
            for start, end, version in row.version_spans
        ],
        "end_reason": str(end),
        "exception": _exception(episode, calls),
        "fault": str(_ENDS[end].fault) if end in _ENDS else None,
        "score": _number(reward.score) if is_judged else None,
        "acc": _number(info.get("acc")) if is_judged else None,
        "reward_parts": _json(info),
        "verdict": {name: text_of(info.get(key) or None) for name, key in VERDICT_KEYS},
        "response_tokens": sum(turn["tokens"] for turn in turns),
        "model_tokens": sum(turn["tokens"] for turn in turns if turn["role"] == "model"),
        "timings": times,
        "sampling": _json(episode.sampling),
        "tool_use": _json(vars(use) if use else {}),
        "evidence": _base64(episode.score.evidence) if episode.score else None,
        "agent": _json(vars(episode.agent)) if episode.agent else None,
    }


def _exception(episode: Episode, calls: Sequence[Row]) -> str | None:
    """Return the infrastructure's message about its failure."""
    if episode.exception is not None:
        return text_of(episode.exception)
    if episode.end == RolloutEnd.UNVERIFIED and episode.reward:
        return text_of(episode.reward.info.get("verdict") or None)
    if episode.end == RolloutEnd.ABORTED and episode.lost_servers:
        return text_of(f"no answer of {', '.join(episode.lost_servers)}")
    return next((call["stderr"] for call in calls if call["fault"] == Fault.INFRASTRUCTURE), None)


_ENDS = {str(end): end for end in RolloutEnd}
_encode = msgspec.json.Encoder(enc_hook=lambda value: value.item() if hasattr(value, "item") else str(value)).encode
VERDICT_KEYS = (("extracted", "pred"), ("normalised", "normalised"), ("rule", "method"), ("text", "verdict"))


def scored_text(turns: Sequence[Mapping[str, Any]]) -> str:
    """Return what training scored of the turns of a record: the model's own of the last row, without end tokens."""
    own = [turn for turn in turns if turn["role"] == "model"]
    last = max((turn.get("row") or 0 for turn in own), default=0)
    return "\n".join(turn["text"].removesuffix(turn["end"] or "") for turn in own if (turn.get("row") or 0) == last)


_OF_TURN = ("text", "end", "tokens", "start", "server", "started_s", "generate_s", "row", "fork")


def _turns_and_calls(turns: Sequence[Turn]) -> tuple[list[dict], list[dict]]:
    rows: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    places: list[int] = []  # of each of the model's turns among the rows
    for turn in turns:
        first = len(calls) if turn.calls else None
        calls += [_call(call, len(rows)) for call in turn.calls]
        parent = turn.parent if turn.parent is None or turn.parent < 0 else places[turn.parent]
        places.append(len(rows))
        noted = {"role": "model", "call": first, "parent": parent}
        rows.append(noted | {name: getattr(turn, name) for name in _OF_TURN})
        if turn.reply and turn.reply.tokens:
            rows.append({"call": first, "row": turn.row, **vars(turn.reply)})
    return rows, calls


def _call(call: TurnCall, turn: int) -> dict[str, Any]:
    row = {"turn": turn, "tool": call.tool, "code": None, "stdout": None, "stderr": None, "fault": None}
    result = call.result
    if call.malformed and result:
        said = text_of(result.output)
        return row | {"status": f"malformed:{call.malformed}", "stdout": said, "fault": str(Fault.MODEL)}
    arguments = call.arguments
    row["code"] = text_of(arguments["code"] if arguments.keys() == {"code"} else arguments)
    if result is None:
        return row | {"status": "not_run"}
    row |= {name: getattr(result, name) for name in ("run_s", "attempts", "exit_code")}
    row |= {"queue_s": call.queue_s, "started_s": call.started_s}
    if result.failure:
        return row | {"status": "failure", "stderr": text_of(result.failure), "fault": str(Fault.INFRASTRUCTURE)}
    said = result.output if result.stdout is None else result.stdout
    fault = str(Fault.MODEL) if result.error else None
    texts = {"stdout": cut(text_of(said)), "stderr": cut(text_of(result.stderr))}
    return row | texts | {"status": result.error or "ok", "fault": fault}


def turns_of(row: Row) -> list[Turn]:
    """Return the turns of a record as the episode had them, except for what it lacks: the middle of a long output, and
    replays. A program that is a JSON object is taken for the arguments of another tool."""
    turns: list[Turn] = []
    places: dict[int, int] = {}  # place among the record's turns -> that in `turns`
    for place, each in enumerate(row["turns"]):
        if each["role"] != "model":
            said = {name: each.get(name) for name in ("text", "tokens", "start", "role")}
            turns[-1].reply = Reply(**said, shown=each.get("shown") or [])
            continue
        known = {name: each.get(name) for name in _OF_TURN}
        parent = places.get(each.get("parent"), each.get("parent"))
        places[place] = len(turns)
        turns.append(Turn(**known | {"end": each.get("end") or "", "row": each.get("row") or 0}, parent=parent))
    for call in row["calls"]:
        turn = turns[places[call["turn"]]]
        shown = turn.reply.shown if turn.reply and turn.reply.role == "tool" else []
        turn.calls.append(_call_of(call, shown[len(turn.calls)] if len(turn.calls) < len(shown) else None))
    return turns


def _call_of(row: Row, shown: str | None) -> TurnCall:
    """Return a call of a record; `shown` is what the model read of it."""
    status, stdout, stderr = row["status"], row.get("stdout"), row.get("stderr")
    if status.startswith("malformed:"):
        kind = status.removeprefix("malformed:")
        return TurnCall(row["tool"], malformed=kind, result=CallResult(stdout or "", kind))
    try:
        arguments = json.loads(row["code"] or "")
    except (ValueError, RecursionError):  # a program, whatever the model wrote
        arguments = None
    arguments = arguments if isinstance(arguments, dict) else {"code": row["code"]}
    if status == "not_run":
        return TurnCall(row["tool"], arguments)
    noted = {name: row[name] for name in ("run_s", "attempts", "exit_code") if row.get(name) is not None}
    if row["fault"] == Fault.INFRASTRUCTURE:
        result = CallResult("", failure=stderr, **noted)
    else:
        is_program = stderr is not None  # another tool's output is all in `stdout`
        said = (stdout or "") + (stderr or "") if shown is None else shown
        noted |= {"stdout": stdout, "stderr": stderr} if is_program else {}
        result = CallResult(said, None if status == "ok" else status, **noted)
    return TurnCall(row["tool"], arguments, None, result, row.get("started_s"), row.get("queue_s") or 0.0)


def cut(text: str | None) -> str | None:
    """Return the part of an output that is kept: its two ends if it is longer than MAX_OUTPUT. It may be a MB."""
    if text is None or len(text) <= MAX_OUTPUT:
        return text
    half = MAX_OUTPUT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are not recorded]\n{text[-half:]}"


def _base64(evidence: bytes) -> str | None:
    return base64.b64encode(evidence).decode() if 0 < len(evidence) <= MAX_EVIDENCE else None


def _number(value: Any) -> float | None:
    """Return a reward manager's value as a number. Other values raise here, where they cost a group and not a file."""
    return None if value is None else float(value)


def _json(value: Row) -> str:
    """Return what `json.dumps` would, in a fifth of its time: every rollout has three of them."""
    try:
        return _encode(value).decode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, default=str)


@overload
def text_of(value: None) -> None: ...
@overload
def text_of(value: object) -> str: ...
def text_of(value: Any) -> str | None:
    """Return text as it is, and other values as JSON. Lone surrogates, which a model can write and no file of records
    takes, are spelled out."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return value if value is None else jsonl.dumps(value, default=str)
