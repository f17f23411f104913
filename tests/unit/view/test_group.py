"""The samples of a prompt: clusters by answer, the diff of two, the transcript of one."""

import html
import math
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from verl_ext.episode import Episode, EpisodeKey
from verl_ext.outcome import RolloutEnd
from verl_ext.records import store
from verl_ext.records.trajectories import problem_columns, to_record
from verl_ext.view import group

GROUP = "/run/0/step_000002/group"


def rows_of(run_folder: Path, uid: str = "s2-p1") -> list[dict]:
    rows = store.read(store.path_of(run_folder, "trajectories", 2)).to_pylist()
    return [row for row in rows if row["uid"] == uid]


def test_clusters_are_by_answer_right_ones_first_and_what_was_not_judged_last(run_folder: Path) -> None:
    rows = rows_of(run_folder)
    clusters = group.clusters(rows)
    assert clusters[0][0] == rows[0]["ground_truth"] and all(row["acc"] == 1 for row in clusters[0][1])
    assert clusters[-1][0] == "not judged" and [row["session"] for row in clusters[-1][1]] == [3]
    assert sorted(row["session"] for _, members in clusters for row in members) == [0, 1, 2, 3]
    for answer, members in clusters[:-1]:
        assert {row["verdict"]["normalised"] for row in members} == {answer}


def test_equal_answers_are_one_cluster_however_they_are_written() -> None:
    rows = [{"acc": acc, "verdict": {"normalised": said}} for said, acc in (("1/2", 1.0), ("2", 0.0), ("0.5", 1.0))]
    rows += [{"acc": 0.0, "verdict": {"normalised": said}} for said in ("3", r"\frac{1}{3}", "1/3")]
    found = [(name, len(members)) for name, members in group.clusters(rows)]
    assert found == [("1/2 = 0.5", 2), (r"\frac{1}{3} = 1/3", 2), ("2", 1), ("3", 1)]


def test_the_group_page_shows_code_output_and_answer_of_every_sample(client: TestClient, run_folder: Path) -> None:
    rows = rows_of(run_folder)
    page = client.get(GROUP, params={"uid": "s2-p1"}).text
    articles = re.findall(r'<article class="sample card" aria-label="sample (\d)">(.*?)</article>', page, re.S)
    assert len(articles) == len(rows) == 4
    for session, article in articles:
        row, shown = rows[int(session)], html.unescape(re.sub(r"<[^>]+>", "", article))
        for call in row["calls"]:
            assert call["code"] in shown and call["stdout"] in shown and call["stderr"] in shown
        assert f"score {group_number(row['score'])}" in shown and row["verdict"]["extracted"] in shown
    judged = [row["score"] for row in rows if row["score"] is not None]
    assert f"mean score {statistics.fmean(judged):.4g}" in page
    assert f"sample standard deviation {statistics.stdev(judged):.4g}" in page


def group_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def test_an_advantage_can_be_computed_from_what_the_page_says(client: TestClient, run_folder: Path) -> None:
    rows = rows_of(run_folder)
    scores = [row["score"] for row in rows if row["score"] is not None]
    for row in rows[:3]:
        page = client.get("/run/0/step_000002/sample", params={"uid": "s2-p1", "session": row["session"]}).text
        shown = float(re.search(r'<th scope="row">Advantage</th><td>(.*?)</td>', page)[1])
        expected = (row["score"] - statistics.fmean(scores)) / statistics.stdev(scores)
        assert math.isclose(shown, expected, rel_tol=1e-3)


def response(*lines: str) -> dict:
    return {"turns": [{"role": "model", "text": "\n".join(lines)}], "calls": []}


def test_a_diff_pairs_lines_and_leaves_out_what_is_the_same_and_far_away() -> None:
    same = [str(number) for number in range(20)]
    assert group.diff(response("a", "b"), response("a", "b")) == []
    assert group.diff(response("a", "b"), response("a", "c", "d")) == [
        ("same", "a", "a"),
        ("changed", "b", "c"),
        ("changed", None, "d"),
    ]
    rows = group.diff(response("x", *same, "y"), response("X", *same, "Y"))
    assert rows[4] == ("far", None, None) and len(rows) == 1 + 3 + 1 + 3 + 1


