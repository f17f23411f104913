"""Files that are damaged or not files, and unexpected values: a page names them, and the rest is shown."""

import copy
import functools
import itertools
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from starlette.testclient import TestClient

from tests.unit.view.synthetic import write_run
from verl_ext.records import store
from verl_ext.records.schema import TOKENS
from verl_ext.view import data

PAGES = (
    "/", "/state.json", "/problem?problem=p1", "/problems?a=0:first&b=0:last", "/run/0/all?text=x&failed=on",
    "/run/0/step_000002?sort=spread", "/run/0/step_000002/timeline", "/run/0/step_000002/timeline.json",
    "/run/0/step_000002/group?uid=s2-p1&a=0&b=1", "/run/0/step_000002/sample?uid=s2-p1&session=1",
    "/run/0/step_000002/sample?uid=s2-p1&session=1&colour=ratio", "/run/0/export.eval",
)  # fmt: skip
RECORDS = Path("records") / "trajectories"


def statuses(client: TestClient) -> dict[str, int]:
    return {page: client.get(page).status_code for page in PAGES}


class Ending:
    """A database that one file ends, as DuckDB's does by an internal error: from then on it answers nothing."""

    def __init__(self, path: Path, connect: Callable, config: dict) -> None:
        self._path, self._real, self._ended = str(path), connect(**config), False

    def cursor(self) -> "Ending":
        return self

    def __enter__(self) -> "Ending":
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute(self, sql: str, values: dict | None = None) -> None:
        self._ended |= self._path in (values or {}).get("paths", ())
        if self._ended:
            raise duckdb.FatalException("FATAL Error: the database has been invalidated\n\nStack Trace: ...")
        self._cursor = self._real.cursor()
        self._cursor.execute(sql, values or {})

    def __getattr__(self, name: str) -> object:
        return getattr(self._cursor, name)


def test_a_file_that_ends_the_database_is_named_and_all_other_runs_are_shown(viewer, tmp_path, monkeypatch) -> None:
    folders = [write_run(tmp_path / name, steps=3) for name in ("run_a", "run_b")]
    path = store.path_of(folders[0], "trajectories", 2)
    ending = functools.partial(Ending, path, duckdb.connect)
    monkeypatch.setattr(duckdb, "connect", lambda **config: ending(config))
    data._connect.cache_clear()
    try:
        client = viewer(*folders)
        page = client.get("/run/0/all")
        assert page.status_code == 200 and "of 60 rollouts" in page.text
        assert f"{path} cannot be read (FATAL Error: the database has been invalidated)" in page.text
        assert client.get("/run/0/step_000002").status_code == 404
        assert "20 of 20 rollouts" in client.get("/run/1/step_000002").text
        assert "80 of 80 rollouts" in client.get("/run/1/all").text
    finally:
        data._connect.cache_clear()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"PAR1",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-4] + b"XXXX",
        lambda content: b'{"step": 1}\n' * 100,
        lambda content: b"\0" * len(content),
        lambda content: content.replace(b"What is", b"What\xff\xfes"),  # not UTF-8: only DuckDB checks
        lambda content: content.replace(b"uid", b"u\xffd"),
    ],
)
@pytest.mark.parametrize("kind", ["trajectories", "tokens", "timeline"])
def test_a_damaged_file_of_any_kind_is_named_and_ends_no_page(viewer, small_run: Path, damage, kind: str) -> None:
    path = store.path_of(small_run, kind, 2)
    content = damage(path.read_bytes())
    if content == path.read_bytes():
        pytest.skip("the file has no such bytes")
    path.write_bytes(content)
    client = viewer(small_run)
    found = statuses(client)
    assert set(found.values()) <= {200, 404}, found
    assert found["/"] == found["/run/0/all?text=x&failed=on"] == 200 and str(path) in client.get("/").text
    assert client.get("/run/0/step_000001").status_code == 200


def fifo(path: Path) -> None:
    os.mkfifo(path)


def in_a_circle(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


def listening(path: Path) -> None:
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (fifo, "a FIFO"),
        (Path.mkdir, "a folder"),
        (in_a_circle, "a circular link"),
        (listening, "a socket"),
        (lambda path: path.symlink_to("gone"), "a link to a missing file"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
    ],
)
@pytest.mark.parametrize("name", [RECORDS / "step_000009.parquet", Path("metrics-9.jsonl")])
def test_what_is_no_file_is_named_and_not_waited_for(
    viewer, run_folder: Path, monkeypatch, make: Callable[[Path], None], what: str, name: Path
) -> None:
    monkeypatch.chdir(run_folder)
    make(run_folder / name)
    page = viewer(run_folder).get("/")
    assert page.status_code == 200 and "4 steps and 1 validation with records" in page.text
    assert f"{run_folder / name} is {what}" in page.text and "accuracy" in page.text


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=2, prompts=2, words=5)


def change(rows: list[dict], path: tuple, values: list) -> list[dict]:
    rows = copy.deepcopy(rows)
    for row, value in zip(rows, itertools.cycle(values), strict=False):
        place = row
        for step in path[:-1]:
            place = place[step] if place else None
        if place:
            place[path[-1]] = value
    return rows


FIRST_CALL = [json.dumps({"first_call_token": each}) for each in ("x", [1], math.inf, math.nan, -1, 1e308, True)]
NUMBERS = [None, math.inf, -math.inf, math.nan, 1e308]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("tool_use",), ["[1]", '"x"', "{", "7", None, *FIRST_CALL]),
        (("reward_parts",), ["[1]", "{", "null", '{"reward_a": NaN}', None]),
        *(((name,), [None]) for name in ("session", "end_reason", "uid", "problem", "verdict", "timings", "turns")),
        *((("timings", name), NUMBERS) for name in ("ended_s", "started_s")),
        *((("calls", 0, name), NUMBERS) for name in ("run_s", "started_s")),
        *((("turns", 0, name), [None]) for name in ("role", "text", "tokens")),
        (("turns", 0, "start"), [None, 2**31 - 1, -(2**31)]),
        *(((name, 0), [None]) for name in ("turns", "calls", "version_spans")),
        *((("calls", 0, name), [None]) for name in ("turn", "code", "status")),
        *(((name,), NUMBERS) for name in ("score", "acc")),
    ],
)
def test_values_that_nobody_expects_end_no_page(viewer, small_run: Path, path: tuple, values: list) -> None:
    """Each in other rollouts of a step."""
    file = store.path_of(small_run, "trajectories", 2)
    store.rewrite(file, lambda rows: change(rows, path, values))
    found = statuses(viewer(small_run))
    assert set(found.values()) <= {200, 404}, found


def test_nulls_among_the_tokens_end_no_page(viewer, small_run: Path) -> None:
    file = store.path_of(small_run, "tokens", 2)
    rows, names = store.read(file).to_pylist(), itertools.cycle(TOKENS.names[3:])
    store.write(file, "tokens", [row | {next(names): None} for row in rows])
    assert set(statuses(viewer(small_run)).values()) == {200}
