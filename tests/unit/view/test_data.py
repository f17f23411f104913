"""What is asked of the records: filters, and files that are damaged or written again."""

import re
from pathlib import Path

import duckdb
import pytest
from starlette.testclient import TestClient

from tests.unit.view.synthetic import write_run, write_step
from verl_ext.records import store
from verl_ext.view.data import Run


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


def test_a_truncated_file_is_named_and_the_rest_is_shown(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    path.write_bytes(path.read_bytes()[:-100])
    for page in ("/", "/run/0/all", "/run/0/step_000001"):
        answer = client.get(page)
        assert answer.status_code == 200 and str(path) in answer.text
    assert "of 80 rollouts" in client.get("/run/0/all").text
    assert client.get("/run/0/step_000002").status_code == 404


@pytest.mark.parametrize(
    "page",
    ["/run/0/step_000001", "/run/0/step_000002/group?uid=s2-p1", "/run/0/step_000002/sample?uid=s2-p1&session=1",
     "/run/0/step_000002/timeline", "/problem?problem=p1", "/problems", "/problems?a=0:first&b=0:last", "/code"],
)  # fmt: skip
def test_a_truncated_file_of_tokens_is_named_on_every_page(client: TestClient, run_folder: Path, page: str) -> None:
    path = store.path_of(run_folder, "tokens", 2)
    path.write_bytes(path.read_bytes()[:-100])
    answer = client.get(page)
    assert answer.status_code == 200 and f'role="alert">{path} cannot be read' in answer.text


def test_a_file_that_is_damaged_inside_is_named_and_the_rest_is_shown(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)  # the footer is whole
    path.write_bytes(content)
    answer = client.get("/run/0/all?text=Hence")
    assert answer.status_code == 200 and "of 80 rollouts" in answer.text and str(path) in answer.text


def test_a_step_that_is_written_again_is_read_again(client: TestClient, run_folder: Path) -> None:
    code, state = client.get("/code").text, client.get("/state.json").text
    write_step(run_folder, 2, seed=7)  # as after a resume
    assert client.get("/code").text != code and client.get("/state.json").text != state
    rows = store.read(store.path_of(run_folder, "trajectories", 2)).to_pylist()
    right = sum(row["acc"] == 1 for row in rows)
    assert client.get("/run/0/step_000002").text.count('class="dot right"') == right


@pytest.mark.parametrize("name", ["domain=aime", "acc=1", "uid=3", "key=zz"])
def test_a_folder_that_looks_like_a_partition_changes_no_column(viewer, tmp_path: Path, name: str) -> None:
    client = viewer(write_run(tmp_path / name))
    assert 'id="counts" role="status">20 of 20 rollouts, in 5 groups' in client.get("/run/0/step_000002").text
    assert client.get("/run/0/step_000002/group?uid=s2-p1").text.count('class="sample card"') == 4


def test_long_outputs_are_shown_and_a_query_beyond_the_memory_is_told(client, run_folder: Path, monkeypatch) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    rows = store.read(path).to_pylist()
    call = next(row["calls"][0] for row in rows if row["calls"])
    long = [row | {"calls": [call | {"stdout": str(i) * 2**15}] * 8} for i, row in enumerate(rows * 16)]
    store.write(path, "trajectories", [row | {"uid": f"{row['uid']}-{i // 20}"} for i, row in enumerate(long)])
    assert "320 of 320 rollouts" in client.get("/run/0/step_000002").text
    assert client.get("/run/0/step_000002?text=77777").status_code == 200
    assert client.get("/run/0/step_000002/group?uid=s2-p1-0").status_code == 200
    assert client.get("/run/0/step_000002/timeline").status_code == 200

    def too_large(*_, **__):
        raise duckdb.OutOfMemoryException("needs more")

    monkeypatch.setattr(Run, "ask", too_large)
    answer = client.get("/run/0/step_000002")
    assert answer.status_code == 413 and "more than 400MB of memory" in answer.text
