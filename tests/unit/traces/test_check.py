"""The command that checks traces: what it keeps, and why it leaves others out."""

import json
from collections import Counter
from copy import deepcopy

import pytest

from verl_ext.runs import parquet


def test_the_built_in_traces_are_kept_as_they_are(check, make_rows):
    rows = make_rows(120, ("mental", "tool", "wrong_formula", "repair", "give_up"))
    for row in rows:
        del row["reward_model"]  # data/tiny_tools/prepare.py writes none: some of its traces are wrong on purpose
    kept, left, printed = check(rows, "--without-gold")
    assert not left and [json.loads(row["messages"]) for row in kept] == [row["messages"] for row in rows]
    assert [row["id"] for row in kept] == [row["id"] for row in rows], "in their order"
    assert printed.splitlines()[1].split() == ["kept", "120"]


def last(row: dict) -> dict:
    return row["messages"][-1]


def first_output(row: dict) -> dict:
    return row["messages"][2]


def wrong_output(row: dict) -> None:
    first_output(row)["content"] += "0"


def wrong_answer(row: dict) -> None:
    last(row)["content"] = last(row)["content"].replace("}", "1}")


def no_answer(row: dict) -> None:
    last(row)["content"] = "Done."


def other_program(row: dict) -> None:
    row["messages"][1]["content"] = row["messages"][1]["content"].replace("</code>", "+1</code>")


def program_prints_more(row: dict) -> None:
    row["messages"][1]["content"] = row["messages"][1]["content"].replace("</code>", "\nprint(7)</code>")


def random_program(row: dict) -> None:
    row["messages"][1]["content"] = "<code>import random\nprint(random.random())</code>"


def no_last_message(row: dict) -> None:
    del row["messages"][-1]


def no_output(row: dict) -> None:
    del row["messages"][2]


def broken_tag(row: dict) -> None:
    row["messages"][1]["content"] = row["messages"][1]["content"].replace("</code>", "</cod>")


def no_question(row: dict) -> None:
    del row["messages"][0]


def nested_call(row: dict) -> None:
    last(row)["content"] = f"<code>print(1)</code> {last(row)['content']}"


DAMAGES = {
    wrong_output: "output_differs",
    wrong_answer: "wrong_answer",
    no_answer: "no_answer",
    other_program: "output_differs",
    program_prints_more: "output_differs",
    random_program: "not_deterministic",
    no_last_message: "not_a_trace",
    no_output: "not_a_trace",
    broken_tag: "not_a_trace",
    no_question: "not_a_trace",
    nested_call: "not_a_trace",
}


def test_no_damaged_trace_is_kept_and_each_has_its_reason(check, make_rows):
    whole = make_rows(20, ("tool",), seed=1)
    damaged = []
    for row, kind in enumerate(DAMAGES):
        for number, other in enumerate(deepcopy(make_rows(20, ("tool",), seed=2 + row))):
            kind(other)
            damaged.append(other | {"id": f"{kind.__name__} {number}"})
    kept, left, printed = check(damaged + whole)
    assert [row["id"] for row in kept] == [row["id"] for row in whole]
    found = Counter((line["id"].split()[0], line["reason"]) for line in left)
    assert found == {(kind.__name__, reason): 20 for kind, reason in DAMAGES.items()}
    assert all(line["detail"] and line["messages"] for line in left)
    assert ["output_differs", "60"] in [line.split() for line in printed.splitlines()]


def test_what_was_kept_is_kept_again(check, make_rows, tmp_path):
    rows = make_rows(12)
    once, *_ = check(rows)
    (tmp_path / "again.parquet").write_bytes((tmp_path / "out" / "kept.parquet").read_bytes())
    twice, *_ = check(tmp_path / "again.parquet")
    assert twice == once


def test_sft_reads_what_is_kept_and_the_file_says_how_it_was_made(check, make_rows, tokenizer, tmp_path):
    from omegaconf import OmegaConf

    from verl_ext.datasets.sft import RetoolSFTDataset

    kept, *_ = check(make_rows(8))
    file = tmp_path / "out" / "kept.parquet"
    config = {"messages_key": "messages", "max_length": 200, "truncation": "error"}
    config["retool"] = {"protocol": "code", "bad_rows": "error"}
    assert len(RetoolSFTDataset(str(file), tokenizer, OmegaConf.create(config))) == len(kept) == 8
    notes = json.loads(parquet.columns_of(file).metadata[b"retool_traces"])
    assert notes["config"] == "tiny_dapo" and notes["environment"]["versions"]["python"]
    assert {count["kept"] for count in notes["counts"].values()} == {8}


