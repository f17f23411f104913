"""The pages, checked against values computed from the rows themselves, and who may ask for them."""

import html
import math
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest
from starlette.testclient import TestClient

from tests.unit.view.conftest import PORT, charts_of
from tests.unit.view.synthetic import write_step
from verl_ext.datasets.text import PROMPTS
from verl_ext.records import store
from verl_ext.view import data
from verl_ext.view.app import create_app


def test_a_click_opens_the_step_or_the_nearest_with_records(client: TestClient) -> None:
    assert client.get("/run/0/step/3", follow_redirects=False).headers["location"] == "/run/0/step_000003"
    nearest = "Step 90 has no records. This is the nearest step that has some."
    assert client.get("/run/0/step/90").url.path == "/run/0/step_000004"
    assert nearest in client.get("/run/0/step/90").text and nearest not in client.get("/run/0/step/4").text


def test_a_step_has_a_dot_per_sample_with_its_verdict(client: TestClient, run_folder: Path) -> None:
    rows = store.read(store.path_of(run_folder, "trajectories", 2)).to_pylist()
    kinds = Counter("none" if row["acc"] is None else "right" if row["acc"] else "wrong" for row in rows)
    page = client.get("/run/0/step_000002").text
    assert Counter(re.findall(r'class="dot (\w+)"', page)) == kinds
    assert page.count('<tr><th scope="row">') == 5
    assert re.findall(r'aria-label="sample (\d)', page) == ["0", "1", "2", "3"] * 5
    assert "all 4 judged samples have the score 1" in page and "does not meet" not in page


def test_what_misses_a_filter_is_said_not_only_pale(client: TestClient) -> None:
    page = client.get("/run/0/step_000002?exception=no+sandbox").text
    labels = re.findall(r'class="dot (\w+(?: miss)?)"[^>]* aria-label="([^"]*)"', page)
    assert [label for kind, label in labels if "miss" not in kind] == ["sample 3, not judged"]
    missed = [label for kind, label in labels if "miss" in kind]
    assert len(missed) == 3 and all(label.endswith(", does not meet the filter") for label in missed)


def shown_groups(page: str) -> list[str]:
    return re.findall(r'<th scope="row"><a href="/run/0/\w+/group\?uid=([^"]*)"', page)


@pytest.mark.parametrize(
    ("query", "meets"),
    [
        ({"wrong": "on"}, lambda row: row["acc"] == 0),
        ({"failed": "on"}, lambda row: any(call["fault"] for call in row["calls"])),
        ({"out": "on"}, lambda row: row["outcome"] not in (None, "open") and row["trained_step"] is None),
        ({"cut": "on"}, lambda row: row["end_reason"] == "max_tokens"),
        ({"wrong": "on", "failed": "on"}, lambda row: row["acc"] == 0 and any(call["fault"] for call in row["calls"])),
        ({"wrong": "on", "domain": "sums"}, lambda row: row["acc"] == 0 and row["domain"] == "sums"),
    ],
)
def test_marks_filter_alone_and_together(client: TestClient, run_folder: Path, query: dict, meets) -> None:
    path = store.path_of(run_folder, "trajectories", 3)
    ends = ("max_tokens", "answer", "answer", "sandbox_failure")
    store.rewrite(path, lambda rows: [row | {"end_reason": ends[row["session"]]} for row in rows])
    undecided = store.path_of(run_folder, "trajectories", 4)
    store.rewrite(undecided, lambda rows: [row | {"outcome": "open", "trained_step": None} for row in rows])
    rows = [row for file in store.files_of(run_folder) for row in store.read(file.path).to_pylist()]
    for address, among in (("all", rows), ("step_000003", store.read(path).to_pylist())):
        page = client.get(f"/run/0/{address}", params=query).text
        assert f"{sum(map(bool, map(meets, among)))} of {len(among)} rollouts" in page
    assert sum(map(bool, map(meets, rows))) > 0
    assert re.findall(r'name="(\w+)" checked', page) == [name for name in query if name != "domain"]


