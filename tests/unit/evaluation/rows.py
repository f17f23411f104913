"""Rows of records as evaluations and validations have them, and their folders."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_ext.outcome import INFRASTRUCTURE_FAILURES
from verl_ext.records import store

TOOL_USE = {
    "ok": 1,
    "errors": {"NameError": 1},
    "malformed": {},
    "fixed": 0,
    "json_repairs": 0,
    "outputs_cut": 0,
    "void_turns": 0,
    "code_lines": 2,
    "first_call_token": 2,
    "generate_s": 1.0,
    "tool_s": 1.0,
    "queue_s": 0.0,
    "run_s": 0.5,
}


def row(
    problem: str, number: int, acc: float | None, /, *, pred: str | None = None, normalised: str | None = None,
    calls: int = 2, errors: int = 1, timeouts: int = 0, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a response in two turns of ten tokens with five of a tool's between them.

    Args:
        pred, normalised: its answer.
        calls, errors, timeouts: how many ran, failed, and failed by running too long.
        changes: columns.
    """
    ends = ["timeout"] * timeouts + ["NameError"] * (errors - timeouts) + ["ok"] * (calls - errors)
    failed = changes.get("end_reason") in INFRASTRUCTURE_FAILURES or acc is None
    return {
        "uid": f"mine:{problem}",
        "session": number,
        "validate": True,
        "problem": problem,
        "domain": "mine",
        "prompt": f"user\n{problem}\nassistant\n",
        "ground_truth": "7",
        "turns": [
            {"role": "model", "text": "<code>print(7)</code>", "tokens": 10, "start": 0},
            {"role": "tool", "text": "<interpreter>7</interpreter>", "tokens": 5, "start": 10},
            {"role": "model", "text": "\\boxed{7}", "tokens": 10, "start": 15},
        ],
        "calls": [
            {"turn": 0, "tool": "python", "code": "print(7)", "status": end, "attempts": 1}
            | {"fault": None if end == "ok" else "model", "stdout": "7"}
            for end in ends
        ],
        "end_reason": "answer",
        "acc": None if failed else float(acc),
        "score": None if failed else 2.0 * acc - 1,
        "verdict": {"extracted": pred or ("7" if acc else "5"), "normalised": normalised},
        "model_tokens": 20,
        "tool_use": json.dumps(TOOL_USE),
    } | changes


def response(text: str, answer: str = "") -> dict[str, Any]:
    """Return the columns of a response in the `<code>` protocol, with one call if it has one."""
    code, _, rest = text.removeprefix("<code>").partition("</code>")
    output, tag, last = rest.partition("</interpreter>")
    if not tag:
        return {"turns": [{"role": "model", "text": text}], "calls": [], "verdict": {"extracted": answer}}
    texts = (("model", f"<code>{code}</code>"), ("tool", output + tag), ("model", last))
    call = {"turn": 0, "tool": "python", "code": code, "status": "ok", "attempts": 1}
    turns = [{"role": role, "text": each} for role, each in texts if each]
    return {"turns": turns, "calls": [call], "verdict": {"extracted": answer}}


def write(folder: Path, rows: Iterable[dict[str, Any]], step: int = 0, **kind: bool) -> Path:
    """Write the records of a validation or evaluation into a run's folder; return the file."""
    path = store.path_of(folder, "trajectories", step, validate=True, **kind)
    store.write(path, "trajectories", rows)
    return path


def evaluation(folder: Path, rows: list[dict], *, wanted: int | None = None, **settings: Any) -> Path:
    """The folder of an evaluation with these samples."""
    write(folder, rows)
    about = {"title": "Evaluation of x", "server": "http://127.0.0.1:1/v1", "samples": wanted or len(rows)}
    about["settings"] = {"n": 2, "temperature": 1.0} | settings
    (folder / "settings.json").write_text(json.dumps(about))
    return folder
