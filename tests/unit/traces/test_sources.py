"""Traces are read from files in every form, and from the folders of runs."""

import json

import pyarrow as pa
import pytest

from verl_ext.datasets.rows import DataError
from verl_ext.runs import parquet
from verl_ext.settings import REPO
from verl_ext.traces.output import row_of
from verl_ext.traces.sources import read_traces
from verl_ext.traces.trace import Reason, Trace

USER, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "\\boxed{3}"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"by": 2}}}
OTHER = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(3)"}}}

ITEM = {"type": "object", "properties": {"item": {"type": "string", "description": "its name"}}, "required": ["item"]}
PRICE_OF = {"name": "price_of", "description": "Look up a price.", "parameters": ITEM}


def read(tmp_path, *rows: dict) -> list:
    (tmp_path / "traces.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return list(read_traces(str(tmp_path / "traces.jsonl")))


def test_the_row_of_the_page_is_a_trace(tmp_path):
    page = (REPO / "docs" / "guides" / "traces.md").read_text()
    row = json.loads(page.partition("```json\n")[2].partition("```")[0])
    (trace,) = read(tmp_path, row | {"tools": json.dumps([{"type": "function", "function": PRICE_OF}])})
    assert isinstance(trace, Trace) and trace.problem == "What do 3 breads cost?"
    assert [bool(message.get("tool_calls")) for message in trace.messages] == [False, True, False, False]


@pytest.mark.parametrize(
    ("columns", "gold"),
    [
        ({}, None),
        ({"answer": "3"}, "3"),
        ({"answer": 3}, 3),
        ({"ground_truth": "3", "answer": "4"}, "3"),
        ({"reward_model": {"ground_truth": ["3"]}, "answer": "4"}, ["3"]),
        ({"reward_model": {"ground_truth": None}, "answer": "4"}, "4"),
        ({"ground_truth": '["3"]', "about": '{"ground_truth": ["3"]}'}, ["3"]),
    ],
)
def test_the_gold_is_in_one_of_its_columns(columns, gold, tmp_path):
    (trace,) = read(tmp_path, {"messages": [USER, ANSWER], **columns})
    assert trace.gold == gold and trace.problem == "How many?" and trace.id == "line 1"
    row = row_of(trace)
    assert row["messages"] == json.dumps([USER, ANSWER])
    (again,) = read(tmp_path, row)
    assert (again.gold, again.messages, again.problem_key) == (trace.gold, trace.messages, trace.problem_key)


def test_a_row_says_what_environment_and_verifier_read(tmp_path):
    info = {"setup_code": "x = 1", "tools_kwargs": {"add": {"create_kwargs": {"start": 1}}}}
    columns = {"data_source": "own", "ability": "counts", "extra_info": json.dumps(info), "source": "mine", "id": 7}
    (trace,) = read(tmp_path, {"messages": json.dumps([USER, ANSWER]), **columns})
    assert (trace.id, trace.source) == ("7", "mine")
    assert trace.task["extra_info"] == info and trace.task["tools_kwargs"] == info["tools_kwargs"]
    assert (trace.task["data_source"], trace.task["ability"]) == ("own", "counts")


def test_the_nulls_of_a_parquet_column_are_no_arguments(tmp_path):
    said = [{"role": "tool", "content": "3"}, ANSWER]
    rows = [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *said]}
        for call in (CALL, OTHER)
    ]
    parquet.write(tmp_path / "traces.parquet", pa.Table.from_pylist(rows))
    found = list(read_traces(str(tmp_path / "traces.parquet")))
    assert [trace.messages[1]["tool_calls"] for trace in found] == [[CALL], [OTHER]]
    assert [trace.messages[2] for trace in found] == [said[0]] * 2, "no key is null"


def test_a_row_that_is_no_conversation_is_left_out_and_one_without_messages_stops(tmp_path):
    rows = [{"messages": "[1]"}, {"messages": [USER, ANSWER]}, {"messages": "nothing"}]
    found = read(tmp_path, *rows, {"messages": [USER, ANSWER], "extra_info": [1]})
    assert [isinstance(each, Trace) for each in found] == [False, True, False, False]
    assert found[-1].why.detail == "extra_info is [1]; expected an object"
    columns = {"data_source": 5, "ability": ["math"], "extra_info": "{", "messages": None}
    odd = read(tmp_path, *({"messages": [USER, ANSWER], name: value} for name, value in columns.items()))
    assert [each.why.detail.partition(";")[0] for each in odd[:3]] == [
        *("data_source is 5", "ability is ['math']", "extra_info is '{'")
    ]
    assert "found None" in odd[3].why.detail
    assert {each.why.reason for each in found if not isinstance(each, Trace)} == {Reason.NOT_A_TRACE}
    with pytest.raises(DataError, match=r"traces.jsonl, line 1: a trace needs a column messages; the row has prompt"):
        read(tmp_path, {"prompt": [USER]})


def test_a_lone_surrogate_costs_no_file(check):
    row = {"messages": [{"role": "user", "content": "What is \ud800?"}, ANSWER], "answer": "3", "id": "\ud800"}
    (kept,), left, _ = check([row])
    assert not left and kept["problem"] == "What is \\ud800?"
    assert json.loads(kept["messages"])[0]["content"] == "What is \ud800?"
