"""Queries of the records: filters, and files that are damaged or rewritten."""

import json
import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from tests.unit.view.synthetic import write_run, write_step
from verl_ext.records import store
from verl_ext.records.schema import LOST_KEY
from verl_ext.view import data
from verl_ext.view.data import Run


def has(text: str):
    def check(row: dict) -> bool:
        said = [call[name] for call in row["calls"] for name in ("code", "stdout", "stderr")]
        return any(text in each for each in (row["prompt"], *(turn["text"] for turn in row["turns"]), *said))

    return check


@pytest.mark.parametrize(
    ("query", "meets"),
    [
        ({}, lambda row: True),
        ({"outcome": "equal"}, lambda row: row["outcome"] == "equal"),
        ({"end": "sandbox_failure"}, lambda row: row["end_reason"] == "sandbox_failure"),
        ({"exception": "no sandbox"}, lambda row: "no sandbox" in (row["exception"] or "")),
        ({"exception": "NameError"}, lambda row: any(c["fault"] and "NameError" in c["stderr"] for c in row["calls"])),
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


def test_code_is_found_though_json_escapes_it_in_the_text(client: TestClient, run_folder: Path) -> None:
    path, code = store.path_of(run_folder, "trajectories", 2), 'print("needle")'
    first, *rows = store.read(path).to_pylist()
    turn, call = {"role": "model", "text": json.dumps(code)}, {"turn": 0, "code": code}
    store.write(path, "trajectories", [first | {"turns": [turn], "calls": [call]}, *rows])
    assert "1 of 20 rollouts" in client.get("/run/0/step_000002", params={"text": code}).text


def test_what_a_program_raised_is_found_by_the_last_line_of_its_traceback(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    first, *rows = store.read(path).to_pylist()
    traceback = "Traceback (most recent call last):\n  File DomainError\nnumpy.linalg.LinAlgError: Singular matrix\n"
    call = {"turn": 0, "status": "other", "fault": "model", "stderr": traceback}
    store.write(path, "trajectories", [first | {"calls": [call]}, *rows])
    for word, hits in (("LinAlgError", 1), ("DomainError", 0), ("other", 1)):
        assert f"{hits} of 20 rollouts" in client.get("/run/0/step_000002", params={"exception": word}).text


def test_what_the_records_lack_is_told(client: TestClient, run_folder: Path) -> None:
    assert "has no record" not in client.get("/").text
    for step, lost in ((1, "0"), (2, "3"), (3, "1")):
        path = store.path_of(run_folder, "trajectories", step)
        store.write(path, "trajectories", store.read(path), {LOST_KEY: lost})
    for page in ("/", "/run/0/step_000001"):
        assert f"{run_folder} has no records of 4 groups" in client.get(page).text
    store.path_of(run_folder, "trajectories", 3).unlink()
    assert "has no records of 3 groups" in client.get("/").text


def test_steps_without_records_are_named(client: TestClient, run_folder: Path) -> None:
    """Steps 1 to 10, of which 1 and 2 were removed by retention, 3, 4, 6 are recorded; 9 and 10 may be on their way."""
    for step in (5, 6):
        write_step(run_folder, step)
    for step in (1, 2, 5):
        store.path_of(run_folder, "trajectories", step).unlink()
    lines = [json.dumps({"step": step, "data": {"timing_s/step": 1.0}}) for step in range(1, 11)]
    (run_folder / "metrics-1790000001.jsonl").write_text("\n".join(lines) + "\n")
    assert f"{run_folder} has metrics but no records of 3 steps from 5 to 8." in client.get("/").text
    for step in (5, 7, 8):
        write_step(run_folder, step)
    assert "no records" not in client.get("/").text


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def retype(path: Path) -> None:
    """The calls are texts."""
    table = store.read(path)
    other = table.drop_columns(["calls"]).append_column("calls", pa.array(["x"] * len(table)))
    pq.write_table(other.replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize("damage", [truncate, retype])
def test_a_damaged_file_is_named_and_the_rest_is_shown(client: TestClient, run_folder: Path, damage) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    damage(path)
    for page in ("/", "/run/0/all", "/run/0/step_000001"):
        answer = client.get(page)
        assert answer.status_code == 200 and str(path) in answer.text
    assert "of 80 rollouts" in client.get("/run/0/all").text
    for page in ("/run/0/step_000002", "/run/0/step_000002/group?uid=s2-p1", "/run/0/step/2"):
        answer = client.get(page)
        assert answer.status_code == 404
        assert f"Step 2 of run_a is damaged, or cannot be read now: {path}" in answer.text
    assert client.get("/run/0/step/3").status_code == client.get("/run/0/step/90").status_code == 200


@pytest.mark.parametrize(
    "page",
    ["/run/0/step_000001", "/run/0/step_000002/group?uid=s2-p1", "/run/0/step_000002/sample?uid=s2-p1&session=1",
     "/run/0/step_000002/timeline", "/problem?problem=p1", "/problems", "/problems?a=0:first&b=0:last"],
)  # fmt: skip
def test_a_truncated_file_of_tokens_is_named_on_every_page(client: TestClient, run_folder: Path, page: str) -> None:
    path = store.path_of(run_folder, "tokens", 2)
    truncate(path)
    answer = client.get(page)
    assert answer.status_code == 200 and f'role="alert">{path} cannot be read' in answer.text


def test_a_file_that_is_damaged_inside_is_named_and_the_rest_is_shown(client: TestClient, run_folder: Path) -> None:
    path = store.path_of(run_folder, "trajectories", 2)
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)  # the footer is whole
    path.write_bytes(content)
    group = client.get("/run/0/step_000002/group?uid=s2-p1")  # finds it
    assert group.status_code == 404 and f"is damaged, or cannot be read now: {path}" in group.text
    answer = client.get("/run/0/all?text=Hence")
    assert answer.status_code == 200 and "of 80 rollouts" in answer.text and str(path) in answer.text


@pytest.mark.parametrize(("module", "name"), [(store, "read"), (data, "read_metrics")])
def test_what_an_error_hides_that_passes_is_shown_after(client: TestClient, monkeypatch, module, name: str) -> None:
    def fails():
        raise OSError(24, "Too many open files")

    read, passed = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *arguments: read(*arguments) if passed or arguments == ([],) else fails())
    assert "Too many open files" in client.get("/").text
    passed.append(True)
    page = client.get("/").text
    assert "Too many" not in page and "4 steps and 1 validation with records" in page and "accuracy" in page


def test_a_file_that_is_gone_when_it_is_read_is_not_called_damaged(client, run_folder: Path, monkeypatch) -> None:
    def lists(*arguments):
        found = files_of(*arguments)
        store.path_of(run_folder, "trajectories", 1).unlink(missing_ok=True)
        return found

    files_of = store.files_of
    monkeypatch.setattr(store, "files_of", lists)
    page = client.get("/").text
    assert 'role="alert"' not in page and "3 steps and 1 validation with records" in page


def test_a_query_answers_though_files_vanish_each_time_it_is_tried(client, run_folder: Path, monkeypatch) -> None:
    def connect():
        if going:
            going.pop().unlink()
        return database()

    going, database = [store.path_of(run_folder, "trajectories", step) for step in (1, 2, 3)], data.database
    monkeypatch.setattr(data, "database", connect)
    answer = client.get("/run/0/all")
    assert answer.status_code == 200 and "40 of 40 rollouts" in answer.text and 'role="alert"' not in answer.text


def test_a_quickstart_that_was_opened_in_its_sft_shows_its_rl_once_there_is_one(viewer, tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "metrics-1.jsonl").write_text('{"step": 1, "data": {"train/loss": 0.5}}\n')
    client = viewer(tmp_path)
    page = client.get("/").text
    assert "SFT loss" in page and "0 steps and 0 validations with records" in page
    write_run(tmp_path / "rl")
    page = client.get("/").text
    assert "SFT loss" not in page and "4 steps and 1 validation with records" in page


def test_a_step_that_is_written_again_is_read_again(client: TestClient, run_folder: Path) -> None:
    state = client.get("/state.json").text
    write_step(run_folder, 2, seed=7)  # as after a resume
    assert client.get("/state.json").text != state
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


def test_a_query_that_needs_too_much_leaves_nothing_in_the_working_directory(run_folder, tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    small = duckdb.connect(config=data.DATABASE | {"memory_limit": "30MB"})
    monkeypatch.setattr(data, "database", lambda: small)
    with pytest.raises(duckdb.OutOfMemoryException):
        Run(run_folder, "run_a", 0).ask("SELECT * FROM (SELECT hash(range) AS h FROM range(3000000)) ORDER BY h")
    assert list(Path.cwd().iterdir()) == []
