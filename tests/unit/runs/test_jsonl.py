import json
import logging

import pytest

from verl_ext.runs import jsonl


@pytest.mark.parametrize(
    "half", [b'{"b": 2', b'{"b": "\xe2\x82', b"\0\0\0"], ids=["cut", "within a character", "zeros"]
)
def test_an_incomplete_last_line_is_left_out_and_reported(tmp_path, caplog, half):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + half)
    with caplog.at_level(logging.WARNING):
        assert list(jsonl.read(path)) == [{"a": 1}]
    assert f"{path}: the last line is incomplete" in caplog.text
    jsonl.cut_half_line(path)
    assert path.read_bytes() == b'{"a": 1}\n\n'
    jsonl.cut_half_line(tmp_path / "nowhere.jsonl")
    assert not (tmp_path / "nowhere.jsonl").exists()


def test_a_last_line_that_is_whole_and_no_object_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('[{"a": 1}]')
    with pytest.raises(jsonl.OtherForm, match="line 1: it is not a JSON object"):
        list(jsonl.read(tmp_path / "rows.jsonl"))


def test_a_last_line_that_is_whole_but_for_its_end_counts(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"b": 2}')
    assert list(jsonl.read(tmp_path / "rows.jsonl")) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ('{"a": 1', "line 2: Expecting ',' delimiter"),
        ("[1]", "line 2: it is not a JSON object"),
        ('{"b": 1}', "line 2: no key 'a'"),
        ('{"a": "x"}', "line 2: invalid literal for int"),
        ('{"a": null}', "line 2: int.. argument must be"),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path, line, seen):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"rows.jsonl, {seen}.*\. Expected a row with a number, got '") as error:
        list(jsonl.read(path, lambda row: int(row["a"]), "a row with a number"))
    assert repr(line) in str(error.value)


def test_what_a_model_may_write_stays_one_line_and_comes_back(tmp_path):
    text = "\u2028 \x85 \x0c \r\n \ud800 π"  # the first three end a line for str.splitlines, no file has the fifth
    line = jsonl.dumps({"text": text})
    assert "π" in line and "\n" not in line and json.loads(line) == {"text": text}
    (tmp_path / "rows.jsonl").write_text(f"{line}\n" * 2, encoding="utf-8")
    assert list(jsonl.read(tmp_path / "rows.jsonl")) == [{"text": text}] * 2
