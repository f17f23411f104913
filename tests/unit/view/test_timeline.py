"""The timeline of a step: its lanes, and what the trainer waited for."""

import html
import math
import re
import time
from pathlib import Path

import pyarrow.parquet  # noqa: F401  pa.parquet
import pytest
from starlette.testclient import TestClient

from tests.unit.view.synthetic import START_S, STEP_S, intervals
from verl_ext.records import store
from verl_ext.view import timeline


def interval(lane: str, what: str, start: float, end: float, session: int | None = None) -> dict:
    uid = None if session is None else "p0"
    return {"lane": lane, "what": what, "start_s": start, "end_s": end, "uid": uid, "session": session, "own": True}


ROWS = [
    interval("trainer", "wait", 0, 10),
    interval("trainer", "update", 10, 20),
    interval("a:1", "generate", 0, 4, 0),
    interval("a:1", "generate", 1, 9, 1),
    interval("a:1", "generate", 5, 6, 2),
    interval("tool", "tool", 3, 4, 0),
]


def test_intervals_of_a_lane_that_overlap_stand_in_rows_and_in_thousandths_of_the_step() -> None:
    trainer, server, tool = timeline.lanes(ROWS)
    assert (trainer["name"], server["name"], tool["name"]) == ("trainer", "a:1", "tool")
    assert [[each["session"] for each in row] for row in server["rows"]] == [[0, 2], [1]]
    assert (trainer["rows"][0][1]["x"], trainer["rows"][0][1]["width"]) == (500, 500)
    assert server["seconds"] == {"generate": 13} and timeline.lanes([]) == []


def test_the_longest_intervals_of_a_lane_are_listed_with_links(client: TestClient, run_folder: Path) -> None:
    _, server, _ = timeline.lanes(ROWS)
    assert [(each["s"], each["session"]) for each in server["longest"]] == [(8, 1), (4, 0), (1, 2)]
    page = client.get("/run/0/step_000002/timeline").text
    trainer = store.read(store.path_of(run_folder, "timeline", 2)).to_pylist()
    start, end = min(each["start_s"] for each in trainer), max(each["end_s"] for each in trainer)
    of_server: dict[str, list[float]] = {}
    for row in store.read(store.path_of(run_folder, "trajectories", 2)).to_pylist():
        for turn in row["turns"]:
            if turn["server"]:
                ended = min(end, turn["started_s"] + turn["generate_s"])
                of_server.setdefault(turn["server"], []).append(ended - max(start, turn["started_s"]))
    for server, seconds in of_server.items():
        part = page.split(f"Longest in {server}")[1].split("</details>")[0]
        listed = re.findall(r"<li>generate ([\d.]+) s, <a href=\"([^\"]*)\">", part)
        longest = sorted(seconds, reverse=True)[: timeline.LONGEST]
        assert [float(shown) for shown, _ in listed] == pytest.approx(longest, abs=0.01)
    assert client.get(html.unescape(listed[0][1])).status_code == 200


def test_what_lies_outside_the_trainers_time_is_cut_and_counted() -> None:
    early, late, gone = (interval("a:1", "generate", *ends, 0) for ends in ((-9000, 5), (15, 900), (-9000, -8000)))
    inside, outside = timeline.clip([*ROWS, early, late, gone])
    assert inside == [*ROWS, early | {"start_s": 0}, late | {"end_s": 20}] and outside == 3
    assert timeline.clip(ROWS[2:]) == (ROWS[2:], 0) and timeline.clip([]) == ([], 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, None])
