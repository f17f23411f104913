"""Parquet records: a round trip, half-written and truncated files, a full disk, retention."""

import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.records import store
from verl_ext.records.schema import ADDED, ADDED_WITHIN, CPU_KEY, SCHEMAS, TOKENS, TRAJECTORIES
from verl_ext.runs import parquet
from verl_ext.settings import RecorderSettings

ROW = {
    "uid": "u1",
    "session": 3,
    "step": 17,
    "validate": False,
    "prompt": "1+1?\x00\u202e\x1b[31m",
    "turns": [
        {"role": "model", "text": "<code>print(2)</code>", "tokens": 5, "start": 0, "call": 0}
        | {"server": "10.0.0.1:80", "started_s": 1.0, "generate_s": 2.0, "end": "", "shown": None}
        | {"parent": None, "row": 0, "fork": None},
        {"role": "tool", "text": "2", "shown": ["2"], "tokens": 1, "start": 5, "call": 0, "end": None}
        | dict.fromkeys(("server", "started_s", "generate_s", "parent", "fork"))
        | {"row": 0},
    ],
    "calls": [{"turn": 0, "tool": "python", "code": "print(2)", "stdout": "2", "status": "ok", "run_s": 0.25}],
    "version_spans": [{"start": 0, "end": 5, "version": 16, "row": 0}],
    "score": -1.0,
    "verdict": {"extracted": "2", "rule": "boxed"},
    "timings": {"generate_s": 0.5},
}


def test_rows_come_back_as_they_were_written_and_missing_columns_are_null(tmp_path):
    store.write(store.path_of(tmp_path, "trajectories", 17), "trajectories", [ROW])
    (row,) = store.rows(tmp_path)
    assert list(row) == TRAJECTORIES.names
    assert {name: row[name] for name in ("uid", "session", "prompt", "score")} == {
        name: ROW[name] for name in ("uid", "session", "prompt", "score")
    }
    assert row["turns"] == ROW["turns"] and row["version_spans"] == ROW["version_spans"]
    assert row["calls"][0]["run_s"] == 0.25 and row["calls"][0]["stderr"] is None
    assert row["verdict"] == {"extracted": "2", "normalised": None, "rule": "boxed", "text": None}
    assert row["acc"] is None and row["trained_step"] is None


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_kind_can_be_empty_and_says_its_version(tmp_path, kind):
    path = store.path_of(tmp_path, kind, 1)
    store.write(path, kind, [])
    assert store.read(path).schema.names == SCHEMAS[kind].names
    pa.parquet.write_table(pa.table({"uid": ["a"]}), path)
    with pytest.raises(parquet.Unreadable, match=f"{path} has records of version none; expected 3"):
        store.read(path)


def older_type(field):
    if not (added := ADDED_WITHIN.get(field.name)):
        return field.type
    return pa.list_(pa.struct([part for part in field.type.value_type if part.name not in added]))


def test_an_older_file_that_lacks_an_added_column_is_read_and_rewritten(tmp_path):
    path = store.path_of(tmp_path, "trajectories", 17)
    store.write(path, "trajectories", [ROW])
    (newer,) = store.read(path).to_pylist()
    types = [pa.field(each.name, older_type(each)) for each in TRAJECTORIES if each.name not in ADDED]
    schema = pa.schema(types, metadata=store.read(path).schema.metadata)
    older = pa.Table.from_pylist([newer], schema=schema)
    pq.write_table(older, path)
    (row,) = store.rows(tmp_path)
    assert row["uid"] == "u1" and not {"evidence", "agent"} & row.keys()
    assert row["turns"][0]["text"] == ROW["turns"][0]["text"] and not {"parent", "row"} & row["turns"][0].keys()
    assert [*store.rows(tmp_path, columns=["uid", "evidence"])] == [{"uid": "u1"}]
    store.rewrite(path, lambda rows: rows)
    rewritten = next(store.rows(tmp_path))
    assert rewritten["evidence"] is rewritten["turns"][0]["row"] is rewritten["version_spans"][0]["row"] is None
    pq.write_table(older.drop_columns(["uid"]), path)
    with pytest.raises(parquet.Unreadable, match="lacks columns of version 3, or they have another type: uid"):
        store.read(path)


def test_tokens_of_an_older_run_have_no_row(tmp_path):
    path = store.path_of(tmp_path, "tokens", 17)
    store.write(path, "tokens", [{"uid": "u", "session": 0, "row": 1, "position": 4}])
    assert next(store.rows(tmp_path, "tokens"))["row"] == 1 and store.read(path).schema.names == TOKENS.names
    pq.write_table(store.read(path).drop_columns(["row"]), path)
    assert "row" not in next(store.rows(tmp_path, "tokens"))


def test_a_step_is_listed_before_its_validation_and_by_number(tmp_path):
    for step, validate in ((10, True), (1000000, False), (10, False), (9, True)):
        store.write(store.path_of(tmp_path, "trajectories", step, validate=validate), "trajectories", [ROW])
    found = [(file.step, file.validate) for file in store.files_of(tmp_path)]
    assert found == [(9, True), (10, False), (10, True), (1000000, False)]


def test_a_truncated_file_is_named_and_the_others_are_read(tmp_path, caplog):
    for step in (1, 2, 3):
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [ROW | {"step": step}])
    cut = store.path_of(tmp_path, "trajectories", 2)
    cut.write_bytes(cut.read_bytes()[:-20])
    assert [file.step for file, _ in store.tables(tmp_path)] == [1, 3]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{cut} cannot be read")


