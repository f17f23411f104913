"""Export a run for other programs: inspect_ai's log (`.eval`), and a step's time in Chrome's trace format."""

import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.json import encode  # encodes NaN and infinity as null

from verl_ext.outcome import RolloutEnd
from verl_ext.view.data import Run
from verl_ext.view.timeline import lanes


def write_eval(run: Run, keys: Sequence[str], out: Path) -> int:
    """Write rollouts as a log of inspect_ai, which `inspect view` opens, with a few in memory at a time.

    Source: the log format, version 2, of inspect_ai 0.3.285: a zip with header.json, summaries.json and a file for each
    sample. A group is a sample and its rollouts are the epochs; a rollout that was not judged has an error and no
    score. A log that lacks rollouts because a file of the run is damaged has the status "error".

    Returns:
        The number of rollouts.
    """
    accs, ids, number, epochs = [], {}, 0, 1
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file, tempfile.TemporaryFile() as summaries:
        for key in keys:
            for row in run.rows(key):
                sample = _sample(row, f"{key}/{row['uid']}")
                ids[sample["id"]] = None
                accs += [] if row["acc"] is None else [row["acc"]]
                summary = {name: sample[name] for name in ("id", "epoch", "target", "scores")}
                error = (sample["error"] or {}).get("message")
                summary |= {"completed": True, "input": sample["input"][:1000], "error": error}
                summaries.write((b"," if number else b"[") + encode(summary))
                number, epochs = number + 1, max(epochs, sample["epoch"])
                file.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", encode(sample))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        task = {
            "created": now, "task": run.name, "task_id": run.name, "run_id": run.name, "eval_id": run.name,
            "dataset": {"name": run.name, "samples": len(ids), "sample_ids": list(ids)}, "model": f"verl/{run.name}",
            "config": {"epochs": epochs},
        }  # fmt: skip
        mean = {"name": "mean", "value": sum(accs) / len(accs) if accs else 0.0}
        scores = {"name": "acc", "scorer": "acc", "scored_samples": len(accs), "metrics": {"mean": mean}}
        results = {"total_samples": number, "completed_samples": len(accs), "scores": [scores]}
        start = {"version": 2, "eval": task, "plan": {}}
        header = start | {"status": "success", "results": results, "stats": {"started_at": now, "completed_at": now}}
        if faults := [fault for _, fault in run.faults()]:
            header |= {"status": "error", "error": _error(" ".join(faults))}
        for name, content in (("_journal/start.json", start), ("header.json", header)):
            file.writestr(name, encode(content))
        summaries.write(b"]" if number else b"[]")
        summaries.seek(0)
        with file.open("summaries.json", "w", force_zip64=True) as target:
            shutil.copyfileobj(summaries, target)
    return number


def _sample(row: dict[str, Any], name: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"] or "", "source": "input"}]
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    for number, turn in enumerate(row["turns"] or []):
        if turn["role"] != "model":
            continue
        messages.append(said := {"role": "assistant", "content": turn["text"] or "", "tool_calls": []})
        for i, call in enumerate(row["calls"] or []):
            if call["turn"] == number:
                made = {"id": f"call_{i}", "function": call["tool"] or "not run", "type": "function"}
                said["tool_calls"].append(made | {"arguments": {"code": call["code"]}})
                answer = {"role": "tool", "tool_call_id": made["id"], "function": made["function"]}
                messages.append(answer | {"content": (call["stdout"] or "") + (call["stderr"] or "")})
    verdict, judged = row["verdict"] or {}, row["acc"] is not None
    score = {"value": row["acc"], "answer": verdict.get("extracted"), "explanation": verdict.get("text")}
    choice = {"message": said, "stop_reason": "max_tokens" if row["end_reason"] == RolloutEnd.MAX_TOKENS else "stop"}
    kept = "key step problem id domain score outcome outcome_why end_reason fault advantage".split()
    return {
        "id": name,
        "epoch": (row["session"] or 0) + 1,
        "input": row["prompt"] or "",
        "target": row["ground_truth"] or "",
        "messages": messages,
        "output": {"model": "policy", "choices": [choice], "completion": said["content"]},
        "scores": {"acc": score} if judged else {},
        "metadata": {name: row.get(name) for name in kept},
        "error": None if judged else _error(f"{row['end_reason']}: {row['exception'] or 'not judged'}"),
    }


def _error(message: str) -> dict[str, str]:
    return dict.fromkeys(("message", "traceback", "traceback_ansi"), message)


def trace(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a timeline for chrome://tracing and Perfetto: a thread for each row of a lane, times in microseconds.

    Source: Google's "Trace Event Format", complete events ("X") and the metadata of threads' names ("M").
    """
    start, events = min((row["start_s"] for row in rows), default=0.0), []
    threads = [(lane["name"], line) for lane in lanes(rows) for line in lane["rows"]]
    for thread, (name, line) in enumerate(threads, 1):
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}})
        for each in line:
            times = {"ts": (each["start_s"] - start) * 1e6, "dur": each["s"] * 1e6}
            args = {"uid": each["uid"], "session": each["session"]}
            events.append({"ph": "X", "pid": 1, "tid": thread, "name": each["what"], "args": args} | times)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
