import json
import runpy
import sys
from pathlib import Path

import pytest

from verl_ext.datasets.problems import evaluation_problems
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.text import PROMPTS
from verl_ext.datasets.traces import clean_traces, read_traces, write_traces
from verl_ext.protocols.base import CODE_SCHEMA

REPO = Path(__file__).parents[3]
REAL = REPO / "tests" / "data" / "traces.jsonl"
QUESTION = "What is $1+1$, plus {zero}?"
CODE = "d = {1: {2: 3}}\nprint(f'{d[1]}', 2)"


def message(role, content, code=None):
    call = [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}]
    return {"role": role, "content": content, "tool_calls": call if code else None}


# One trace in the three public forms.
ORIGINAL = [
    {
        "role": "user",
        "content": "Solve the following problem step by step. You now have the ability to selectively write executable "
        "Python code to enhance your reasoning process. [...]\nThe last part of your response should be in the "
        "following format:\n<answer>\n\\boxed{{'The final answer goes here.'}}\n</answer>\n\n*user question:*\nAnswer "
        f"the following Math Problem and put the answer in the format of \\boxed{{{{answer}}}}\n\n{QUESTION}\n\n\n"
        "Remember to place the final answer in the last part using the format: \n"
        "<answer>\n\\boxed{{'The final answer goes here.'}}\n</answer>",
    },
    {
        "role": "assistant",
        "content": f"I compute.\n<code>\n```python\n{CODE}\n```\n</code>\n<interpreter>\n3 2\n</interpreter>\n\n"
        "Again.\n<code>\n```python\nprint(2)\n```\n</code>\n<interpreter>\n2\n</interpreter>\nSo it is 2.\n\n"
        "<answer>\n\\boxed{2}\n</answer>",
    },
]
PUBLISHED = [
    message(
        "user",
        f"{QUESTION}\n\n\nRemember to place the final answer in the last part using the format: \n\n"
        "\\boxed{{'The final answer goes here.'}}",
    ),
    message("assistant", "I compute.", CODE),
    message("tool", "3 2"),
    message("assistant", "Again.", "print(2)"),
    message("tool", "2\n"),
    message("assistant", "So it is 2.\n\n\n\\boxed{2}"),
]
PUBLISHED[0]["content"] = f"*user question:*\n{PUBLISHED[0]['content']}"
OWN_ROLE = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": f"I compute.\n<code>\n{CODE}\n</code>"},
    {"role": "interpreter", "content": "3 2"},
    {"role": "assistant", "content": "Again.\n<code>print(2)</code>"},
    {"role": "interpreter", "content": "2"},
    {"role": "assistant", "content": "So it is 2.\n\n\n\\boxed{2}"},
]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def cleaned(path, protocol="code"):
    return clean_traces(read_traces(path, protocol=protocol), evaluation=evaluation_problems([]))


@pytest.mark.parametrize("protocol", PROMPTS)
def test_the_public_forms_of_a_trace_become_one(tmp_path, protocol):
    path = write(
        tmp_path / "a.jsonl", *({"messages": m, "id": i} for i, m in enumerate([ORIGINAL, PUBLISHED, OWN_ROLE]))
    )
    made = list(read_traces(path, protocol=protocol))
    assert [trace.problem for trace in made] == [QUESTION] * 3
    for trace in made:
        prompt, *response = trace.messages
        assert prompt["content"] == PROMPTS[protocol].format(problem=QUESTION) and trace.prompt_length == 1
        assert [m["role"] for m in response] == ["assistant", "tool"] * 2 + ["assistant"]
        assert response[0] == message("assistant", "I compute.", CODE)
        assert response[1] == message("tool", "3 2") and response[3] == message("tool", "2")
        assert response[2]["tool_calls"][0]["function"]["arguments"] == {"code": "print(2)"}
        assert response[4]["content"].split() == ["So", "it", "is", "2.", "\\boxed{2}"]


def test_a_call_may_come_without_content(tmp_path):
    """OpenAI's form lets a message with calls leave it out."""
    messages = [dict(each) for each in PUBLISHED]
    del messages[1]["content"]
    traces, _ = cleaned(write(tmp_path / "a.jsonl", {"messages": messages}))
    assert traces[0].messages[1] == message("assistant", "", CODE)


def test_published_parquet_is_read_too(tmp_path):
    import pandas as pd

    tools = json.dumps([CODE_SCHEMA])
    pd.DataFrame({"messages": [PUBLISHED], "tools": [tools]}).to_parquet(tmp_path / "a.parquet")
    traces, report = cleaned(str(tmp_path / "a.parquet"))
    assert report.kept == 1 and traces[0].messages[1] == message("assistant", "I compute.", CODE)