def test_what_is_noted_of_a_check_is_the_same_in_every_process(check, make_rows, tmp_path):
    """The address of a function is not."""
    check(make_rows(2, ("mental",)))
    file, page = tmp_path / "out" / "kept.parquet", tmp_path / "out" / "kept.html"
    notes = parquet.columns_of(file).metadata[b"retool_traces"].decode()
    assert "min_calls" in notes and " at 0x" not in notes + page.read_text()


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (["--min-calls", "2"], {"no_call": 3}),
        (["--model", "MODEL", "--max-tokens", "80"], {"too_long": 1}),
        (["--evaluation", "EVALUATION"], {"overlap": 1}),
        (["--computed"], {"literal_only": 1}),
        ([], {"no_gold": 1}),
    ],
)
def test_a_rule_leaves_out_what_breaks_it(options, reasons, check, make_rows, tokenizer, tmp_path):
    rows = make_rows(4, ("repair", "tool", "mental", "give_up"), seed=3)
    del rows[3]["reward_model"]
    if options:
        rows[3] = make_rows(1, ("tool",), seed=4)[0]
        gold = rows[3]["reward_model"]["ground_truth"]
        rows[3]["messages"][1]["content"] = f"<code>x={gold}\nprint(x)</code>"
    tokenizer.save_pretrained(tmp_path / "model")
    question = rows[1]["messages"][0]["content"]
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"problem": question, "answer": "1"}))
    names = {"MODEL": str(tmp_path / "model"), "EVALUATION": str(tmp_path / "evaluation.jsonl")}
    kept, left, _ = check(rows, *(names.get(each, each) for each in options))
    assert Counter(line["reason"] for line in left) == reasons and len(kept) == 4 - sum(reasons.values())


def test_nothing_is_written_if_the_sandbox_is_down(check, make_rows, tmp_path, monkeypatch):
    from verl_ext.traces import rerun

    monkeypatch.setattr(rerun, "ATTEMPTS", 1)
    rows = make_rows(60, ("tool", "mental"))
    down = ["--sandbox-url", "http://127.0.0.1:9", "--set", "retool.sandbox.queue_timeout_s=1"]
    with pytest.raises(SystemExit, match="The programs of the last 16 traces could not be run"):
        check(rows, *down)
    assert not list((tmp_path / "out").iterdir())


def test_what_could_not_be_checked_is_listed_and_ends_with_an_error(check, make_rows, tmp_path):
    rows = make_rows(3, ("mental",)) + make_rows(2, ("tool",), seed=5)
    down = ["--sandbox-url", "http://127.0.0.1:9", "--set", "retool.sandbox.queue_timeout_s=1"]
    with pytest.raises(SystemExit, match="2 could not be checked; the same command tries them again"):
        check(rows, *down)
    assert parquet.count_rows(tmp_path / "out" / "kept.parquet") == 3
    lines = [json.loads(line) for line in (tmp_path / "out" / "kept.left_out.jsonl").read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["not_checked"] * 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("check x.jsonl --out kept.txt --config tiny_dapo", "expected a name that ends in .parquet"),
        ("convert x.jsonl --chat http://127.0.0.1:9 --out kept.txt", "expected a name that ends in .parquet"),
        ("convert x.jsonl --chat 127.0.0.1:9 --out kept.parquet", "expected a URL"),
        ("questions c.jsonl --chat 127.0.0.1:9 --out kept.parquet", "expected a URL"),
        ("convert x.jsonl --chat http://127.0.0.1:9 --api-key-env NO_KEY --out k.parquet", "no such environment"),
        ("convert x.jsonl --chat http://127.0.0.1:9 --requests 0 --out kept.parquet", "--requests is 0: expected"),
        ("check x.jsonl --out kept.parquet --config tiny_dapo --concurrency 0", "--concurrency is 0: expected"),
        ("check x.jsonl --out kept.parquet --config tiny_dapo", "There is no trace in x.jsonl"),
        ("check x.jsonl --out kept.parquet", "Give --config"),
        ("check x.jsonl --out kept.parquet --config nothing", "nothing.yaml does not exist"),
        ("check x.jsonl --out kept.parquet --config tiny_dapo --max-tokens 9", "needs the tokenizer of --model"),
    ],
)
def test_a_wrong_option_is_said_at_once(command, message, tmp_path, monkeypatch, capsys):
    from verl_ext.traces.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SANDBOX_URL", "http://127.0.0.1:9")
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(SystemExit) as error:
        main(command.split())
    assert message in f"{error.value} {capsys.readouterr().err}"
