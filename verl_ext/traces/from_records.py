"""Make traces of the records of a training or evaluation run. A response that did not end with an answer is none."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_ext.episode import Score
from verl_ext.outcome import UNVERIFIED_VERDICT, RolloutEnd
from verl_ext.protocols.trace import PROMPT_ROLES
from verl_ext.records import store
from verl_ext.runs.folder import files_of
from verl_ext.runs.parquet import Unreadable
from verl_ext.traces.trace import LeftOut, Reason, Trace, Unread

logger = logging.getLogger(__name__)

_UNFINISHED = {RolloutEnd.SANDBOX_FAILURE, RolloutEnd.ABORTED, RolloutEnd.RAISED}  # nobody's answer


def read_run(
    run: Path, steps: range | None = None, is_wanted: Callable[[Mapping[str, Any]], bool] = lambda row: True
) -> Iterator[Trace | Unread]:
    """Yield a trace for each response of a run's records that is wanted, or why it is none. Those that infrastructure
    ended are neither.

    Args:
        run: the folder of an RL run or an evaluation.
        steps: those to read; None: all.
        is_wanted: whether a row of the records counts at all.
    """
    for file in files_of(run):
        if steps is not None and file.step not in steps:
            continue
        try:
            for row in store.stream(file.path):
                if row["end_reason"] not in _UNFINISHED and is_wanted(row):
                    yield read_row(row, str(run))
        except Unreadable as error:
            logger.warning("%s The other files are read.", error)


def read_row(row: Mapping[str, Any], source: str) -> Trace | Unread:
    """Return a row of the records as a trace, or why it is none."""
    name = f"{row['uid']}_{row['session']} of step {row['step']}"
    try:
        return trace_of(row, name, source)
    except LeftOut as why:
        return Unread(name, source, why)


def trace_of(row: Mapping[str, Any], name: str, source: str) -> Trace:
    """Return a row of the records as a trace: what the model wrote, as it wrote it.

    Raises:
        LeftOut: it is no conversation that ends with an answer, or another project's loop has written it.
    """
    if row["opening"] is None:
        raise LeftOut(Reason.NOT_A_TRACE, "the records do not have what its prompt was made of")
    if row.get("agent"):
        raise LeftOut(Reason.NOT_A_TRACE, "an agent asked the model, and the records do not have the agent's messages")
    if row["end_reason"] not in (RolloutEnd.ANSWER, RolloutEnd.UNVERIFIED):
        raise LeftOut(Reason.NOT_A_TRACE, f"it did not end with an answer but by {row['end_reason']}")
    if refused := [call["status"] for call in row["calls"] if call["tool"] is None]:
        raise LeftOut(Reason.NOT_A_TRACE, f"it has a call that could not be run ({', '.join(refused)})")
    opening, task = json.loads(row["opening"]), json.loads(row["task"])
    roles = {message["role"] for message in opening["messages"]}
    if others := sorted(roles - set(PROMPT_ROLES)):
        raise LeftOut(Reason.NOT_A_TRACE, f"its prompt has messages of the roles {', '.join(others)}")
    messages = list(opening["messages"])
    for turn in row["turns"]:
        if turn["role"] == "model":
            messages.append({"role": "assistant", "content": turn["text"].removesuffix(turn["end"] or "")})
        else:
            messages += [{"role": turn["role"], "content": said} for said in turn["shown"] or ()]
    if messages[-1]["role"] != "assistant" or not row["turns"][-1]["end"]:
        raise LeftOut(Reason.NOT_A_TRACE, "its last turn is not complete")
    verdict = row["verdict"] or {}
    score = None
    if row["acc"] is not None and verdict.get("text") != UNVERIFIED_VERDICT:
        pred, method, normalised = (verdict.get(each) or "" for each in ("extracted", "rule", "normalised"))
        score = Score(row["acc"], pred, verdict.get("text") or "unknown", method, normalised)
    truth = {"ground_truth": task.pop("ground_truth", row["ground_truth"])}
    columns = {"data_source": row["domain"], "ability": row["ability"], "reward_model": truth, **task}
    about = {"step": row["step"], "score": row["score"], "acc": row["acc"], "problem": row["problem"]}
    about |= {"sampling": json.loads(row["sampling"] or "{}")}
    return Trace(name, source, messages, opening["tools"], columns, about, score)