@pytest.mark.parametrize(
    ("left", "right", "rows"),
    [
        ("a\n", "a", [("same", "a", "a"), ("changed", "", None)]),
        ("a\fb", "a\nb", [("changed", "a\fb", "a"), ("changed", None, "b")]),
        ("1\n" * group.MAX_LINES + "a", "1\n" * group.MAX_LINES + "b", [("cut", None, None)]),
    ],
)
def test_responses_that_differ_are_not_called_the_same(viewer, run_folder: Path, left, right, rows) -> None:
    assert group.diff(response(left), response(right)) == rows
    path, texts = store.path_of(run_folder, "trajectories", 2), {0: left, 1: right}
    turn = {"role": "model", "tokens": 1, "start": 0}
    store.rewrite(path, lambda all: [row | {"turns": [turn | {"text": texts.get(row["session"])}]} for row in all])
    page = viewer(run_folder).get(GROUP, params={"uid": "s2-p1", "a": "0", "b": "1"}).text
    assert "The two responses are the same." not in page
    assert ("The first 2000 lines are the same; later lines differ." in page) == (rows[0][0] == "cut")


def test_the_diff_of_two_samples_is_on_the_page(client: TestClient) -> None:
    page = client.get(GROUP, params={"uid": "s2-p1", "a": "0", "b": "1"}).text
    assert "Sample 0 against sample 1" in page and '<td class="del">' in page and '<td class="ins">' in page


def test_the_transcript_says_whose_fault_a_call_was_and_how_long_it_took(client: TestClient, run_folder: Path) -> None:
    page = client.get("/run/0/step_000002/sample", params={"uid": "s2-p1", "session": 3}).text
    assert "fault: infrastructure" in page and "ConnectError: no sandbox" in page
    assert ", 750 ms, of which the program ran 0 ms, exit code " in page and "attempts 3" in page
    ran = next(row for row in rows_of(run_folder) if row["calls"] and row["session"] < 3)
    page = client.get("/run/0/step_000002/sample", params={"uid": "s2-p1", "session": ran["session"]}).text
    run_ms = 125 * (1 + ran["session"])
    assert f", {250 + run_ms} ms, of which the program ran {run_ms} ms, exit code " in page


def test_a_call_that_could_not_be_run_has_no_tool_and_no_times(client: TestClient, run_folder: Path) -> None:
    call = {"turn": 0, "status": "malformed:bad_json", "fault": "model", "stdout": "FormatError"}
    store.rewrite(store.path_of(run_folder, "trajectories", 2), lambda rows: [row | {"calls": [call]} for row in rows])
    page = client.get("/run/0/step_000002/sample", params={"uid": "s2-p1", "session": 0}).text
    assert "malformed:bad_json, fault: model</span></p>" in page and "None" not in page and " ms, of" not in page


def test_a_call_that_was_not_run_is_marked_on_the_group_page(client: TestClient, run_folder: Path) -> None:
    call = {"turn": 0, "tool": "python", "code": "print(1)", "status": "not_run"}
    store.rewrite(store.path_of(run_folder, "trajectories", 2), lambda rows: [row | {"calls": [call]} for row in rows])
    assert '<span class="badge">not_run</span>' in client.get(GROUP, params={"uid": "s2-p1"}).text


def test_a_diff_of_two_loops_takes_no_half_minute() -> None:
    left, right = response(*["a", "b"] * 1000), response(*["a", "a", "b"] * 666)  # 28 s if all pairs are compared
    began = time.process_time()
    assert group.diff(left, right) and time.process_time() - began < 2


