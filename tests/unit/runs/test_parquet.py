"""Parquet of any columns: written whole or not at all, and named if it cannot be read."""

import os

import pyarrow as pa
import pytest

from verl_ext.runs import parquet

SCHEMA = pa.schema({"x": pa.int32(), "text": pa.string()})


def test_rows_and_tables_come_back_with_their_notes(tmp_path):
    path = tmp_path / "new" / "a.parquet"
    assert parquet.write(path, ({"x": i} for i in range(600)), SCHEMA, {b"made": "today"}) == 600
    assert parquet.count_rows(path) == 600 and list(path.parent.iterdir()) == [path]
    table = parquet.read(path)
    assert table["x"].to_pylist() == list(range(600)) and table["text"].null_count == 600
    assert table.schema.metadata[b"made"] == b"today" and table.schema.names == ["x", "text"]
    assert parquet.write(path, table.slice(0, 3)) == 3, "a table has a schema"
    assert list(parquet.stream(path, ["x", "nowhere"])) == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert parquet.read(path, ["nowhere"]).num_columns == 0


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    def rows():
        yield {"x": 1}
        raise OSError(28, os.strerror(28))

    path = tmp_path / "a.parquet"
    parquet.write(path, [{"x": 7}], SCHEMA)
    with pytest.raises(OSError, match="No space"):
        parquet.write(path, rows(), SCHEMA)
    assert parquet.read(path)["x"].to_pylist() == [7] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("read", [parquet.read, parquet.count_rows, lambda path: list(parquet.stream(path))])
def test_what_is_not_parquet_or_is_truncated_is_named(tmp_path, read):
    path = tmp_path / "a.parquet"
    for content in (b"", b"PAR1", b"no Parquet at all"):
        path.write_bytes(content)
        with pytest.raises(parquet.Unreadable, match=f"{path} cannot be read .*truncated or changed"):
            read(path)
    parquet.write(path, [{"x": 1}], SCHEMA)
    content = bytearray(path.read_bytes())
    content[-60:-20] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(parquet.Unreadable, match=f"{path} cannot be read"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "gone.parquet")


def test_other_columns_are_refused_by_who_asks(tmp_path):
    def check(path, schema):
        raise parquet.Unreadable(f"{path.name} has {schema.names}")

    parquet.write(tmp_path / "a.parquet", [{"x": 1}], SCHEMA)
    for read in (parquet.read, parquet.stream):
        with pytest.raises(parquet.Unreadable, match="a.parquet has .'x', 'text'."):
            list(read(tmp_path / "a.parquet", check=check))
