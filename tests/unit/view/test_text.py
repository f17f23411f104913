"""Hostile text stays inert on every page that shows what a model or its program wrote."""

import html
import json
import re
import time
from pathlib import Path

import pytest
import regex

from verl_ext.records import store
from verl_ext.view import text

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'></pre></script><!--"
NASTY = SCRIPT + "\x1b[2J\x1b]0;title\x07 \u202egnp.exe\u2066 \u200b {{ 7*7 }} \0"


@pytest.fixture
def hostile(run_folder: Path) -> Path:
    for kind in ("trajectories", "tokens", "timeline"):
        path = store.path_of(run_folder, kind, 2)
        rows = store.read(path).to_pylist()
        for row in rows:
            if kind == "trajectories":
                for name in ("prompt", "ground_truth", "problem", "id", "domain", "exception", "end_reason", "outcome",
                             "outcome_why", "reward_parts", "fault"):  # fmt: skip
                    row[name] = NASTY
                long = "A" * 1_000_000 * (row["uid"] == "s2-p1")
                row["turns"] = [turn | {"text": NASTY + long, "server": NASTY} for turn in row["turns"]]
                hostile_call = dict.fromkeys(("code", "stdout", "stderr", "status", "fault", "tool"), NASTY)
                row["calls"] = [call | hostile_call for call in row["calls"]]
                row["verdict"] = dict.fromkeys(row["verdict"], NASTY)
            elif kind == "tokens":
                row["text"] = row["decision"] = NASTY
            else:
                row["what"] = NASTY
        store.write(path, kind, rows)
    return run_folder


def test_every_character_that_unicode_calls_ignorable_is_named() -> None:
    ignorable = [chr(code) for code in range(0x110000) if regex.match(r"\p{Default_Ignorable_Code_Point}", chr(code))]
    assert len(ignorable) > 4000
    assert [each for each in ignorable if text.plain(each) != f"<U+{ord(each):04X}>"] == []


PAGES = {
    "/run/0/step_000002": 200,
    "/run/0/all?text=%3Cscript%3E": 200,
    "/run/0/step_000002/group?uid=s2-p1&a=0&b=1": 200,
    "/run/0/step_000002/sample?uid=s2-p1&session=1&colour=decision": 200,
    "/run/0/step_000002/timeline": 200,
    "/run/0/step_000002/group?uid=s2-p1&export=1": 200,
    "/run/0/step_000002/group?uid=%3Cscript%3E": 404,
    "/run/0/step_000002/group?uid=s2-p1&a=0&b=%3Cscript%3E": 404,
    "/run/0/%3Cscript%3E": 404,
}


@pytest.mark.parametrize(("page", "status"), PAGES.items())
def test_hostile_text_is_escaped_and_pages_stay_small(viewer, hostile: Path, page: str, status: int) -> None:
    answer = viewer(hostile).get(page)
    assert answer.status_code == status
    shown = re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.S) if "export" in page else answer.text
    assert "<img" not in shown and "alert(1)</script>" not in shown and "<!--" not in shown
    shown = re.sub(r' value="[^"]*"', "", shown)  # what a form sends is as it was written
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\u200b]", shown)
    assert len(answer.text) < 2_000_000


def test_all_of_a_response_as_json_escapes_what_turns_or_hides_text(viewer, hostile: Path) -> None:
    answer = viewer(hostile).get("/run/0/step_000002/sample?uid=s2-p1&session=1&raw=1")
    assert answer.headers["content-type"].startswith("text/plain") and answer.text.isascii()
    turns = json.loads(answer.text)["turns"]
    assert any("\u202e" in turn["text"] for turn in turns), "all of it is there"


def test_an_answer_that_is_read_from_the_right_turns_no_arrow(viewer, hostile: Path) -> None:
    page = viewer(hostile).get("/run/0/step_000002/sample?uid=s2-p1&session=1").text
    assert re.search("<bdi>[^<]*</bdi> → <bdi>[^<]*</bdi></td>", page)


def test_numbers_have_four_digits_or_all_before_the_point() -> None:
    assert [*map(text.number, (None, 7, 0.123456, 9999.6, 12345.6, -1e6, 1e20))] == [
        *("–", "7", "0.1235", "10000", "12346", "-1000000", "1e+20")
    ]


def test_what_cannot_be_seen_is_named() -> None:
    assert text.plain("\x1b[1m\u202eabc\0\u0085") == "␛[1m<U+202E>abc␀<U+0085>"
    assert text.plain("tab\tline\r\nend é 中 אב") == "tab\tline\nend é 中 אב"
    assert text.plain("\ud800") == "<U+D800>" and text.plain(None) == ""


@pytest.mark.parametrize(
    ("first", "last"),
    [
        *((code, code) for code in (0xAD, 0x34F, 0x61C, 0x3164, 0xFEFF, 0xFFA0)),
        *((0x7F, 0x9F), (0x115F, 0x1160), (0x180B, 0x180F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F)),
        *((0xFE00, 0xFE0F), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F), (0xE0100, 0xE01EF), (0xD800, 0xDFFF)),
    ],
)
def test_every_character_without_a_look_is_named(first: int, last: int) -> None:
    for code in range(first, last + 1):
        assert text.plain(f"a{chr(code)}b") == f"a<U+{code:04X}>b"


def test_a_long_text_is_cut_and_counted() -> None:
    shown = text.cut("x" * 1_000_000)
    assert shown.startswith("x" * text.MAX_SHOWN + "\n… 980,000 more") and len(shown) < text.MAX_SHOWN + 100


@pytest.mark.parametrize("blank", ["\n", "  \n", "\n\t\n", "\n    "])
def test_blank_lines_of_a_program_cost_no_more_than_others_and_stay(blank: str) -> None:
    """The lexer looks through all blank lines that follow, at each of them: 20,000 characters took 5 s."""
    started = time.process_time()
    for before, behind in (("x = 1", "y = '<'"), ("", ""), ("s = '''a", "b'''")):
        code = before + blank * (text.MAX_SHOWN // len(blank) - 20) + behind
        shown = html.unescape(re.sub("<[^<>]*>", "", text.highlight(code)))
        assert shown == code.rstrip("\n") + "\n" * (len(code) - len(code.rstrip("\n")) or 1)
    assert time.process_time() - started < 1


def test_code_has_colours_and_loses_nothing() -> None:
    code = "\n\nfor i in range(3):\n    print('<b>', i)\n\n"
    marked = text.highlight(code)
    assert '<span class="k">for</span>' in marked and "&lt;b&gt;" in marked
    assert '<span class="nt">' in text.highlight('{"price": 3}')
