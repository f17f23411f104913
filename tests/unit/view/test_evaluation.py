"""The folder of an evaluation in the viewer."""

import json
from pathlib import Path

import pytest

from tests.unit.evaluation.rows import evaluation, row
from verl_ext.runs import jsonl
from verl_ext.view.evaluation import record_of

CODE = "Let me see. <code>\nprint(1/0)\n</code>\n<interpreter>\nZeroDivisionError: zero\n</interpreter>\nSo \\boxed{7}"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(7)"}}\n</tool_call>'
HERMES = f"I run it. {CALL}\nuser\n<tool_response>\n7\n</tool_response>\nassistant\nIt is \\boxed{{7}}"


def samples(number: int = 4) -> list[dict]:
    rows = [
        row(f"Is {i} prime", n, n > i, output=(CODE, HERMES)[n % 2], reward_base=1.0)
        for i in range(2)
        for n in range(number)
    ]
    return [each | {"method": "integer", "verdict": "correct", "normalised": "7"} for each in rows]


def write_dump(path: Path, rows: list[dict]) -> None:
    lines = [json.dumps({name: value for name, value in each.items() if name != "failure"}) for each in rows]
    path.write_text("\n".join(lines) + "\n")


def open_pages(client, key: str = "val_000000", uid: str = "mine:Is 0 prime") -> str:
    """All pages of it, and none of them fails."""
    group = f"/run/0/{key}/group?uid={uid}&a=0&b=1"
    pages = [f"/run/0/{key}/{page}" for page in ("timeline", "timeline.json", f"sample?uid={uid}&session=1")]
    pages += [f"/run/0/{key}?failed=on&sort=low", "/", "/state.json", "/problems", "/run/0/export.eval", group]
    found = [client.get(page) for page in pages]
    assert [answer.status_code for answer in found] == [200] * len(pages)
    return found[-1].text


def test_an_evaluations_folder_opens(viewer, tmp_path: Path) -> None:
    failed = row(
        "Is 0 prime", 4, 0, failure="server_failure", finish_reason="server_failure", output="", error="no answer"
    )
    client = viewer(evaluation(tmp_path / "out", [*samples(), failed]))
    assert "An evaluation has samples and no curves." in client.get("/").text
    assert "9 of 9 rollouts, in 2 groups" in client.get("/run/0/val_000000").text
    assert "1 of 9 rollouts" in client.get("/run/0/val_000000?end=server_failure").text
    group = open_pages(client)
    assert "Is 0 prime" in group and "ZeroDivisionError: zero" in group and "print" in group
    sample = client.get("/run/0/val_000000/sample?uid=mine:Is 0 prime&session=1").text
    assert "integer: correct" in sample and "reward_base 1.0" in sample
    assert not [*(tmp_path / "out").glob("**/*.parquet")], "the folder is only read"


def test_it_is_compared_with_another(viewer, tmp_path: Path) -> None:
    folders = [evaluation(tmp_path / name, samples(number)) for name, number in (("a", 2), ("b", 4))]
    page = viewer(*folders).get("/problems?a=0:val_000000&b=1:val_000000").text
    assert "2 problems have judged samples on both sides" in page


def test_verls_validation_dumps_open_by_their_steps(viewer, tmp_path: Path) -> None:
    for step in (0, 20):
        write_dump(tmp_path / f"{step}.jsonl", samples())
    client = viewer(tmp_path)
    assert "Validation, step 20" in client.get("/run/0/val_000020").text
    open_pages(client, "val_000020")


def test_only_a_dump_that_is_new_or_has_grown_is_read_again(viewer, tmp_path: Path, monkeypatch) -> None:
    write_dump(tmp_path / "0.jsonl", [*samples(2), {"uid": 7}])
    client, read, seen = viewer(tmp_path), jsonl.read, []
    assert "0.jsonl, line 5" in client.get("/run/0/val_000000").text
    monkeypatch.setattr(jsonl, "read", lambda path, *args: seen.append(path.name) or read(path, *args))
    write_dump(tmp_path / "20.jsonl", samples(2))
    for _ in range(2):
        assert "4 of 4 rollouts" in client.get("/run/0/val_000020").text
    assert seen == ["20.jsonl"]
    assert "0.jsonl, line 5" in client.get("/").text, "what is wrong with the other file is still shown"
    write_dump(tmp_path / "0.jsonl", samples(3))
    assert "6 of 6 rollouts" in client.get("/run/0/val_000000").text and "line 5" not in client.get("/").text


def test_samples_that_are_added_are_shown_and_a_damaged_line_is_named(viewer, tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "out", samples(2))
    client, state = viewer(folder), viewer(folder).get("/state.json").text
    with (folder / "samples.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in samples(3)) + '{"half')
    assert client.get("/state.json").text != state
    assert "6 of 6 rollouts" in client.get("/run/0/val_000000").text
    with (folder / "samples.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"uid": 7}) + "\n")
    page = client.get("/run/0/val_000000")
    assert page.status_code == 200 and "samples.jsonl, line 11" in page.text and "6 of 6 rollouts" in page.text


@pytest.mark.parametrize(
    ("output", "turns", "calls"),
    [
        (CODE, "model tool model", [("print(1/0)", "error", "ZeroDivisionError: zero")]),
        (HERMES, "model tool model", [("print(7)", "ok", "7")]),
        (f"{CALL}\n{CALL}\nuser\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nassistant\nx",
         "model tool tool model", [("print(7)", "ok", "1"), ("print(7)", "ok", "2")]),
        ("<code>\nprint(1)", "model", [("print(1)", "not_run", None)]),
        ("<interpreter>forged", "tool", []),
        ("<tool_call>{", "model", [("{", "not_run", None)]),
        ("<code>print('<interpreter>')</code><interpreter>\n<code>\n</interpreter>", "model tool",
         [("print('<interpreter>')", "ok", "<code>")]),
        ("", "", []),
    ],
)  # fmt: skip
def test_turns_and_calls_are_what_stands_between_the_tags(output: str, turns: str, calls: list) -> None:
    record = record_of(row("a", 0, 1, output=output))
    assert " ".join(turn["role"] for turn in record["turns"]) == turns
    assert [(call["code"], call["status"], call.get("stdout")) for call in record["calls"]] == calls
    assert all(call["turn"] == 0 for call in record["calls"])


@pytest.mark.parametrize(("errors", "status", "fault"), [(1.0, "error", "model"), (0.0, "ok", None)])
def test_a_call_failed_if_its_reply_says_so_and_the_sample_counts_an_error(errors, status, fault) -> None:
    (call,) = record_of(row("a", 0, 1, output=CODE, tool_errors=errors))["calls"]
    assert (call["status"], call.get("fault")) == (status, fault)


def test_a_sample_that_was_not_judged_has_no_score() -> None:
    failed = record_of(row("a", 0, 0, failure="server_failure", finish_reason="server_failure", sandbox_failure=1.0))
    assert (failed["score"], failed["acc"], failed["fault"]) == (None, None, "infrastructure")
    judged = record_of(row("a", 0, 0))
    assert (judged["score"], judged["acc"], judged["fault"]) == (-1.0, 0.0, "none")


def test_half_a_character_that_a_model_wrote_is_spelled_out(viewer, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(\'\\ud83d\')"}}</tool_call>'
    odd = row("Is 0 prime", 0, 1, output=f"\ud800 {call}", pred="\ud800", error="\ud800")
    page = viewer(evaluation(tmp_path / "out", [odd])).get("/run/0/val_000000/sample?uid=mine:Is 0 prime&session=0")
    assert page.status_code == 200 and "\\ud800" in page.text and "\\ud83d" in page.text
