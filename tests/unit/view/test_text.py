"""Hostile text stays inert on every page that shows what a model or its program wrote."""

import json
import re
from pathlib import Path

import pytest

from verl_ext.records import store

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
