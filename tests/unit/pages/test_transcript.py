"""Where calls stand in a response."""

from verl_ext.pages.transcript import Branch, transcript


def test_code_stands_where_the_model_wrote_it_and_after_the_text_where_it_does_not() -> None:
    call = {"turn": 0, "code": "print(1)"}
    turn = {"role": "model", "text": "first print(1) then"}
    assert transcript({"turns": [turn], "calls": [call]})[0]["parts"] == [
        ("text", "first "),
        ("code", call),
        ("text", " then"),
    ]
    for start, end in (("<code>\n", "\n</code>"), ('<tool_call>{"code": "', '"}</tool_call>')):
        prose, short = "Let x be 1 + 1, then <code> it. ", {"turn": 0, "code": "1 + 1"}
        turn = {"role": "model", "text": f"{prose}{start}1 + 1{end}"}
        parts = transcript({"turns": [turn], "calls": [short]})[0]["parts"]
        assert parts == [("text", prose + start), ("code", short), ("text", end)]
    escaped = {"turn": 0, "code": 'print("1")'}
    turn = {"role": "model", "text": '{"code": "print(\\"1\\")"}'}
    parts = transcript({"turns": [turn], "calls": [escaped]})[0]["parts"]
    assert parts == [("text", turn["text"]), ("code", escaped)]


def test_a_conversation_that_branches_comes_row_by_row_each_after_the_one_that_it_branches_from() -> None:
    """In the order of their answers: rows 0, 1, 0, 2, 3. Row 2 continues from row 1, and row 1 from the first turn."""
    turns = [
        {"role": "model", "text": "a", "row": 0, "parent": None, "fork": None},
        {"role": "user", "text": "and", "row": 0, "parent": None, "fork": None},
        {"role": "model", "text": "b", "row": 1, "parent": 0, "fork": None},
        {"role": "model", "text": "c", "row": 0, "parent": 0, "fork": None},
        {"role": "model", "text": "d", "row": 2, "parent": 2, "fork": None},
        {"role": "model", "text": "e", "row": 3, "parent": -1, "fork": "history"},
        {"role": "model", "text": "f", "row": 4, "parent": None, "fork": None},  # from the one before it
    ]
    found = transcript({"turns": turns, "calls": []})
    assert [(turn["text"], turn["number"], turn["depth"]) for turn in found] == [
        *[("a", 0, 0), ("and", 1, 0), ("c", 3, 0), ("b", 2, 1), ("d", 4, 2), ("e", 5, 0), ("f", 6, 1)],
    ]
    branches = {turn["text"]: turn["branch"] for turn in found if turn["branch"]}
    assert branches == {
        "a": Branch(0, None, ""),
        "b": Branch(1, 0, ""),
        "d": Branch(2, 2, ""),
        "e": Branch(3, None, "earlier messages were changed"),
        "f": Branch(4, 5, ""),
    }


def test_a_linear_conversation_and_one_of_an_older_run_have_no_branches() -> None:
    for turns in ([{"role": "model", "text": "a"}] * 2, [{"role": "model", "text": "a", "row": 0, "parent": None}] * 2):
        assert [(turn["branch"], turn["depth"]) for turn in transcript({"turns": turns, "calls": []})] == [
            (None, 0)
        ] * 2
