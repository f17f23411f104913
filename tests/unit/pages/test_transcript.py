"""Where calls stand in a response."""

from verl_ext.pages.transcript import transcript


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