def test_a_time_that_none_can_be_is_left_out(client: TestClient, run_folder: Path, value: float | None) -> None:
    recorded, path = len(intervals(run_folder, 2)), store.path_of(run_folder, "timeline", 2)
    first, *rows = store.read(path).to_pylist()
    store.write(path, "timeline", [first | {"end_s": value}, *rows])
    path = store.path_of(run_folder, "trajectories", 2)
    store.rewrite(path, lambda rows: [rows[0] | {"timings": {"ended_s": value, "score_s": 0.1}}, *rows[1:]])
    events = client.get("/run/0/step_000002/timeline.json").json()["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == recorded - 2
    assert client.get("/run/0/step_000002/timeline").status_code == 200


def test_a_wait_names_what_ended_last_and_how_long_it_was_alone() -> None:
    # Session 1 ends at 9, the others at 6 and before: 3 s by itself.
    (wait,) = timeline.waits(ROWS)
    assert (wait["s"], wait["last"]["session"], wait["alone_s"]) == (10, 1, 3)


def test_a_wait_is_for_rollouts_of_its_step() -> None:
    other = interval("a:1", "generate", 2, 9.5, 3) | {"own": False}
    (wait,) = timeline.waits([*ROWS, other])
    assert (wait["last"]["session"], wait["alone_s"]) == (1, 3)


def test_what_ran_in_a_step_and_was_decided_later_stands_in_its_timeline(client: TestClient, run_folder: Path) -> None:
    """As in the asynchronous modes; otherwise a busy server looks idle."""
    url, began = "/run/0/step_000002/timeline", START_S + 2 * STEP_S + 3.0
    before = client.get(url).text

    def earlier(row: dict) -> dict:
        turns = [row["turns"][0] | {"started_s": began, "generate_s": 2.0, "server": "127.0.0.1:9009"}]
        return row | {"turns": turns, "calls": [], "timings": {"started_s": began, "ended_s": began + 2}}

    path = store.path_of(run_folder, "trajectories", 3)
    store.rewrite(path, lambda rows: [earlier(row) if row["session"] == 0 else row for row in rows])
    page = client.get(url).text
    assert '<h3>127.0.0.1:9009 <span class="note">generate 10 s</span></h3>' in page  # 5 prompts, 2 s each
    assert "9009" not in before and "9009" not in client.get("/run/0/step_000001/timeline").text


def test_the_rollouts_of_a_validation_stand_in_the_time_of_its_step(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 4, validate=True)
    store.rewrite(path, lambda rows: [row | {"turns": [row["turns"][0] | {"server": "val:1"}]} for row in rows])
    assert "<h3>val:1 <" in client.get("/run/0/step_000004/timeline").text


def test_the_page_names_the_last_rollout(client: TestClient, run_folder: Path) -> None:
    rows = intervals(run_folder, 3)
    last = max((row for row in rows if row["lane"] != "trainer"), key=lambda row: row["end_s"])
    wait = next(row for row in rows if row["what"] == "wait")
    page = client.get("/run/0/step_000003/timeline").text
    said = re.sub("<[^>]+>", "", re.search("<li>(.*?)</li>", page)[1])
    assert said.startswith(f"{wait['end_s'] - wait['start_s']:.4g} s for sample {last['session']} of What is ")
    assert re.search(rf" \({last['what']}\), which ended \S+ s after all others\.$", said)
    assert "in the trainer's time" not in page
    assert page.count("<rect class=") == len(rows) + len(timeline.WHATS)


def test_every_server_has_a_lane_with_the_seconds_that_it_wrote(client: TestClient, run_folder: Path) -> None:
    page = client.get("/run/0/step_000003/timeline").text
    for lane in ("127.0.0.1:9000", "127.0.0.1:9001", "tool", "score"):
        seconds: dict[str, float] = {}
        for row in intervals(run_folder, 3):
            if row["lane"] == lane:
                seconds[row["what"]] = seconds.get(row["what"], 0.0) + row["end_s"] - row["start_s"]
        told = ", ".join(f"{what} {total:.4g} s" for what, total in seconds.items())
        assert f'<h3>{lane} <span class="note">{told}</span></h3>' in page


def test_a_validation_has_no_trainer(client: TestClient) -> None:
    assert "<h3>127.0.0.1:9001 <" in (page := client.get("/run/0/val_000004/timeline").text)
    assert "<h3>trainer" not in page


def test_a_step_without_times_says_so(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    store.rewrite(path, lambda rows: [row | {"turns": [], "calls": [], "timings": None} for row in rows])
    store.path_of(run_folder, "timeline", 2).unlink()
    assert "No times of this step were recorded" in client.get("/run/0/step_000002/timeline").text


def test_thousands_of_intervals_that_overlap_are_placed_at_once() -> None:
    rows = [interval("a:1", "generate", i / 1000, 100 + i / 1000, i) for i in range(8000)]
    began = time.process_time()
    (lane,) = timeline.lanes(rows)
    assert len(lane["rows"]) == 8000 and time.process_time() - began < 2
