import json

import pytest

from verl_ext.datasets.problems import features, read_problems
from verl_ext.datasets.rows import DataError, field, read_rows, write_parquet


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


ROW = {
    "data_source": "d",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train", "id": "a"},
}


def test_parquet_gives_back_what_was_written_and_leaves_no_part(tmp_path):
    path = tmp_path / "new" / "a.parquet"
    assert write_parquet([ROW, ROW | {"data_source": "e"}], path, features()) == 2
    assert [row for _, row in read_rows(str(path))] == [ROW, ROW | {"data_source": "e"}]
    assert [where for where, _ in read_rows(str(path))] == [f"{path}, row 0", f"{path}, row 1"]
    assert list(path.parent.iterdir()) == [path]


def test_a_broken_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet([ROW], path, features())

    def rows():
        yield ROW | {"data_source": "new"}
        raise KeyError("broken")

    with pytest.raises(KeyError):
        write_parquet(rows(), path, features())
    assert [row for _, row in read_rows(str(path))] == [ROW]


def test_a_folder_is_read_file_by_file_and_lines_are_counted_with_empty_ones(tmp_path):
    write(tmp_path / "b.jsonl", {"x": 1}, "", {"x": 2})
    write_parquet([ROW], tmp_path / "a.parquet", features())
    found = list(read_rows(str(tmp_path)))
    assert [where.rpartition("/")[2] for where, _ in found] == [
        "a.parquet, row 0",
        "b.jsonl, line 1",
        "b.jsonl, line 3",
    ]
    assert [row for _, row in found[1:]] == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"x": 1}', '{"x": '], r"a.jsonl, line 2: Expecting value.*; found .*x.*. Expected one JSON object per line"),
        (["[1]"], r"a.jsonl, line 1: it is not a JSON object; found '\[1\]'. Expected one JSON object per line"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        list(read_rows(write(tmp_path / "a.jsonl", *lines)))


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "nothing.parquet", "nothing"])
def test_a_source_that_is_neither_file_nor_hub_name_is_refused(source):
    with pytest.raises(DataError, match=f"{source} does not exist and does not have the form owner/name"):
        list(read_rows(source))


def test_files_of_other_kinds_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match="a.csv is neither"):
        list(read_rows(write(tmp_path / "a.csv", "x")))
    with pytest.raises(DataError, match="has no file"):
        list(read_rows(str(tmp_path)))


def test_without_a_network_the_hub_is_named_and_the_way_out(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match="owner/name cannot be read: no route\n.*name the parquet or JSONL file instead"
    ):
        list(read_rows("owner/name"))


@pytest.mark.parametrize(
    ("source", "asked"), [("owner/name", ("owner/name",)), ("openai/gsm8k/main", ("openai/gsm8k", "main"))]
)
def test_a_data_set_of_the_hub_may_have_subsets(monkeypatch, source, asked):
    import datasets

    told = []

    def load(*args, split, streaming):
        told.append((args, split))
        return [{"question": "1+1"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [row for _, row in read_rows(source, split="test")] == [{"question": "1+1"}] and told == [(asked, "test")]


def test_a_local_file_may_have_a_name_that_is_a_pattern_for_the_hubs_library(tmp_path):
    path = tmp_path / "a[1].parquet"
    write_parquet([ROW], path, features())
    assert list(read_rows(str(path))) == [(f"{path}, row 0", ROW)]


def test_a_broken_parquet_file_is_named_and_not_the_hub(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet([ROW], path, features())
    whole = path.read_bytes()
    for broken in (b"no parquet", whole[:-9], whole[:4] + b"\xff" * 400 + whole[404:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="a.parquet cannot be read") as error:
            list(read_rows(str(path)))
        assert "hub" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("answer", r"^f, row 3, column answer: the row has no answer; it has data_source, prompt, ability"),
        (
            "reward_model.truth",
            r"^f, row 3, column reward_model.truth: the row has no reward_model.truth; it has style",
        ),
        ("ability.x", r"column ability.x: the row has no ability.x; there it has 'math'"),
        ("prompt.1.content", r"column prompt.1.content: the row has no prompt.1.content; there it has None"),
        ("prompt.content", r"column prompt.content: the row has no prompt.content; there it has \["),
        ("extra_info.index", r"column extra_info.index: found 0; expected str"),
        ("prompt", r"column prompt: found \[\{.*; expected str"),
    ],
)
def test_a_missing_or_mistyped_column_is_named_with_its_row(column, message):
    with pytest.raises(DataError, match=message):
        field(ROW, column, "f, row 3")


def test_the_row_and_column_that_break_the_schema_are_named(tmp_path):
    path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": "1"}, {"problem": "q", "answer": None})
    with pytest.raises(DataError, match=r"a.jsonl, line 2, column answer: found None; expected str or int"):
        list(read_problems(path))
    path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": True})
    with pytest.raises(DataError, match=r"line 1, column answer: found True"):
        list(read_problems(path))
    path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": [1, 2]})
    with pytest.raises(DataError, match=r"line 1, column answer: found \[1, 2\]; expected one answer. For several"):
        list(read_problems(path))
    path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": float("inf")})
    with pytest.raises(DataError, match=r"line 1, column answer: found inf; expected a finite number"):
        list(read_problems(path))
    path = write(tmp_path / "a.jsonl", {"text": "p", "label": "1"})
    with pytest.raises(
        DataError, match=r"line 1: no known columns .*; the row has text, label. Expected one of: prompt"
    ):
        list(read_problems(path))
    assert [(p.text, p.answer) for p in read_problems(path, columns=("text", "label"))] == [("p", "1")]


def test_answers_may_be_numbers(tmp_path):
    path = write(tmp_path / "a.jsonl", *({"problem": "p", "answer": answer} for answer in (0.5, 3.0, -7, 1e22)))
    assert [problem.answer for problem in read_problems(path)] == ["0.5", "3", "-7", "1" + 22 * "0"]


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW | {"prompt": [{"role": "system", "content": "s"}, *ROW["prompt"]]},
        ROW | {"prompt": "1+1?"},
        {"id": "a", "problem": "1+1?", "answer": 2},
        {"ID": "a", "Problem": "1+1?", "Answer": "2"},
        {"id": "a", "question": " 1+1?\n", "answer": " 2"},
        {"id": "a", "input": "1+1?", "output": "2"},
    ],
)
def test_the_columns_of_public_data_sets_are_known(tmp_path, row):
    row = row | {"extra_info": {"index": "a"}}
    (problem,) = read_problems(write(tmp_path / "a.jsonl", row))
    assert (problem.text, problem.answer, problem.id) == ("1+1?", "2", "a")
