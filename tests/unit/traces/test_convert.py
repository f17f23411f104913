"""`convert` against a scripted endpoint on loopback, with the real sandbox: good teachers, and twenty kinds of bad."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.chat_endpoint import ChatEndpoint, Refused, serving
from verl_ext.runs.lock import lock_file
from verl_ext.sandbox.launch import running_server
from verl_ext.traces.__main__ import main

PROBLEM = "A shop sells {a} boxes with {b} pens each, and {c} pens are broken. How many pens are whole?"
REASONING = (
    "We count all pens first. Multiplying {a} by {b} by hand, digit by digit and with care, we get {product}. The "
    "broken ones cannot be sold, so they are taken away from this number: {product} - {c} = {whole}. The answer is "
    "{whole}."
)
PARTS = (
    "We count all pens first.",
    "There are {product} pens. ",
    "The broken ones cannot be sold, so they are taken away",
)
PARTS += (" from this number: {product} - {c} = {whole}. The answer is \\boxed{{{whole}}}.",)


@pytest.fixture(scope="module")
def sandbox():
    with running_server(workers=2, options=("--preload=",)) as url:
        yield url


def numbers(number: int) -> dict[str, int]:
    a, b, c = 20 + number, 17, 5
    return {"a": a, "b": b, "c": c, "product": a * b, "whole": a * b - c}


def write_rows(path: Path, count: int) -> Path:
    rows = []
    for number in range(count):
        values = numbers(number)
        row = {"id": f"pens-{number}", "problem": PROBLEM.format(**values), "answer": str(values["whole"])}
        rows.append(json.dumps(row | {"reasoning": REASONING.format(**values)}))
    path.write_text("\n".join(rows) + "\n")
    return path


def good(number: int, *, program: str = "print({a} * {b})", parts: tuple[str, ...] = PARTS) -> str:
    values = numbers(number)
    before, *after = (part.format(**values) for part in parts)
    return f"{before}\n<code>\n{program.format(**values)}\n</code>\n{''.join(after)}"


def number_of(messages: list[dict[str, Any]]) -> int:
    asked = messages[-1]["content"]
    return int(asked.partition("A shop sells ")[2].split()[0]) - 20


def without(text: str, part: str, other: str = "") -> Any:
    return lambda number: good(number).replace(part.format(**numbers(number)), other.format(**numbers(number)))


def refused(status: int, text: str = "no") -> Any:
    def say(number: int) -> str:
        raise Refused(status, text, {"Retry-After-Ms": "1"})

    return say


BAD = {  # what the teacher does wrong -> (its answer, the reason)
    "a changed number": (without("", "- {c} =", "- 6 ="), "number_changed"),
    "a number that contradicts the output": (without("", "There are {product}", "There are 999"), "contradicts_output"),
    "another result at the end": (without("", "= {whole}", "= 12"), "number_changed"),
    "another answer in the box": (without("", "{{{whole}}}", "{{12}}"), "contradicts_output"),
    "a forged output": (without("", "</code>", "</code>\n<interpreter>\n1\n</interpreter>"), "forged_output"),
    "a program that prints a literal": (lambda number: good(number, program="print({product})"), "literal_only"),
    "a variable that is a literal": (lambda number: good(number, program="x = {product}\nprint(x)"), "literal_only"),
    "a program without end": (lambda number: good(number, program="while True: pass"), "program_failed"),
    "a program that raises": (lambda number: good(number, program="print({a} * {b} / 0)"), "program_failed"),
    "a program with a wrong result": (lambda number: good(number, program="print({a} + {b})"), "contradicts_output"),
    "a program that says another thing each time": (
        lambda number: good(number, program="import time\nprint({a} * {b}, time.time_ns())"),
        "not_deterministic",
    ),
    "a tag that is not closed": (without("", "</code>"), "not_a_trace"),
    "a tag that is not opened": (without("", "<code>"), "not_a_trace"),
    "an empty program": (lambda number: good(number, program=" "), "not_a_trace"),
    "no program": (lambda number: REASONING.format(**numbers(number)), "no_call"),
    "a refusal": (lambda number: {"content": None, "refusal": "I will not."}, "refused"),
    "a refusal by the endpoint": (refused(400, "content_filter"), "refused"),
    "a refusal in words": (lambda number: "I am sorry, I cannot help with that.", "no_call"),
    "half an answer": (lambda number: {"content": good(number)[:120], "finish_reason": "length"}, "cut_off"),
    "another language": (
        lambda number: good(
            number, parts=("Wir zählen die Stifte.", "Es sind {product}. ", "Kaputte kommen weg", PARTS[3])
        ),
        "text_changed",
    ),
    "a summary": (
        lambda number: good(number, parts=("Pens:", "", "", "{product}, \\boxed{{{whole}}}")),
        "text_changed",
    ),
    "too many requests": (refused(429), "not_checked"),
    "a server's error": (refused(500), "not_checked"),
    "a cut connection": (refused(0), "not_checked"),
}


@pytest.fixture
def convert(tmp_path, sandbox):
    """Convert rows, by an endpoint or by what its model says; returns the kept rows, and name -> line of the others."""

    def run(say: Any, count: int, *options: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        rows, out = write_rows(tmp_path / "mine.jsonl", count), tmp_path / "traces.parquet"
        own = serving(ChatEndpoint(lambda messages: say(number_of(messages))))
        with nullcontext(say) if isinstance(say, ChatEndpoint) else own as endpoint:
            argv = ["convert", str(rows), "--chat", endpoint.url, "--config", "qwen3-0.6b_dapo", "--out", str(out)]
            argv += ["--set", "retool.sandbox.timeout_s=2", "--sandbox-url", sandbox, *options]
            try:
                main(argv)
            except SystemExit as error:
                run.message = str(error)
        kept = pq.read_table(out).to_pylist() if out.exists() else []
        lines = (tmp_path / "traces.left_out.jsonl").read_text().splitlines()
        return kept, {line["id"]: line for line in map(json.loads, lines)}

    return run


def test_programs_stand_in_the_text_with_what_the_sandbox_printed(convert):
    kept, left = convert(good, 3)
    assert len(kept) == 3 and not left
    messages = json.loads(kept[1]["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    call = messages[1]["tool_calls"][0]["function"]
    assert call == {"name": "code_interpreter", "arguments": {"code": "print(21 * 17)"}}
    assert messages[2]["content"].strip() == "357" and messages[3]["content"].endswith("\\boxed{352}.")
    assert PROBLEM.format(**numbers(1)) in messages[0]["content"] and kept[1]["ground_truth"] == "352"
    about = json.loads(kept[1]["about"])
    assert about["teacher"].startswith("http://127.0.0.1") and about["template"]


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_the_thinking_of_a_teacher_is_no_part_of_the_trace(convert, key):
    thinks = "I multiply first.\n<code>\nprint(1)\n</code>\n" * 20

    def say(number: int) -> dict[str, str]:
        return {"content": f"<think>\n{thinks}</think>\n\n" * (key == "content") + good(number)} | (
            {key: thinks} if key != "content" else {}
        )

    kept, left = convert(say, 2)
    assert len(kept) == 2 and not left and "multiply first" not in json.dumps(kept)


def test_bad_teachers_are_caught_each_with_its_reason(convert, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    says = [good, *(say for say, _ in BAD.values())]
    kept, left = convert(lambda number: says[number](number), len(says))
    assert [row["id"] for row in kept] == ["pens-0"]
    found = {what: left[f"pens-{number}"]["reason"] for number, what in enumerate(BAD, 1)}
    assert found == {what: reason for what, (_, reason) in BAD.items()}
    assert "3 could not be checked" in convert.message


def test_a_wrong_solution_that_was_rewritten_well_is_left_out_as_wrong(tmp_path):
    rows = write_rows(tmp_path / "mine.jsonl", 2).read_text().replace('"answer": "352"', '"answer": "351"')
    (tmp_path / "wrong.jsonl").write_text(rows)
    with serving(ChatEndpoint(lambda messages: good(number_of(messages)))) as endpoint:
        argv = ["convert", str(tmp_path / "wrong.jsonl"), "--chat", endpoint.url, "--config", "qwen3-0.6b_dapo"]
        main([*argv, "--out", str(tmp_path / "wrong.parquet")])
    lines = map(json.loads, (tmp_path / "wrong.left_out.jsonl").read_text().splitlines())
    assert [(line["id"], line["reason"]) for line in lines] == [("pens-1", "wrong_answer")]


def test_what_a_teacher_did_not_answer_is_asked_again_and_the_rest_is_not(convert):
    asked: Counter[int] = Counter()

    def say(number: int) -> str:
        asked[number] += 1
        if number == 1 and asked[number] <= 8:
            raise Refused(500, "no", {"Retry-After-Ms": "1"})
        return good(number)

    with serving(ChatEndpoint(lambda messages: say(number_of(messages)))) as endpoint:
        kept, left = convert(endpoint, 3)
        assert [row["id"] for row in kept] == ["pens-0", "pens-2"] and left["pens-1"]["reason"] == "not_checked"
        kept, left = convert(endpoint, 3)
        assert [row["id"] for row in kept] == ["pens-0", "pens-1", "pens-2"] and not left
        assert asked == {0: 1, 1: 9, 2: 1}
        convert(endpoint, 3, "--temperature", "0.1")
    assert "holds answers to other settings" in convert.message


def test_a_row_that_was_changed_is_asked_about_anew_and_an_id_may_occur_twice(tmp_path, sandbox):
    asked: Counter[int] = Counter()

    def say(messages: list[dict[str, Any]]) -> str:
        asked[number_of(messages)] += 1
        return good(number_of(messages))

    rows, out = tmp_path / "mine.jsonl", tmp_path / "traces.parquet"
    lines = [json.loads(line) | {"id": "same"} for line in write_rows(rows, 3).read_text().splitlines()]
    with serving(ChatEndpoint(say)) as endpoint:
        argv = ["convert", str(rows), "--chat", endpoint.url, "--config", "qwen3-0.6b_dapo", "--out", str(out)]
        argv += ["--sandbox-url", sandbox]
        with pytest.raises(SystemExit, match="the row has no question"):
            main([*argv, "--columns", "question", "answer", "reasoning"])
        for now in (lines[:2], lines[1:]):  # the first row is another one in the second file
            rows.write_text("".join(json.dumps(line) + "\n" for line in now))
            main(argv)
            assert [row["problem"] for row in pq.read_table(out).to_pylist()] == [line["problem"] for line in now]
        assert asked == {0: 1, 1: 1, 2: 1}
        with lock_file(tmp_path / "traces.asked.jsonl"), pytest.raises(SystemExit, match="Another run writes into"):
            main(argv)


def test_rows_with_one_problem_and_reasoning_are_asked_about_once(tmp_path, sandbox):
    asked: Counter[int] = Counter()

    def say(messages: list[dict[str, Any]]) -> str:
        asked[number_of(messages)] += 1
        return good(number_of(messages))

    rows, out = write_rows(tmp_path / "mine.jsonl", 2), tmp_path / "traces.parquet"
    rows.write_text(rows.read_text() * 2)
    with serving(ChatEndpoint(say)) as endpoint:
        argv = ["convert", str(rows), "--chat", endpoint.url, "--config", "qwen3-0.6b_dapo", "--out", str(out)]
        main([*argv, "--sandbox-url", sandbox])
    left = [json.loads(line)["reason"] for line in (tmp_path / "traces.left_out.jsonl").read_text().splitlines()]
    assert asked == {0: 1, 1: 1} and len(pq.read_table(out)) == 2 and left == ["duplicate"] * 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_command_that_is_killed_loses_no_answer_and_asks_nothing_twice_but_what_was_in_flight(tmp_path, sandbox):
    """Killed five times at any moment, with four requests in flight."""
    asked: Counter[int] = Counter()

    def say(messages: list[dict[str, Any]]) -> str:
        number = number_of(messages)
        asked[number] += 1
        time.sleep(0.05)
        return good(number)

    rows, out = write_rows(tmp_path / "mine.jsonl", 120), tmp_path / "traces.parquet"
    with serving(ChatEndpoint(say)) as endpoint:
        command = [
            sys.executable,
            "-m",
            "verl_ext.traces",
            "convert",
            str(rows),
            "--chat",
            endpoint.url,
            "--out",
            str(out),
        ]
        command += ["--config", "qwen3-0.6b_dapo", "--sandbox-url", sandbox, "--requests", "4"]
        for kill in range(5):
            before = sum(asked.values())
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                while sum(asked.values()) < before + 7 + 3 * kill and process.poll() is None:
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
        subprocess.run(command, check=True, env=os.environ)
    assert len(pq.read_table(out)) == 120
    assert set(asked) == set(range(120)) and sum(asked.values()) <= 120 + 5 * 4