def test_a_kill_before_the_rename_leaves_no_file_of_the_step(tmp_path, monkeypatch):
    path = store.path_of(tmp_path, "trajectories", 1)

    def killed(*args):
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "replace", killed)
        store.write(path, "trajectories", [ROW])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert store.files_of(tmp_path) == [] and len(list(path.parent.iterdir())) == 1
    assert store.sizes(tmp_path) == {}
    assert list(path.parent.iterdir()) == []


def test_what_another_process_is_writing_stays(tmp_path):
    """A second start of a run that is still going only cleans up what a dead writer has left."""
    path = store.path_of(tmp_path, "trajectories", 1)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:

        def rows():
            yield ROW
            os.write(tell, b"x")
            time.sleep(60)

        store.write(path, "trajectories", rows())
        os._exit(0)
    try:
        os.read(told, 1)
        store.sizes(tmp_path)
        assert len(list(path.parent.iterdir())) == 1
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    store.sizes(tmp_path)
    assert list(path.parent.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = store.path_of(tmp_path, "trajectories", 1)
    store.write(path, "trajectories", [ROW])

    def full(writer, table, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(path, "trajectories", [ROW, ROW])
    assert list(path.parent.iterdir()) == [path] and store.read(path).num_rows == 1


def test_a_file_written_again_keeps_its_notes(tmp_path):
    path = store.path_of(tmp_path, "trajectories", 1)
    store.write(path, "trajectories", [ROW, ROW | {"session": 4}], {CPU_KEY: "1.5"})
    store.rewrite(path, lambda rows: rows[1:])
    assert [row["session"] for row in store.rows(tmp_path)] == [4] and store.cpu_seconds(tmp_path) == {1: 1.5}


def test_the_cpu_seconds_are_those_of_the_files_that_can_be_read(tmp_path, caplog):
    paths = [store.path_of(tmp_path, "trajectories", step) for step in (1, 2)]
    for path in paths:
        store.write(path, "trajectories", [ROW], {CPU_KEY: "1.5"})
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    assert store.cpu_seconds(tmp_path) == {1: 1.5} and f"{paths[1]} cannot be read" in caplog.text


def limits(max_bytes):
    return RecorderSettings(token_share=0.0, keep_steps=3, max_gb=max_bytes / 2**30)


def test_retention_removes_the_oldest_steps_whole_and_keeps_the_newest_and_all_validations(tmp_path):
    for step in (1, 2, 3, 4):
        for kind in ("trajectories", "timeline"):
            store.write(store.path_of(tmp_path, kind, step), kind, [])
    store.write(store.path_of(tmp_path, "trajectories", 1, validate=True), "trajectories", [])
    store.write(store.path_of(tmp_path, "trajectories", 1, light=True), "trajectories", [])
    sizes = store.sizes(tmp_path)
    store.keep(tmp_path, sizes, limits(1e9))
    assert [file.step for file in store.files_of(tmp_path, "*")] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert sizes == store.sizes(tmp_path)
    store.keep(tmp_path, sizes, limits(2 * sizes[2]))
    assert [file.step for file in store.files_of(tmp_path) if not file.validate] == [3, 4]
    store.keep(tmp_path, sizes, limits(1))
    left = [(file.step, file.validate, file.light) for file in store.files_of(tmp_path)]
    assert left == [(1, True, False), (1, True, True), (4, False, False)]


def test_retention_keeps_what_waits_at_every_checkpoint_that_is_there(tmp_path):
    for step in (1, 2, 3, 4, 5, 6):
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [])
    for step in (1, 2, 3):
        store.write(store.path_of(tmp_path, "waiting", step), "waiting", [])
    (tmp_path / "global_step_2").mkdir()
    sizes = store.sizes(tmp_path)
    store.keep(tmp_path, sizes, limits(1e9))
    assert [file.step for file in store.files_of(tmp_path)] == [4, 5, 6] == sorted(sizes)
    assert [file.step for file in store.files_of(tmp_path, "waiting")] == [2, 3], "3 is the newest"
    assert store.sizes(tmp_path) == sizes


def test_long_rows_stand_in_small_row_groups_and_short_ones_in_one(tmp_path, monkeypatch):
    """Readers take a file one row group at a time."""
    monkeypatch.setattr(parquet, "GROUP_BYTES", 10_000)
    path = store.path_of(tmp_path, "trajectories", 1)
    for length, groups in ((10, 1), (2_000, 4)):
        store.write(path, "trajectories", [ROW | {"prompt": "x" * length}] * 16)
        assert pq.ParquetFile(path).num_row_groups == groups
        assert len(list(store.stream(path))) == store.read(path).num_rows == 16


def test_rows_of_a_step_are_one_row_group_however_many_are_made_at_once(tmp_path):
    """Each row group has its own pages of every column."""
    path = store.path_of(tmp_path, "trajectories", 1)
    store.write(path, "trajectories", [ROW] * 600)
    assert pq.ParquetFile(path).num_row_groups == 1 and store.read(path).num_rows == 600


@pytest.mark.parametrize("instead", [None, "text"])
def test_a_file_that_lacks_a_column_or_has_another_type_there_is_named(tmp_path, instead):
    path = store.path_of(tmp_path, "trajectories", 1)
    store.write(path, "trajectories", [ROW])
    table = store.read(path)
    other = table.drop_columns(["calls"])
    other = other if instead is None else other.append_column("calls", pa.array([instead]))
    pq.write_table(other.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(parquet.Unreadable, match="lacks columns of version 3, or they have another type: calls"):
        store.read(path)
