"""The page of a check."""

import json
import re

from tests.unit.traces.test_rerun import asks, tools_say
from verl_ext.traces.page import transcript_row


def test_the_page_shows_counts_and_some_traces_of_each_kind(check, make_rows, tmp_path):
    rows = make_rows(12, ("tool",))
    for row in rows[:3]:
        row["messages"][2]["content"] = "<b>0</b>"
    rows[3]["messages"][-1]["content"] = "Done."
    rows.append({"id": "strange", "messages": [{"role": "user", "content": {"a": 1}}, {"role": "x", "y": [1]}]})
    check(rows)
    page = (tmp_path / "out" / "kept.html").read_text()
    table = re.findall(r'<th scope="row">(\w+)</th><td class="num">(\d+)</td>', page)
    assert table == [("kept", "8"), ("not_a_trace", "1"), ("no_answer", "1"), ("output_differs", "3")]
    headings = re.findall(r"<h2>(\w+)</h2>", page)
    assert headings == [name for name, _ in table]
    assert page.count("<details class=") == 5 + 1 + 1 + 3
    assert "&lt;b&gt;0&lt;/b&gt;" in page and "<b>0</b>" not in page
    assert re.search(r'<pre class="code".*?print', page) and page.count('class="out"') == 5 + 1 + 3
    assert "The first 5 of these" in page and "strange" in page


def test_a_transcript_has_calls_with_their_outputs_whatever_the_form():
    user, answer = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "\\boxed{3}"}
    called = asks(("code_interpreter", {"code": "print(3)"}), ("add", {"by": 2}))
    row = transcript_row([user, called, *tools_say("3", "5"), answer, user, answer], None)
    assert [turn["role"] for turn in row["turns"]] == ["model", "model", "user", "model"]
    assert [(call["turn"], call["code"], call["stdout"]) for call in row["calls"]] == [
        (0, "print(3)", "3"),
        (0, json.dumps({"add": {"by": 2}}), "5"),
    ]
    inline = {"role": "assistant", "content": "<code>print(3)</code>\n<interpreter>\n3\n</interpreter>\nSo \\boxed{3}"}
    assert [call["stdout"] for call in transcript_row([user, inline], None)["calls"]] == ["\n3\n"]
    submitted = transcript_row([user, called, *tools_say("3", "5"), asks(("submit", {}))], None)
    assert [call["stdout"] for call in submitted["calls"]] == ["3", "5", ""]
    broken = transcript_row([called, user], None)
    assert [turn["role"] for turn in broken["turns"]] == ["model", "user"] and "print(3)" in broken["turns"][0]["text"]
