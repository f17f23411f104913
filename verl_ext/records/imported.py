"""Make records of verl's dumps, the JSON lines `<step>.jsonl` of `trainer.validation_data_dir` and `rollout_data_dir`.

A row has `input`, `output`, `gts`, `score`, `step` and `uid`; in a validation also what the reward manager reported.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, UNVERIFIED, Fault, RolloutEnd, rollout_end
from verl_ext.records import store
from verl_ext.records.blocks import BLOCK, ERROR, code_of
from verl_ext.records.problem import canonical
from verl_ext.records.trajectories import VERDICT_KEYS, text_of
from verl_ext.runs import jsonl

SURELY_WRONG = -0.6 + 1e-6  # a wrong answer's highest reward, with all of objectives/shaping.py's tool bonus
LACKS = (
    "A dump has no response mask and no calls: turns and calls are what stands between the protocols' tags, so a reply "
    "that the model forged looks real. It has no tokens, times, versions of weights or fates of prompts either."
)
OF_ROLLOUTS = (
    "Dumps of rollouts have only what was trained on, and the reward in place of `acc`: above 0 counts as right, up to "
    "-0.6 as wrong, and what is between as not judged. They do not name problems: these are not found in a data file."
)
_COLUMNS = ("input", "output", "gts", "step", "uid", "problem", "id", "error", "tool_use", "model_spans")


def import_dumps(dumps: Path, out: Path) -> str:
    """Write the records of a dump, or of a folder of dumps, into a run's folder `out`; return what was written.

    Raises:
        ValueError: there is no dump, a row is of another form, or `out` has records of a dump's step.
    """
    named = [path for path in dumps.glob("*.jsonl") if path.stem.isdecimal()]
    files = [dumps] if dumps.is_file() else sorted(named, key=lambda path: int(path.stem))
    if not files:
        raise ValueError(
            f"No dumps at {dumps}. Expected <step>.jsonl of trainer.validation_data_dir or rollout_data_dir."
        )
    number, validations = 0, 0
    for file in files:
        rows = _rows_of(file)
        validate = bool(rows) and rows[0]["validate"]
        path = store.path_of(out, "trajectories", rows[0]["step"] if rows else 0, validate=validate)
        if path.exists():
            raise ValueError(f"{path} exists. Import into another folder.")
        store.write(path, "trajectories", rows)
        number, validations = number + len(rows), validations + validate
    kinds = {"validations": validations, "steps of training": len(files) - validations}
    found = " and ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
    of_rollouts = [OF_ROLLOUTS] if validations < len(files) else []
    return "\n".join([f"{out}: {number:,} responses of {found}", LACKS, *of_rollouts])


def _rows_of(file: Path) -> list[dict[str, Any]]:
    """Return a dump's rows. Of an episode with several rows, and of several attempts at a row, the last counts."""
    last: dict[EpisodeKey, tuple[int, dict[str, Any]]] = {}
    order: dict[str, int] = {}
    sessions: Counter[str] = Counter()
    step = int(file.stem) if file.stem.isdecimal() else 0
    for row in jsonl.read(file, record_of, "a row of verl's dumps with input, output, gts and score"):
        key = _key_of(row["uid"]) if row["uid"] is not None else EpisodeKey(row["problem"], sessions[row["problem"]])
        sessions[row["problem"]] += 1
        row |= {"uid": key.uid, "session": key.session, "index": order.setdefault(key.uid, len(order))}
        row |= {"step": step if row["step"] is None else row["step"]}
        if key.episode not in last or key.row >= last[key.episode][0]:
            last[key.episode] = (key.row, row)
    return [row for _, row in last.values()]


