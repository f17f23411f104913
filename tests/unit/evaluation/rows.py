"""Rows and folders as `python -m verl_ext.evaluation` writes them."""

import json
from pathlib import Path
from typing import Any

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


def row(problem: str, number: int, acc: int, **changes: Any) -> dict[str, Any]:
    return {
        "input": f"user\n{problem}\nassistant\n",
        "output": "\\boxed{7}",
        "problem": problem,
        "gts": "7",
        "score": 2.0 * acc - 1,
        "acc": None if changes.get("failure") else float(acc),
        "pred": "7" if acc else "5",
        "data_source": "mine",
        "finish_reason": "answer",
        "tool_calls": 2.0,
        "tool_errors": 1.0,
        "tool_timeouts": 0.0,
        "model_turns": 2.0,
        "response_tokens": 20.0,
        "truncated": 0.0,
        "unverified": 0.0,
        "sandbox_failure": 0.0,
        "failure": None,
        "uid": f"mine:{problem}_{number}_0",
        "tool_use": TOOL_USE,
        "model_spans": [[0, 10], [15, 25]],
    } | changes


def evaluation(folder: Path, rows: list[dict], *, wanted: int | None = None, **settings: Any) -> Path:
    """The folder of an evaluation with these samples."""
    folder.mkdir(exist_ok=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    about = {"title": "Evaluation of x", "server": "http://127.0.0.1:1/v1", "samples": wanted or len(rows)}
    about["settings"] = {"n": 2, "temperature": 1.0} | settings
    (folder / "settings.json").write_text(json.dumps(about))
    return folder
