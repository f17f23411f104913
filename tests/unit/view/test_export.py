"""A run as inspect_ai's log, and a step's time as Chrome's trace.

The form of the log was checked once against inspect_ai 0.3.285, whose `read_eval_log` and `read_eval_log_sample` took
it; the package is not a dependency, so what they read is tested here.
"""

import io
import itertools
import json
import re
import statistics
import zipfile
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.view.synthetic import intervals
from verl_ext.records import store
from verl_ext.view import export
from verl_ext.view.data import Run


def test_an_eval_log_of_no_rollout_is_whole(run_folder: Path, tmp_path: Path) -> None:
    assert export.write_eval(Run(run_folder, "run_a", 0), [], tmp_path / "empty.eval") == 0
    with zipfile.ZipFile(tmp_path / "empty.eval") as log:
        assert json.loads(log.read("summaries.json")) == []
        assert json.loads(log.read("header.json"))["results"]["total_samples"] == 0


def test_an_eval_log_has_every_rollout_with_its_score_or_its_error(client: TestClient, run_folder: Path) -> None:
    answer = client.get("/run/0/export.eval")
    rows = [
        row | {"key": file.path.stem}
        for file in store.files_of(run_folder)
        for row in store.read(file.path).to_pylist()
    ]
    with zipfile.ZipFile(io.BytesIO(answer.content)) as log:
        header = json.loads(log.read("header.json"))
        samples = {
            (row["key"], row["uid"], row["session"]): json.loads(
                log.read(f"samples/{row['key']}/{row['uid']}_epoch_{row['session'] + 1}.json")
            )
            for row in rows
        }
        summaries = json.loads(log.read("summaries.json"))
        assert len(rows) == 100
        assert len(log.namelist()) == len(rows) + 3
    assert {(each["id"], each["epoch"], each["input"], str(each["scores"]), each["error"]) for each in summaries} == {
        (each["id"], each["epoch"], each["input"], str(each["scores"]), each["error"] and each["error"]["message"])
        for each in samples.values()
    }
    assert "sandbox_failure: ConnectError: no sandbox" in {each["error"] for each in summaries}
    judged = [row["acc"] for row in rows if row["acc"] is not None]
    assert header["version"] == 2 and header["status"] == "success" and header["results"]["total_samples"] == 100
    assert header["results"]["scores"][0]["metrics"]["mean"]["value"] == statistics.fmean(judged)
    for row in rows:
        sample = samples[row["key"], row["uid"], row["session"]]
        assert sample["target"] == row["ground_truth"]
        assert (sample["error"] is None) == bool(sample["scores"]) == (row["acc"] is not None)
        if row["acc"] is not None:
            assert sample["scores"]["acc"]["value"] == row["acc"]
        calls = [call for message in sample["messages"] for call in message.get("tool_calls") or []]
        assert [call["arguments"]["code"] for call in calls] == [call["code"] for call in row["calls"]]
        answers = [message for message in sample["messages"] if message["role"] == "tool"]
        assert [message["tool_call_id"] for message in answers] == [call["id"] for call in calls]
        assert sample["output"]["completion"] == row["turns"][-1]["text"]


@pytest.mark.parametrize("at", [slice(4, 2000), slice(-100, None)])  # inside, and the footer
def test_an_eval_log_that_lacks_a_damaged_file_says_so(client: TestClient, run_folder: Path, at: slice) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    content = bytearray(path.read_bytes())
    content[at] = bytes(len(content[at]))
    path.write_bytes(content)
    with zipfile.ZipFile(io.BytesIO(client.get("/run/0/export.eval").content)) as log:
        header = json.loads(log.read("header.json"))
    assert header["results"]["total_samples"] == 80 and header["status"] == "error"
    assert str(path) in header["error"]["message"] and header["error"].keys() == {
        "message", "traceback", "traceback_ansi"
    }  # fmt: skip


def test_a_trace_has_every_interval_in_microseconds_and_none_of_a_thread_overlap(
    client: TestClient, run_folder: Path
) -> None:
    rows = intervals(run_folder, 2)
    events = client.get("/run/0/step_000002/timeline.json").json()["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    start = min(row["start_s"] for row in rows)
    assert sorted((e["name"], round(e["ts"]), round(e["dur"])) for e in spans) == sorted(
        (r["what"], round((r["start_s"] - start) * 1e6), round((r["end_s"] - r["start_s"]) * 1e6)) for r in rows
    )
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(names.values()) == {row["lane"] for row in rows}
    for thread in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == thread)
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(own))
    assert export.trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_a_group_is_one_file_that_needs_nothing_else(client: TestClient) -> None:
    answer = client.get("/run/0/step_000002/group?uid=s2-p1&export=1")
    assert 'filename="run_0_step_000002_group_s2-p1.html"' in answer.headers["content-disposition"]
    assert "Content-Security-Policy" in answer.text and "print(11 + 107)" in re.sub("<[^>]+>", "", answer.text)
    assert ' href="/' not in answer.text and " src=" not in answer.text


def test_a_dot_without_its_link_keeps_its_name_for_a_screen_reader(client: TestClient) -> None:
    page = client.get("/run/0/step_000002?export=1").text
    dots = re.findall(r'<span[^>]*class="dot[^>]*>', page)
    assert len(dots) == 20 and all('role="img"' in dot and "aria-label=" in dot for dot in dots)


@pytest.mark.parametrize("when", ["listed", "opened"])
def test_a_file_that_is_removed_while_a_run_is_exported_is_left_out(client, run_folder, monkeypatch, when: str) -> None:
    def stream(path: Path):
        if (path.stem == "step_000001" and when == "listed") or path == gone:
            gone.unlink()
        return read(path)

    gone, read = store.path_of(run_folder, "trajectories", 3), store.stream
    monkeypatch.setattr(store, "stream", stream)
    with zipfile.ZipFile(io.BytesIO(client.get("/run/0/export.eval").content)) as log:
        assert json.loads(log.read("header.json"))["results"]["total_samples"] == 80


def test_an_export_that_fails_leaves_no_file(client: TestClient, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(store, "stream", lambda path: [1 / 0])
    before = set(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError):
        client.get("/run/0/export.eval")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=9-1"}])
def test_an_export_leaves_no_file(client: TestClient, monkeypatch, tmp_path: Path, headers) -> None:
    """Also after a wrong range, which Starlette's FileResponse refuses before it runs its background task."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    answer = client.get("/run/0/export.eval", headers=headers)
    assert answer.status_code == 200 and int(answer.headers["content-length"]) == len(answer.content) > 0
    assert zipfile.is_zipfile(io.BytesIO(answer.content)) and set(tmp_path.iterdir()) == before


def test_a_name_that_no_header_takes_is_left_out_of_the_files(client: TestClient) -> None:
    answer = client.get("/", params={"export": 1, "uid": "中"})
    assert answer.status_code == 200 and 'filename="runs.html"' in answer.headers["content-disposition"]
