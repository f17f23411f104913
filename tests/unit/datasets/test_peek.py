"""A look at files that are whole, broken or missing."""

import json

import pandas as pd

from verl_ext.datasets.peek import count_rows, first_rows


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
