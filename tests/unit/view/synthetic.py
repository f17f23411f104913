"""Runs that no model wrote, from a seed with which s2-p1 has right and wrong samples, with calls: metrics and
records of verl_ext/records/schema.py, for the viewer.

Every number can be computed again from others: advantage = (score - mean) / sample std of the group, ratio =
exp(log_prob - old_log_prob), decision by the clip range [0.8, 1.28].
"""

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from verl_ext.records import store

CODES = (
    "total = 0\nfor i in range({a}):\n    total += i\nprint(total)",
    "assert {a} + {b} == {c}\nprint('ok', {c})",
    "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x - {c}, x))",
    "print({a} + {b})",
)
WORDS = [
    a + b + c for a in ("ba", "do", "ki", "lu", "me") for b in ("n", "r", "s", "t") for c in ("a", "o", "ing", "ed")
]
START_S = 1_790_000_000.0  # unix time of step 0
STEP_S = 60.0


def write_run(
    folder: Path, *, seed: int = 144, steps: int = 4, prompts: int = 5, samples: int = 4, words: int = 20,
    last_token_share: float = 1.0,
) -> Path:  # fmt: skip
    """A run of `steps` steps with a validation after the last; `words`: of text in a response, about its tokens.

    last_token_share: share of the steps, from the last back, that have token files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(1, steps + 1):
        tokens = step > steps * (1 - last_token_share)
        write_step(folder, step, seed=seed, prompts=prompts, samples=samples, words=words, tokens=tokens)
    write_step(folder, steps, seed=seed, prompts=prompts, samples=samples, words=words, validate=True)
    return folder


def write_step(
    folder: Path, step: int, *, seed: int = 144, prompts: int = 5, samples: int = 4, words: int = 20,
    validate: bool = False, tokens: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    rng = random.Random(f"{seed} {step} {validate}")
    rows = [row for p in range(prompts) for row in _group(rng, step, p, samples, words, validate)]
    store.write(store.path_of(folder, "trajectories", step, validate=validate), "trajectories", rows)
    if not validate:
        if tokens:
            chosen = [row for row in rows if row["outcome"] == "trained"]
            lines = [line for row in chosen for line in _tokens(rng, row)]
            store.write(store.path_of(folder, "tokens", step), "tokens", lines)
        store.write(store.path_of(folder, "timeline", step), "timeline", _timeline(step, rows))
        judged = [row for row in rows if row["acc"] is not None]
        metrics = {
            "train/acc": statistics.fmean(row["acc"] for row in judged),
            "critic/score/mean": statistics.fmean(row["score"] for row in judged),
            "tool/code_ratio": statistics.fmean(bool(row["calls"]) for row in judged),
            "actor/entropy": 0.5 * 0.7**step,
            "response_length/mean": statistics.fmean(row["response_tokens"] for row in rows),
            "timing_s/step": STEP_S - 1,
        } | {f"actor/other_{number}": rng.random() for number in range(124)}  # verl logs so many
        with (folder / "metrics-1790000000.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": metrics}) + "\n")
    return rows


def _group(rng: random.Random, step: int, p: int, samples: int, words: int, validate: bool) -> list[dict[str, Any]]:
    a, b = 10 + p, 100 + 7 * p
    right, group = str(a + b), []
    chance = 1.0 if p == 0 else min(0.9, 0.3 + 0.02 * step)  # of the first problem all samples are right
    for session in range(samples):
        failed = p == 1 and session == samples - 1
        answer = right if rng.random() < chance else str(a + b + rng.randint(1, 2))
        call, turns, calls = None, [], []
        text = " ".join(rng.choices(WORDS, k=words))
        if rng.random() < 0.7 or failed:
            code = CODES[rng.randrange(4)].format(a=a, b=b, c=answer)
            wrong = rng.random() < 0.2
            call = dict(
                turn=0, tool="python", code=code + ("\nprint(y)" if wrong else ""), stdout=f"{answer}\n",
                stderr="Traceback (most recent call last):\nNameError: name 'y' is not defined\n" if wrong else "",
                status="failure" if failed else "NameError" if wrong else "ok",
                fault="infrastructure" if failed else "model" if wrong else None, exit_code=int(wrong),
                queue_s=0.75 if failed else 0.25, run_s=0.0 if failed else 0.125 * (1 + session),
                attempts=3 if failed else 1,
                started_s=START_S + step * STEP_S + 2,
            )  # fmt: skip
            calls.append(call)
            turns.append(_turn("model", f"{text}\n<code>\n{call['code']}\n</code>", turns, call=0))
            turns.append(_turn("tool", f"\n<interpreter>\n{call['stdout']}\n</interpreter>\n", turns, call=0))
        turns.append(_turn("model", f"{text} Hence \\boxed{{{answer}}}", turns))
        total = turns[-1]["start"] + turns[-1]["tokens"]
        acc = None if failed else float(answer == right)
        started = START_S + step * STEP_S
        first = next(turn for turn in turns if turn["role"] == "model")
        server = f"127.0.0.1:{9000 + session % 2}"
        first |= dict(server=server, started_s=started, generate_s=2.0)
        resumed = call["started_s"] + call["queue_s"] + call["run_s"] if call else started
        turns[-1] |= dict(server=server, started_s=resumed, generate_s=started + 12 + session - 0.1 - resumed)
        group.append(dict(
            uid=f"{'v' if validate else 's'}{step}-p{p}", session=session, step=step, validate=validate, index=p,
            problem=f"p{p}", id=f"sum/{p}", domain="sums" if p % 2 else "adds", prompt=f"What is {a} + {b}?",
            ground_truth=right, turns=turns, calls=calls,
            version_spans=[dict(start=0, end=total, version=max(0, step - 1 - session % 2))],
            end_reason="sandbox_failure" if failed else "answer",
            exception="ConnectError: no sandbox" if failed else None,
            fault="infrastructure" if failed else "none", score=None if failed else 2 * acc - 1, acc=acc,
            reward_parts=json.dumps({} if failed else {"reward_answer": 2 * acc - 1, "tool_bonus": 0.0}),
            verdict=dict(extracted=answer, normalised=answer, rule="number", text="equal" if acc else "differs"),
            response_tokens=total, model_tokens=sum(turn["tokens"] for turn in turns if turn["role"] == "model"),
            tool_use=json.dumps({"first_call_token": words if calls else None}),
            timings=dict(queue_s=0.5, generate_s=10.0 + session, tool_s=0.5, score_s=0.1, started_s=started,
                         ended_s=started + 12 + session),
        ))  # fmt: skip
    scores = [row["score"] for row in group if row["score"] is not None]
    mean, std = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0
    for row in group:
        kept = std > 0 and row["score"] is not None and not validate
        why = None if std > 0 else f"all {len(scores)} judged samples have the score {mean:g}"
        row["outcome"] = None if validate else "trained" if std > 0 else "equal"  # as the recorder writes them
        row["outcome_why"] = None if validate else why
        row["trained_step"] = step if kept else None
        row["advantage"] = (row["score"] - mean) / std if kept else None
    return group


def _turn(role: str, text: str, before: list[dict[str, Any]], call: int | None = None) -> dict[str, Any]:
    start = before[-1]["start"] + before[-1]["tokens"] if before else 0
    return dict(role=role, text=text, tokens=len(_pieces(text)), start=start, call=call)


def _pieces(text: str) -> list[str]:
    pieces = text.split(" ")
    return [piece + " " for piece in pieces[:-1]] + pieces[-1:]


def _tokens(rng: random.Random, row: dict[str, Any]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for number, turn in enumerate(row["turns"]):
        for text in _pieces(turn["text"]):
            by_model = turn["role"] == "model"
            log_prob, drift = -rng.expovariate(2), rng.gauss(0, 0.2)
            ratio = math.exp(drift)
            clipped = "clipped_high" if ratio > 1.28 and (row["advantage"] or 0) > 0 else (
                "clipped_low" if ratio < 0.8 and (row["advantage"] or 0) < 0 else "kept")  # fmt: skip
            known = by_model and row["advantage"] is not None
            lines.append(dict(
                uid=row["uid"], session=row["session"], step=row["step"], position=len(lines),
                id=rng.randrange(1000), text=text, mask=known, turn=number,
                version=row["version_spans"][0]["version"] if by_model else None,
                rollout_log_prob=log_prob if by_model else 0.0, old_log_prob=log_prob if by_model else None,
                log_prob=log_prob + drift if by_model else None, ratio=ratio if by_model else None,
                advantage=row["advantage"], decision=clipped if known else "masked",
            ))  # fmt: skip
    return lines


def _timeline(step: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    start, lines = START_S + step * STEP_S, []
    end = max(row["timings"]["ended_s"] for row in rows)
    for what, seconds in (("wait", end - start), ("log_probs", 3), ("update", 8), ("weight_sync", 2)):
        lines.append(dict(step=step, what=what, start_s=start, end_s=start + seconds))
        start += seconds
    return lines


def intervals(folder: Path, step: int) -> list[dict[str, Any]]:
    """All that a step's timeline has to show, from the records."""
    of_trainer = store.read(store.path_of(folder, "timeline", step)).to_pylist()
    lines = [dict(lane="trainer", uid=None, session=None) | row for row in of_trainer]
    for row in store.read(store.path_of(folder, "trajectories", step)).to_pylist():
        key, times = dict(uid=row["uid"], session=row["session"]), row["timings"]
        for turn in row["turns"]:
            if turn["role"] == "model":
                begin, end = turn["started_s"], turn["started_s"] + turn["generate_s"]
                lines.append(dict(key, lane=turn["server"], what="generate", start_s=begin, end_s=end))
        for call in row["calls"]:
            begin, begun = call["started_s"], call["started_s"] + call["queue_s"]
            lines.append(dict(key, lane="tool", what="tool_queue", start_s=begin, end_s=begun))
            lines.append(dict(key, lane="tool", what="tool", start_s=begun, end_s=begun + call["run_s"]))
        begin, end = times["ended_s"] - times["score_s"], times["ended_s"]
        lines.append(dict(key, lane="score", what="score", start_s=begin, end_s=end))
    return lines
