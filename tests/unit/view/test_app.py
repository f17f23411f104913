"""The run page and the step page, and who may ask for them, against values computed from the rows themselves."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.view.conftest import PORT
from tests.unit.view.synthetic import write_run, write_step
from verl_ext.records import store
from verl_ext.view import curves


def charts_of(html: str) -> dict[str, dict]:
    found = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)]
    return {chart["title"]: chart for chart in found}


def test_curves_are_the_values_of_the_metrics_file(client: TestClient, run_folder: Path) -> None:
    logged = [json.loads(line) for line in (run_folder / "metrics-1790000000.jsonl").read_text().splitlines()]
    chart = charts_of(client.get("/").text)["accuracy"]
    assert chart["x"] == [line["step"] for line in logged] == [1, 2, 3, 4]
    assert chart["series"][0]["y"] == [line["data"]["train/acc"] for line in logged]
    assert chart["series"][0]["run"] == 0


def test_runs_are_overlaid_and_the_published_one_is_a_preset(viewer, run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "run_b", seed=18, steps=2)
    chart = charts_of(viewer(run_folder, other).get("/?published=1").text)["score"]
    names = {line["name"]: line for line in chart["series"]}
    assert list(names) == ["run_a", "run_b", "published"] and names["published"]["run"] is None
    at = dict(zip(chart["x"], names["run_b"]["y"], strict=True))
    assert at[2] is not None and at[4] is None  # a run without a value has a hole, and no invented number
    published = {line["step"]: line["data"] for line in map(json.loads, curves.PUBLISHED.open())}
    assert names["published"]["y"][chart["x"].index(10)] == published[10]["critic/score/mean"]


def test_a_collapsing_entropy_is_a_sentence_with_the_line_that_helps(client: TestClient) -> None:
    # 0.5 x 0.7^step: the mean of steps 1 and 2 is 0.2975, of steps 3 and 4 0.1458; not below 0.3 x 0.2975.
    assert "No alarm" in client.get("/").text


@pytest.mark.parametrize(
    ("key", "values", "says", "heading"),
    [
        ("actor/entropy", [0.5, 0.5, 0.1, 0.1], "entropy collapses: from 0.5 to 0.1", "## Entropy falls"),
        ("actor/entropy", [0.1, 0.1, 0.5, 0.5], "entropy grows", "## Entropy rises"),
        ("tool/code_ratio", [0.8, 0.8, 0.2, 0.2], "80.0% of the responses ran code, now 20.0%", "## It trains, but"),
        ("train/truncation_rate", [0, 0, 0.2, 0.2], "cut by the budget: 0.0%, now 20.0%", "- Truncated"),
        ("failure/share_aborted", [0.1], "10.0% of the responses end as aborted", "## Responses are kept out"),
        ("training/rollout_actor_probs_pearson_corr", [0.9], "correlate by 0.900 only", "- `training/rollout_actor"),
    ],
)
def test_an_alarm_links_to_the_line_that_helps(viewer, tmp_path, key, values, says, heading) -> None:
    lines = [{"step": step, "data": {key: value}} for step, value in enumerate(values, 1)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = viewer(tmp_path / "run").get("/").text
    sentence = re.search(r'<ul class="alarms"><li>(.*?)</li></ul>', html)[1]
    assert says in sentence
    line = int(re.search(r'href="/diagnose#L(\d+)"', sentence)[1])
    assert curves.DIAGNOSE.read_text().splitlines()[line - 1].startswith(heading)
    assert f'id="L{line}"' in viewer(tmp_path / "run").get("/diagnose").text


def test_a_click_opens_the_step_or_the_nearest_with_records(client: TestClient) -> None:
    assert client.get("/run/0/step/3", follow_redirects=False).headers["location"] == "/run/0/step_000003"
    assert client.get("/run/0/step/90", follow_redirects=False).headers["location"] == "/run/0/step_000004"


def test_a_step_has_a_dot_per_sample_with_its_verdict(client: TestClient, run_folder: Path) -> None:
    rows = store.read(store.path_of(run_folder, "trajectories", 2)).to_pylist()
    kinds = Counter("none" if row["acc"] is None else "right" if row["acc"] else "wrong" for row in rows)
    html = client.get("/run/0/step_000002").text
    assert Counter(re.findall(r'class="dot (\w+)"', html)) == kinds
    assert html.count('<tr><th scope="row">') == 5
    assert re.findall(r'aria-label="sample (\d)', html) == ["0", "1", "2", "3"] * 5
    assert "all 4 judged samples have the score 1" in html


def has(text: str):
    def check(row: dict) -> bool:
        texts = [row["prompt"], *(turn["text"] for turn in row["turns"])]
        return any(
            text in each for each in texts + [c["stdout"] for c in row["calls"]] + [c["stderr"] for c in row["calls"]]
        )

    return check


@pytest.mark.parametrize(
    ("query", "meets"),
    [
        ({}, lambda row: True),
        ({"outcome": "equal"}, lambda row: row["outcome"] == "equal"),
        ({"end": "sandbox_failure"}, lambda row: row["end_reason"] == "sandbox_failure"),
        ({"exception": "no sandbox"}, lambda row: "no sandbox" in (row["exception"] or "")),
        ({"exception": "NameError"}, lambda row: any(call["status"] == "NameError" for call in row["calls"])),
        ({"exception": "ok"}, lambda row: False),  # the status of a call that raised nothing
        ({"domain": "sums", "outcome": "trained"}, lambda row: (row["domain"], row["outcome"]) == ("sums", "trained")),
        ({"text": "NameError"}, has("NameError")),
        ({"text": "it's 100%_"}, has("it's 100%_")),
    ],
)
@pytest.mark.parametrize("key", ["all", "step_000003"])
def test_filters_count_what_meets_them(client: TestClient, run_folder: Path, key: str, query: dict, meets) -> None:
    wanted = [file.path for file in store.files_of(run_folder) if key in ("all", file.path.stem)]
    rows = [row for path in wanted for row in store.read(path).to_pylist()]
    hits = [row for row in rows if meets(row)]
    html = client.get(f"/run/0/{key}", params=query).text
    groups = len({(row["validate"], row["uid"]) for row in hits})
    assert f"{len(hits)} of {len(rows)} rollouts, in {groups} groups" in html
    assert len(re.findall(r'class="dot \w+"', html)) == len(hits)


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/", headers={"Host": host})
    assert answer.status_code == 421 and "run_a" not in answer.text


def test_localhost_is_answered_and_nothing_may_be_loaded_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/", headers={"Host": f"localhost:{PORT}"})
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', answer.text)
    assert client.post("/").status_code == 405


def test_a_truncated_file_is_named_and_the_rest_is_shown(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    path.write_bytes(path.read_bytes()[:-100])
    for page in ("/", "/run/0/all", "/run/0/step_000001"):
        answer = client.get(page)
        assert answer.status_code == 200 and str(path) in answer.text
    assert "of 80 rollouts" in client.get("/run/0/all").text
    assert client.get("/run/0/step_000002").status_code == 404


def test_a_file_that_is_damaged_inside_is_named_and_the_rest_is_shown(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)  # the footer is whole
    path.write_bytes(content)
    answer = client.get("/run/0/all?text=Hence")
    assert answer.status_code == 200 and "of 80 rollouts" in answer.text and str(path) in answer.text


def test_a_live_run_shows_its_new_step(client: TestClient, run_folder: Path) -> None:
    before = client.get("/state.json").text
    assert client.get("/state.json").text == before
    write_step(run_folder, 5)
    assert client.get("/state.json").text != before
    assert charts_of(client.get("/").text)["accuracy"]["x"] == [1, 2, 3, 4, 5]
    assert client.get("/run/0/step_000005").status_code == 200


def test_a_step_that_is_written_again_is_read_again(client: TestClient, run_folder: Path) -> None:
    code, state = client.get("/code").text, client.get("/state.json").text
    write_step(run_folder, 2, seed=7)  # as after a resume
    assert client.get("/code").text != code and client.get("/state.json").text != state
    rows = store.read(store.path_of(run_folder, "trajectories", 2)).to_pylist()
    right = sum(row["acc"] == 1 for row in rows)
    assert client.get("/run/0/step_000002").text.count('class="dot right"') == right


def test_an_unknown_address_says_what_there_is(client: TestClient) -> None:
    for address, says in (
        ("/run/7/all", "no run 7"),
        ("/run/0/step_000099", "step_000001"),
        ("/run/0/all?page=x", "whole number"),
    ):
        answer = client.get(address)
        assert 400 <= answer.status_code < 500 and says in answer.text


def test_an_exported_page_needs_nothing_else(client: TestClient) -> None:
    answer = client.get("/?export=1")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "uPlot" in answer.text and not re.findall(r'<[^>]* (?:src|href|action)="[^#d]', answer.text)
