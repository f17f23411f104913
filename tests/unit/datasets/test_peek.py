"""A look at files that are whole, broken or missing, and samples of their rows."""

import json
import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.datasets.peek import FIRST, LONGEST, SPREAD, _text_bytes, count_rows, first_rows, sample
from verl_ext.datasets.rows import DataError


def rows(number: int) -> list[dict]:
    return [{"prompt": [{"role": "user", "content": "x"}], "n": i} for i in range(number)]


@pytest.fixture(params=["parquet", "jsonl"])
def write(request, tmp_path):
    def make(rows):
        path = tmp_path / f"a.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1500)
        else:
            path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")  # an empty line is no row
        return path

    return make


def test_a_small_file_is_its_own_sample(write):
    found = sample(write(rows(50)), "prompt", ["prompt", "n"])
    assert [row["n"] for _, row in found.rows] == [*range(50)] and found.total == 50
    assert found.columns.names == ["prompt", "n"]


def test_a_sample_has_the_first_rows_some_of_all_places_and_the_longest(write):
    many = rows(10_000)
    long = [300, 5003, 9998]
    for i in long:
        many[i]["prompt"].append({"role": "user", "content": "y" * (100 + i)})
    path = write(many)
    found = sample(path, "prompt", ["prompt", "n"])
    numbers = [row["n"] for _, row in found.rows]
    assert numbers == sorted(set(numbers)) and found.total == count_rows([path]) == 10_000
    assert {*range(FIRST), *range(0, 10_000, 10_000 // SPREAD), *long} <= {*numbers}
    assert len(numbers) <= FIRST + SPREAD + LONGEST + 100
    where, row = found.rows[-1]
    assert (row["n"], where.rpartition(", ")[2]) == (9998, "row 9998" if path.suffix == ".parquet" else "line 9999")


CHAT = [[{"role": "user", "content": "abc"}, {"role": "a", "content": None}], None, [], [{"role": "é", "content": ""}]]
MESSAGE = pa.struct({"role": pa.string(), "content": pa.large_string()})


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (["ab", None, "é"], pa.string(), [2, 0, 2]),
        (["ab", None, ""], pa.large_string(), [2, 0, 0]),
        (CHAT, pa.list_(MESSAGE), [8, 0, 0, 2]),  # user, abc, a
        (CHAT, pa.large_list(MESSAGE), [8, 0, 0, 2]),
        ([{"role": "ab", "content": "c"}, None], MESSAGE, [3, 0]),
        ([["ab", "c"], ["d"]], pa.list_(pa.string()), [3, 1]),
        ([1, None], pa.int64(), [0, 0]),
    ],
)
def test_the_length_of_a_value_is_that_of_all_its_texts(values, kind, expected):
    array = pa.array(values, kind)
    assert _text_bytes(array) == expected and _text_bytes(array.slice(1)) == expected[1:]


def test_a_column_that_is_not_there_is_left_out(write):
    assert "prompt" not in sample(write([{"n": 1}]), "prompt", ["prompt", "n"]).columns.names


def test_json_may_have_a_column_of_several_types(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "b": 1}\n{"a": "x", "b": 2}\n{"a": [], "b": null, "c": "\\ud83d"}\n')
    found = sample(path, "a", ["a"])
    assert [str(each.type) for each in found.columns] == ["null", "int64", "null"]


@pytest.mark.parametrize(
    ("name", "text"), [("a.parquet", ""), ("a.parquet", "PAR1"), ("a.jsonl", "{\n"), ("a.jsonl", "[]\n")]
)
def test_a_file_that_is_none_is_named(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=name):
        sample(tmp_path / name, "prompt", ["prompt"])
    assert count_rows([tmp_path / name]) is None or name == "a.jsonl"
    assert count_rows([tmp_path / "none.parquet"]) is None


def test_who_reads_problems_or_traces_imports_nothing_heavy():
    """The doctor's quick part does before every run."""
    code = (
        "import sys, verl_ext.datasets.problems, verl_ext.protocols.trace, verl_ext.protocols.by_name\n"
        "tool = {'name': 'f', 'description': '', 'parameters': {'type': 'object', 'properties': {}}}\n"
        "from verl_ext.protocols.tool_schemas import schemas_of\n"
        "assert schemas_of([tool])['f']['function']['name'] == 'f'\n"
        "sys.exit(','.join({'torch', 'verl', 'datasets', 'transformers', 'pandas', 'ray'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_are_counted_from_the_footers(tmp_path):
    path = tmp_path / "7.parquet"
    pd.DataFrame({"x": range(7)}).to_parquet(path)
    assert count_rows([path, path]) == 14
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert count_rows([tmp_path / "broken.parquet"]) is count_rows([tmp_path / "none.parquet"]) is None


def test_the_first_rows_have_the_columns_that_are_there(tmp_path):
    pd.DataFrame({"x": range(7), "y": 0}).to_parquet(tmp_path / "7.parquet")
    assert list(first_rows(tmp_path / "7.parquet", ["x", "z"], 2)) == [{"x": 0}, {"x": 1}]
    assert len(list(first_rows(tmp_path / "7.parquet", ["x"], None))) == 7
    (tmp_path / "2.jsonl").write_text(json.dumps({"x": 1}) + "\n[]\nno JSON\n" + json.dumps({"x": 2}))
    assert list(first_rows(tmp_path / "2.jsonl", ["x"], None)) == [{"x": 1}, {"x": 2}]
    assert list(first_rows(tmp_path / "none.jsonl", ["x"], None)) == []