def test_groups_stand_by_mean_score_and_by_spread(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    scores = {0: [1.0, 1.0], 1: [-1.0, 1.0, None], 2: [0.5], 3: [None], 4: [0.9, 1.0, math.inf]}
    store.rewrite(
        path,
        lambda rows: [
            row | {"score": scores[row["index"]][row["session"]]}
            for row in rows
            if row["session"] < len(scores[row["index"]])
        ],
    )
    names = {f"s2-p{index}": index for index in scores}

    def order(sort: str) -> list[int]:
        return [names[uid] for uid in shown_groups(client.get("/run/0/step_000002", params={"sort": sort}).text)]

    assert order("") == [0, 1, 2, 3, 4]
    assert order("low") == [1, 2, 4, 0, 3]  # means 0, .5, .95, 1, none: what is no number is in no mean
    assert order("high") == [0, 4, 2, 1, 3]
    assert order("spread") == [1, 4, 0, 2, 3]  # sqrt 2, .0707, 0, none of fewer than two
    page = client.get("/run/0/step_000002?sort=spread&wrong=on").text
    assert 'aria-sort="descending"><a href="/run/0/step_000002?sort=spread&amp;wrong=on">Spread</a>' in page
    assert client.get("/run/0/step_000002?sort=uid;DROP").status_code == 400


def test_a_group_is_named_by_what_it_asks_and_a_file_by_its_step(viewer, run_folder: Path) -> None:
    user = PROMPTS["code"].format(problem="How many <b>primes</b> are there below ten?")
    asked = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    for file in store.files_of(run_folder):
        store.rewrite(file.path, lambda rows: [row | {"prompt": asked, "id": None} for row in rows])
    client, words = viewer(run_folder), "How many &lt;b&gt;primes&lt;/b&gt; are there below ten?"
    pages = (
        *("/run/0/step_000004", "/run/0/step_000004/group?uid=s4-p1", "/run/0/step_000004/sample?uid=s4-p1&session=1"),
        *("/run/0/all", "/problem?problem=p1", "/problems?a=0:last&b=0:val_000004", "/run/0/step_000004/timeline"),
    )
    for page in pages:
        text = client.get(page).text
        assert words in text and ("Step 4" in text or "problems" in page), page
        said = re.sub(r"<[^>]*>", " ", text)
        assert "step_000004" not in said and "val_000004" not in said, page
    assert "Validation, step 4" in client.get("/run/0/val_000004").text


def test_a_field_of_a_filter_has_the_text_that_was_asked_for(viewer, run_folder: Path) -> None:
    sign = '"\u2714\ufe0f" <b>'
    path = store.path_of(run_folder, "trajectories", 2)
    store.rewrite(path, lambda rows: [row | {"exception": sign, "prompt": sign, "domain": sign} for row in rows])
    asked = dict.fromkeys(("text", "exception", "domain"), sign)
    page = viewer(run_folder).get("/run/0/step_000002", params=asked).text
    assert "20 of 20 rollouts" in page
    fields = [*re.findall(r'<input [^>]*value="([^"]*)"', page), *re.findall(r'<option value="([^"]+)" selected', page)]
    assert [html.unescape(each) for each in fields] == [sign] * 3 and "<b>" not in page
    assert "text: &#34;✔&lt;U+FE0F&gt;&#34; &lt;b&gt;" in page  # what is read says what cannot be seen


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


def test_the_port_that_browsers_leave_out_is_answered(run_folder: Path) -> None:
    client = TestClient(create_app([data.Run(run_folder, "run_a", 0)], 80), base_url="http://127.0.0.1")
    answer = client.get("/")
    assert answer.request.headers["host"] == "127.0.0.1" and answer.status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_a_live_run_shows_its_new_step(client: TestClient, run_folder: Path) -> None:
    before = client.get("/state.json").text
    assert client.get("/state.json").text == before
    write_step(run_folder, 5)
    assert client.get("/state.json").text != before
    assert charts_of(client.get("/").text)["accuracy"]["x"] == [1, 2, 3, 4, 5]
    assert client.get("/run/0/step_000005").status_code == 200


def test_a_damaged_step_is_named_also_where_a_validation_of_it_is_whole(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 4)
    path.write_bytes(path.read_bytes()[:-100])
    answer = client.get("/run/0/step/4")
    assert answer.status_code == 404 and "Step 4 of run_a is damaged" in answer.text
    path.unlink()  # retention removed it
    assert client.get("/run/0/step/4").url.path == "/run/0/val_000004"


def test_an_unknown_address_says_what_there_is(client: TestClient) -> None:
    for address, says in (
        ("/run/7/all", "no run 7"),
        ("/run/0/step_000099", "step_000001"),
        ("/run/0/all?page=x", "whole number"),
    ):
        answer = client.get(address)
        assert 400 <= answer.status_code < 500 and says in answer.text


@pytest.mark.parametrize("address", ["/run/{}/all", "/run/{}/step_000002", "/run/0/step/{}"])
def test_a_number_of_thousands_of_digits_is_an_unknown_address(client: TestClient, address: str) -> None:
    assert client.get(address.format("1" * 5000)).status_code == 404


def test_an_error_of_ours_is_named_on_a_page_like_the_others(client: TestClient, monkeypatch) -> None:
    def fails(*_, **__):
        raise RuntimeError("<b>a cause")

    monkeypatch.setattr(data.Run, "ask", fails)
    client = TestClient(client.app, base_url=str(client.base_url), raise_server_exceptions=False)
    answer = client.get("/run/0/all")
    assert answer.status_code == 500 and "RuntimeError: &lt;b&gt;a cause" in answer.text
    assert answer.headers["content-security-policy"] == client.get("/").headers["content-security-policy"]


@pytest.mark.parametrize(
    "page",
    ["/?published=1", "/diagnose", "/problem?problem=p1", "/problems", "/problems?a=0:first&b=0:last",
     "/run/0/all?outcome=trained&page=0", "/run/0/step_000002", "/run/0/step_000002/timeline",
     "/run/0/step_000002/group?uid=s2-p1&a=0&b=1", "/run/0/step_000002/sample?uid=s2-p1&session=1&colour=ratio"],
)  # fmt: skip
def test_every_page_leads_to_itself_as_a_file_without_dead_controls(client: TestClient, page: str) -> None:
    link = html.unescape(re.search(r'<a href="([^"]*)">Save this page</a>', client.get(page).text)[1])
    assert unquote(link) == page + ("&" if "?" in page else "?") + "export=1"
    file = client.get(link).text
    assert not re.findall(r"<(a|form|button|select|input|nav)\b", file)
    assert "Permission is hereby granted" in file, "uPlot's licence"
    headings = [re.findall("<h[12]>.*?</h[12]>", each, re.S) for each in (client.get(page).text, file)]
    assert headings[0] and [re.sub("<[^>]*>", "", each) for each in headings[0]] == [
        re.sub("<[^>]*>", "", each) for each in headings[1]
    ]


def test_an_exported_page_needs_nothing_else(client: TestClient) -> None:
    answer = client.get("/?export=1")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "uPlot" in answer.text and not re.findall(r'<[^>]* (?:src|href|action)="[^#d]', answer.text)