def test_a_number_that_is_none_is_null_in_what_is_exported(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    store.rewrite(path, lambda rows: [row | {"advantage": math.nan} for row in rows])
    row = client.get("/run/0/step_000002/sample", params={"uid": "s2-p1", "session": 0, "raw": 1}).text
    assert '"advantage": null' in row


def test_what_is_not_there_is_said(client: TestClient) -> None:
    assert client.get(GROUP, params={"uid": "nobody"}).status_code == 404
    for page, query in (("sample", {"session": 9}), ("group", {"a": 0, "b": 99}), ("group", {"a": "", "b": 0})):
        answer = client.get(f"/run/0/step_000002/{page}", params={"uid": "s2-p1", **query})
        assert answer.status_code == 404 and "This group has the sessions 0, 1, 2, 3." in answer.text


def test_a_page_of_long_texts_cuts_each_so_far_that_it_stays_small(client: TestClient, run_folder: Path) -> None:
    call = {
        "turn": 0,
        "tool": "python",
        "status": "ok",
        "code": "x = 1\n" * 3000,
        "stdout": "1 " * 16000,
        "stderr": "é",
    }
    path = store.path_of(run_folder, "trajectories", 2)
    assert "Each text is cut" not in client.get(GROUP, params={"uid": "s2-p1"}).text
    store.rewrite(path, lambda rows: [row | {"calls": [call] * 10} for row in rows])
    page = re.sub("<[^>]+>", "", client.get(GROUP, params={"uid": "s2-p1"}).text)
    # 4 samples x 10 calls: 80 texts of 18,000 and more, and 40 of one, have at most 1,249 each, 20,000 / 2^5 = 625.
    assert "Each text is cut after 625 characters" in page and page.count("… 17,375 more characters") == 40


def test_the_reward_is_shown_by_its_parts() -> None:
    ours = {"reward_parts": '{"acc": 1.0, "reward_base": 1.0, "reward_overlong": -0.5, "method": "number"}'}
    assert group.rewards(ours) == "reward_base 1.0, reward_overlong -0.5"
    assert group.rewards({"reward_parts": '{"bleu": 0.25}'}) == "bleu 0.25"
    assert group.rewards({"reward_parts": "[1]"}) == "[1]" and group.rewards({"reward_parts": None}) == ""


@pytest.mark.parametrize("session", [0, 7])
def test_a_rollout_that_raised_is_shown_on_every_page(client: TestClient, run_folder: Path, session: int) -> None:
    """Nothing is known of it except what it raised: prompt, verdict, turns, calls and score are null."""
    path = store.path_of(run_folder, "trajectories", 1)
    sample = {"uid": "s1-p1", "global_steps": 1, "extra_info": {"id": "sum/1"}, "data_source": "sums"}
    raised = Episode(EpisodeKey("s1-p1", session), finish_reason=RolloutEnd.RAISED, exception="OSError: a lost server")
    row = problem_columns(sample, validate=False) | to_record(replace(raised, started_s=1.0, ended_s=2.0))
    others = [each for each in store.read(path).to_pylist() if (each["uid"], each["session"]) != ("s1-p1", session)]
    store.rewrite(path, lambda _: [row | {"outcome": "failed"}, *others])
    for page in ("/run/0/step_000001/group", "/run/0/step_000001/sample"):
        answer = client.get(page, params={"uid": "s1-p1", "session": session})
        assert answer.status_code == 200 and "ended by" in answer.text.lower() and "None" not in answer.text
        assert "What is 11 + 107?" in answer.text or page.endswith("sample")
    step = client.get("/run/0/step_000001").text
    assert "None" not in step and step.count('title="What is 11 + 107?"') == 1
    assert "OSError: a lost server" in answer.text
    for page in ("/run/0/step_000001", "/problems?a=0:first&b=0:last", "/problem?problem=p1", "/run/0/export.eval"):
        assert client.get(page).status_code == 200


def test_right_and_wrong_samples_without_an_answer_are_two_clusters() -> None:
    """Samples of a verifier that finds no answer, but judges the text."""
    rows = [{"acc": acc, "verdict": None, "session": i} for i, acc in enumerate((0.0, 1.0, 0.0))]
    found = [(name, [row["session"] for row in members]) for name, members in group.clusters(rows)]
    assert found == [("", [1]), ("", [0, 2])]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e308])
def test_a_score_that_is_no_number_leaves_mean_and_deviation_of_the_others(value: float) -> None:
    assert group.spread([{"score": score} for score in (1.0, value, -1.0, None)]) == (0.0, math.sqrt(2))
    assert group.spread([{"score": score} for score in (1.0, value)]) is None
