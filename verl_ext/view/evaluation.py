"""Make records for the pages from an evaluation's folder: `samples.jsonl`, or verl's dumps `<step>.jsonl`.

A dump has a response as one text. Turns and calls are the text between the protocols' tags (evaluation/blocks.py).
"""

import json
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.evaluation.blocks import BLOCK, ERROR, code_of
from verl_ext.evaluation.samples import key_of, sample_of_dump
from verl_ext.outcome import Fault, RolloutEnd
from verl_ext.records import store
from verl_ext.records.problem import canonical
from verl_ext.records.trajectories import text_of
from verl_ext.runs import jsonl
from verl_ext.runs.folder import SAMPLES, sample_files

_FAULTS = {str(end): str(end.fault) for end in RolloutEnd}


class Evaluation:
    """Records of an evaluation in a temporary folder, which goes with this process; the evaluation's is only read.

    Attributes:
        folder: has the records, in the layout of a run's folder.
    """

    def __init__(self, source: Path):
        self._source, self._temporary = source, tempfile.TemporaryDirectory(prefix="retool_view_")
        self.folder = Path(self._temporary.name)
        self._seen: dict[Path, tuple[int, int]] = {}
        self._faults: dict[Path, str] = {}
        self._refreshing = threading.Lock()

    @property
    def files(self) -> list[Path]:
        return sample_files(self._source)

    @property
    def faults(self) -> list[str]:
        """Return what is wrong with each file that cannot be read."""
        return list(self._faults.values())

    def refresh(self) -> None:
        """Make the records of files that are new or have grown; one of several requests at once does it."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        for path in self.files:
            found = path.stat()
            state = found.st_mtime_ns, found.st_size
            if self._seen.get(path) == state:
                continue
            self._faults.pop(path, None)
            step = 0 if path.name == SAMPLES else int(path.stem)
            rows: dict[tuple[str, int], dict[str, Any]] = {}  # the last of several attempts at a sample counts
            try:
                for row in jsonl.read(path, record_of, "a sample of an evaluation, or a row of verl's validation dump"):
                    rows[row["uid"], row["session"]] = row | {"step": step}
            except (jsonl.OtherForm, OSError) as error:
                self._faults[path] = f"{path} is shown up to where it cannot be read: {error}"
            order = {uid: number for number, uid in enumerate(dict.fromkeys(uid for uid, _ in rows))}
            numbered = [row | {"index": order[uid]} for (uid, _), row in rows.items()]
            store.write(store.path_of(self.folder, "trajectories", step, validate=True), "trajectories", numbered)
            self._seen[path] = state


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as a row of the records.

    Raises:
        ValueError: it lacks a key, or has a value of the wrong kind.
    """
    row = {name: text_of(value) if isinstance(value, str) else value for name, value in row.items()}
    sample = sample_of_dump(row)
    key = key_of(sample.uid)
    turns, calls = _turns_and_calls(sample.output, all_ran_well=not sample.tool_errors)
    end = sample.failure if sample.failure and sample.finish_reason not in _FAULTS else sample.finish_reason
    parts_of_reward = {name: value for name, value in row.items() if name.startswith("reward_")}
    return {
        "uid": key.uid,
        "session": key.session,
        "validate": True,
        "problem": sample.problem or None,
        "id": sample.id or None,
        "domain": sample.data_source,
        "prompt": sample.input or None,
        "ground_truth": canonical(sample.gts),
        "turns": turns,
        "calls": calls,
        "end_reason": end,
        "exception": str(row["error"]) if row.get("error") else None,
        "fault": _FAULTS.get(end, str(Fault.INFRASTRUCTURE) if sample.failure else None),
        "score": None if sample.failure else sample.score,
        "acc": None if sample.failure else sample.acc,
        "reward_parts": json.dumps(parts_of_reward, default=str),
        "verdict": {"extracted": sample.pred, "normalised": sample.normalised or None}
        | {name: str(row[key]) for name, key in (("rule", "method"), ("text", "verdict")) if row.get(key)},
        "model_tokens": min(int(sample.response_tokens), 2**31 - 1),
        "tool_use": json.dumps(row.get("tool_use") or {}, default=str),
    }


def _turns_and_calls(output: str, *, all_ran_well: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    turns: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    codes, start = [], 0
    for block in [*BLOCK.finditer(output), None]:
        if block and (code := code_of(block)) is not None:
            codes.append(text_of(code))
            continue
        text = output[start : block.start() if block else None]
        if text.strip():  # else the reply answers another call of the previous model turn
            calls += [{"turn": len(turns), "code": code, "status": "not_run"} for code in codes]
            turns.append({"role": "model", "text": text})
        if block:
            said = block[block.lastgroup].strip("\n")
            turns.append({"role": "tool", "text": block[0]})
            failed = not all_ran_well and ERROR.search(said) is not None
            if (first := next((call for call in calls if "stdout" not in call), None)) is not None:
                first |= {"tool": "tool", "stdout": said, "attempts": 1, "status": "error" if failed else "ok"}
                first |= {"fault": str(Fault.MODEL)} if failed else {}
            codes, start = [], block.end()
    return turns, calls
