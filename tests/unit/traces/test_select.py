"""What is kept of several traces of one problem, and of several sources."""

import json
from collections import Counter
from typing import Any

import pytest

from verl_ext.runs import jsonl

QUESTION = "Tom has 3 boxes with 4 pens each and gets 5 more. How many pens?"


def trace(name: str, code: str | None, said: str = "17", question: str = QUESTION, **columns: Any) -> dict:
    """A trace whose gold is 17; `code` prints `said`."""
    messages = [{"role": "user", "content": question}]
    if code is not None:
        called = [{"role": "assistant", "content": f"<code>{code}</code>"}, {"role": "interpreter", "content": said}]
        messages += called
    messages.append({"role": "assistant", "content": f"\\boxed{{{said}}}"})
    row = {"id": name, "messages": messages, "data_source": "tiny_tools", "reward_model": {"ground_truth": "17"}}
    return row | columns


def test_the_same_and_nearly_the_same_are_kept_once(check):
    long = "\n".join(f"value_{i} = {i} * {i} + 17" for i in range(40))
    rows = [
        trace("first", "print(3*4+5)"),
        trace("same", "print(3*4+5)"),
        trace("other code", "print(5+3*4)"),
        trace("long", f"{long}\nprint(17)"),
        trace("nearly", f"{long}\nprint(17)  # so"),
        trace("other problem", "print(3*4+5)", question=QUESTION.replace("Tom", "Ann")),
    ]
    kept, left, _ = check(rows)
    assert [row["id"] for row in kept] == ["first", "other code", "long", "other problem"]
    assert [(line["id"], line["reason"]) for line in left] == [("same", "duplicate"), ("nearly", "near_duplicate")]


@pytest.mark.parametrize(
    ("choose", "kept"), [("shortest", ["a", "b"]), ("varied", ["a", "loop"]), ("random", ["c", "loop"])]
)
def test_of_many_traces_of_a_problem_few_are_kept(choose, kept, check):
    loop = "total = 5\nfor box in range(3):\n    total += 4\nprint(total)"
    rows = [
        trace("b", "print(3*4 +5+0)"),
        trace("a", "print(3*4+5)"),
        trace("loop", loop),
        trace("c", "print(4*3+5+0+0)"),
    ]
    found, left, _ = check(rows, "--per-problem", "2", "--choose", choose, "--seed", "1")
    assert sorted(row["id"] for row in found) == kept
    assert {line["reason"] for line in left} == {"too_many"}
    again, *_ = check(rows, "--per-problem", "2", "--choose", choose, "--seed", "1")
    assert again == found


def test_a_problem_whose_gold_few_samples_reach_is_not_kept(check, tmp_path):
    sums = {"right": [17, 17, 12], "lucky": [17, 12, 12, 12], "split": [17, 11, 12, 13]}
    rows = []
    for question, answers in sums.items():
        for number, answer in enumerate(answers):
            code = f"print({answer - number - 1}+{number + 1})"
            rows.append(trace(f"{question} {number}", code, str(answer), question=f"{question}: {QUESTION}"))
    kept, left, _ = check(rows, "--agree", "2")
    assert [row["id"] for row in kept] == ["right 0", "right 1"]
    assert Counter(line["reason"] for line in left) == {"wrong_answer": 7, "disagreement": 2}
    (line,) = jsonl.read(tmp_path / "out" / "kept.disagree.jsonl")
    assert line["problem"].startswith("lucky") and (line["ground_truth"], line["most"]) == ("17", "12")
    assert line["answers"] == {"12": 3, "17": 1}


def test_sources_are_balanced(check):
    rows = [trace(f"{source} {i}", f"print(3*4+5+{i}-{i})", source=source) for source in "aab" for i in range(4)]
    rows = [row | {"messages": [{"role": "user", "content": f"{n}: {QUESTION}"}, *row["messages"][1:]]}
            for n, row in enumerate(rows)]  # fmt: skip
    kept, left, printed = check(rows, "--balance")
    assert Counter(row["source"] for row in kept) == {"a": 4, "b": 4}
    assert {line["reason"] for line in left} == {"balance"}
    table = [line.split() for line in printed.splitlines()]
    assert table[:3] == [["all", "a", "b"], ["kept", "8", "4", "4"], ["balance", "4", "4", "0"]]
    assert json.loads(kept[0]["messages"])[0]["role"] == "user"