def _key_of(uid: str) -> EpisodeKey:
    """Return the key that a dump has as `uid`; a text of another form is that of a prompt's only response."""
    try:
        return EpisodeKey.parse(uid)
    except ValueError:
        return EpisodeKey(uid, 0)


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a dump as a row of the records, except that `uid` is the dump's, and None if it has none.

    Raises:
        KeyError, TypeError, ValueError: it lacks a key, or has a value of the wrong kind.
    """
    row = {name: text_of(value) if isinstance(value, str) else value for name, value in row.items()}
    for name in ("input", "output"):
        if not isinstance(row[name], str):
            raise ValueError(f"{name} is {row[name]!r}, not a string")
    truth, score, validate = row["gts"], float(row["score"]), "acc" in row
    if validate:
        acc, end = row["acc"], rollout_end(row | {UNVERIFIED: row.get(UNVERIFIED) or row["acc"] is None})
    else:
        acc, end = 1.0 if score > 0 else 0.0 if score <= SURELY_WRONG else None, ""
    if acc is not None and not (isinstance(acc, int | float) and 0 <= acc <= 1):
        raise ValueError(f"acc is {acc!r}, not a number from 0 to 1 or null")
    judged = None if end in INFRASTRUCTURE_FAILURES else acc
    turns, calls = _turns_and_calls(row["output"])
    if "tool_calls" in row:
        _agree(turns, calls, *(int(row[name]) for name in ("tool_calls", "tool_errors", "tool_timeouts")))
    source, id_ = row.get("data_source") or "", row.get("id") or None
    content = json.dumps([source, id_, row["input"], canonical(truth)])
    return {
        "uid": row.get("uid"),
        "step": row.get("step"),
        "validate": validate,
        "problem": row.get("problem") or hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        "id": id_,
        "domain": source,
        "prompt": row["input"] or None,
        "ground_truth": None if truth is None else text_of(canonical(truth)),
        "turns": turns,
        "calls": calls,
        "end_reason": str(end) or None,
        "exception": str(row["error"]) if row.get("error") else None,
        "fault": str(RolloutEnd(end).fault) if end in list(RolloutEnd) else None,
        "score": None if judged is None else score,
        "acc": None if judged is None else float(judged),
        "reward_parts": json.dumps({name: row[name] for name in row if name not in _COLUMNS}, default=str),
        "verdict": {name: row.get(key) or None for name, key in VERDICT_KEYS},
        "trained_step": None if validate else row.get("step"),
        "model_tokens": min(int(row["response_tokens"]), 2**31 - 1) if "response_tokens" in row else None,
    }


def _turns_and_calls(output: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    turns: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    codes, start = [], 0
    for block in [*BLOCK.finditer(output), None]:
        if block and (code := code_of(block)) is not None:
            codes.append(text_of(code))
            continue
        text = output[start : block.start() if block else None]
        # A dump has no end tokens, so a last turn of nothing else is empty. Between two replies there is no turn.
        is_last = block is None and (not turns or (text and turns[-1]["role"] == "tool"))
        if text.strip() or is_last:
            calls += [{"turn": len(turns), "code": code, "status": "not_run"} for code in codes]
            turns.append({"role": "model", "text": text})
        if block:
            said = block[block.lastgroup].strip("\n")
            turns.append({"role": "tool", "text": block[0]})
            if (first := next((call for call in calls if "stdout" not in call), None)) is not None:
                first |= {"tool": "tool", "stdout": said, "attempts": 1} | _end(bool(ERROR.search(said)))
            codes, start = [], block.end()
    return turns, calls


def _agree(turns: list[dict], calls: list[dict], number: int, errors: int, timeouts: int) -> None:
    """Make as many calls ran, failed and timed out as the reward manager counted; first those whose reply says so."""
    ran = [call for call in calls if "attempts" in call]
    for call in ran[number:]:
        call |= {"attempts": None, "status": "not_run", "fault": None}
    more = [{"turn": max(len(turns) - 1, 0), "tool": "tool", "attempts": 1} for _ in range(number - len(ran))]
    calls += more
    ran = sorted([*ran[:number], *more], key=lambda call: not ERROR.search(call.get("stdout") or ""))
    for place, call in enumerate(ran):
        call |= _end(place < errors, "timeout" if place < timeouts else "error")


def _end(failed: bool, status: str = "error") -> dict[str, str | None]:
    return {"status": status if failed else "ok", "fault": str(Fault.MODEL) if failed else None}