@pytest.mark.parametrize(
    ("messages", "column"),
    [
        ("text", "messages: found 'text'; expected list"),
        (["text"], "messages.0.role: the row has no messages.0.role"),
        ([{"role": "user"}], "messages.0.content: the row has no messages.0.content; it has role"),
        ([{"role": "user", "content": None}], "messages.0.content: found None; expected str"),
        ([OWN_ROLE[0], {"role": "assistant", "tool_calls": ["f"]}], "messages.1.tool_calls.0.function"),
    ],
)
def test_a_wrong_schema_is_an_error_with_row_and_column(tmp_path, messages, column):
    path = write(tmp_path / "a.jsonl", {"messages": OWN_ROLE}, {"messages": messages})
    with pytest.raises(DataError, match=f"a.jsonl, line 2, column {column}"):
        cleaned(path)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (OWN_ROLE[1:], "expected the user's question before"),
        (OWN_ROLE[:1], "expected roles assistant"),
        (OWN_ROLE[:3], "the last message must be the assistant's answer"),
        ([*OWN_ROLE[:1], {"role": "assistant", "content": "<code></code>"}, *OWN_ROLE[2:]], "empty <code></code>"),
        ([*OWN_ROLE[:1], {"role": "assistant", "content": "no code"}, *OWN_ROLE[2:]], "does not end in </code>"),
        ([*OWN_ROLE, OWN_ROLE[-1]], "expected roles assistant"),
        ([PUBLISHED[0], PUBLISHED[1], PUBLISHED[5]], "1 calls with 0 answers"),
    ],
)
def test_a_conversation_that_is_no_trace_is_left_out_with_the_reason(tmp_path, messages, reason):
    _, report = cleaned(write(tmp_path / "a.jsonl", {"messages": messages, "id": "x"}, {"messages": OWN_ROLE}))
    assert report.kept == 1 and dict(report.dropped) == {"not a trace of the agent loop": 1}
    assert report.examples["not a trace of the agent loop"][0].startswith("x: ") and reason in str(report)


def test_calls_of_other_tools_are_left_out(tmp_path):
    other = json.loads(json.dumps(PUBLISHED).replace('"code_interpreter"', '"search"', 1))
    bad_json = json.loads(json.dumps(PUBLISHED))
    bad_json[1]["tool_calls"][0]["function"]["arguments"] = '{"code": '
    _, report = cleaned(write(tmp_path / "a.jsonl", {"messages": other}, {"messages": bad_json}))
    assert report.dropped == {"not a trace of the agent loop": 2}
    assert "expected a call of code_interpreter with the argument code" in str(report)


def test_duplicates_numbers_and_evaluation_problems_are_left_out_but_not_a_second_way(tmp_path):
    aime = json.loads((REPO / "data/aime/aime_2024.jsonl").read_text().splitlines()[3])["problem"]
    second = [*OWN_ROLE[:-1], {"role": "assistant", "content": "\\boxed{2}"}]
    rows = [OWN_ROLE, second, ORIGINAL, OWN_ROLE]
    rows += [[{"role": "user", "content": text}, *OWN_ROLE[1:]] for text in (aime, r"$\frac{1}{2}$")]
    traces, report = cleaned(write(tmp_path / "a.jsonl", *({"messages": row} for row in rows)))
    assert [trace.id for trace in traces] == ["line 1", "line 2"]  # line 3 is the first in its original form
    assert report.dropped == {
        "the same trace occurs earlier": 2,
        "overlap with an evaluation set": 1,
        "the problem is empty or only a number": 1,
    }


@pytest.mark.parametrize("protocol", ["code", "hermes"])
def test_prepared_traces_pass_the_sft_data_set(tmp_path, tokenizer, protocol, monkeypatch, capsys):
    """Real traces and the public forms, through the command, into the class that trains on them."""
    from omegaconf import OmegaConf

    from verl_ext.datasets.sft import RetoolSFTDataset

    real = [json.loads(line) for line in REAL.read_text(encoding="utf-8").splitlines()]
    rows = [*real, *({"id": i, "messages": m} for i, m in enumerate([ORIGINAL, PUBLISHED]))]
    source, out = write(tmp_path / "a.jsonl", *rows), tmp_path / "out.parquet"
    monkeypatch.setattr(sys, "argv", ["x", "--input", source, "--out", str(out), "--protocol", protocol])
    runpy.run_path(str(REPO / "data" / "prepare_retool_sft.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"{len(rows)} rows" in printed and "[code_interpreter] " in printed

    config = {"messages_key": "messages", "max_length": 10**6, "truncation": "error"}
    config |= {"retool": {"protocol": protocol, "bad_rows": "error"}}
    dataset = RetoolSFTDataset(str(out), tokenizer, OmegaConf.create(config))
    assert len(dataset) == int(printed.partition(" traces;")[0].rpartition(" ")[2].replace(",", ""))
    assert len(dataset) >= 0.7 * len(rows)
    item = dataset[len(dataset) - 1]
    trained = tokenizer.decode(item["input_ids"][item["loss_mask"] == 1])
    whole = tokenizer.decode(item["input_ids"])
    assert "2\n</interpreter>" not in trained and "\\boxed{2}" in trained and "<answer>" not in whole
    assert PROMPTS[protocol].format(problem=QUESTION).partition("\n")[0] in whole
    if protocol == "code":
        assert f"<code>\n{CODE}\n</code>" in trained and "```" not in trained
    else:
        assert f"<tool_call>\n{json.dumps({'name': 'code_interpreter', 'arguments': {'code': CODE}})}" in trained


def test_nothing_left_is_said_and_not_written(tmp_path):
    with pytest.raises(DataError, match="No trace is left"):
        write_traces([], tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())
