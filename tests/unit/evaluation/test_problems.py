import json

import pytest

from verl_ext.datasets.rows import DataError
from verl_ext.evaluation.problems import NAMES, fingerprint, read_sets

ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("protocol", ["code", "hermes"])
def test_aime_is_there_by_name_with_the_protocols_instructions(protocol):
    rows = read_sets(["aime_2024", "aime_2025"], protocol=protocol)
    assert NAMES == ("aime_2024", "aime_2025")
    assert len(rows) == 60 and len({row["uid"] for row in rows}) == 60
    first = rows[30]
    assert (first["uid"], first["data_source"], first["reward_model"]["ground_truth"]) == (
        "aime_2025:0",
        "aime_2025",
        "70",
    )
    content = first["raw_prompt"][0]["content"]
    assert "<code>" in content if protocol == "code" else "<code>" not in content


def test_a_built_in_set_that_is_a_domain_has_the_instructions_of_its_protocol():
    rows = read_sets(["aime_2024", "aime_2025"], protocol="code", of_domains={"aime_2025": "hermes"}, limit=1)
    by_run, by_domain = (row["raw_prompt"][-1]["content"] for row in rows)
    assert by_run == read_sets(["aime_2024"], protocol="code", limit=1)[0]["raw_prompt"][-1]["content"]
    assert by_domain == read_sets(["aime_2025"], protocol="hermes", limit=1)[0]["raw_prompt"][-1]["content"]
    assert by_domain != read_sets(["aime_2025"], protocol="code", limit=1)[0]["raw_prompt"][-1]["content"]


def test_the_instructions_of_a_protocol_make_no_other_problem():
    names = [[row["problem"] for row in read_sets(NAMES, protocol=protocol)] for protocol in ("code", "hermes")]
    assert names[0] == names[1] and len(set(names[0])) == 60


def test_a_file_in_verls_columns_keeps_its_own_prompt(tmp_path):
    wrapped = ROW | {
        "prompt": [
            {"role": "user", "content": "1+1?\nThe answer format must be: \\boxed{'The final answer goes here.'}"}
        ]
    }
    system = ROW | {
        "prompt": [{"role": "system", "content": "Be brief."}, *ROW["prompt"]],
        "extra_info": {"tool_selection": ["a"]},
    }
    rows = read_sets([write(tmp_path / "mine.jsonl", [wrapped, system, ROW])], protocol="code")
    assert [row["uid"] for row in rows] == ["mine:0", "mine:1", "mine:2"]
    assert rows[0]["raw_prompt"] == wrapped["prompt"] and rows[1]["raw_prompt"] == system["prompt"]
    assert rows[0]["problem"] == rows[2]["problem"] != rows[1]["problem"]
    assert rows[1]["extra_info"]["tool_selection"] == ["a"] and rows[0]["tools_kwargs"] == {}


def test_limit_takes_the_first_of_each_set(tmp_path):
    path = write(tmp_path / "mine.jsonl", [ROW] * 3)
    assert [row["uid"] for row in read_sets(["aime_2024", path], protocol="code", limit=2)] == [
        "aime_2024:0",
        "aime_2024:1",
        "mine:0",
        "mine:1",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "1+1?", "answer": "2"}, "line 1, column data_source"),
        (ROW | {"reward_model": {}}, "line 1, column reward_model.ground_truth"),
        (ROW | {"reward_model": {"ground_truth": None}}, "ground_truth: it is empty"),
        (ROW | {"prompt": "1+1?"}, "line 1, column prompt: found '1\\+1\\?'; expected list"),
        (ROW | {"prompt": []}, "line 1, column prompt.0.role"),
        (ROW | {"prompt": [{"role": "user"}]}, "line 1, column prompt.0.content"),
        (ROW | {"extra_info": "an id"}, "line 1, column extra_info: found 'an id'; expected dict"),
        (ROW | {"extra_info": ["an id"]}, "line 1, column extra_info: found .'an id'.; expected dict"),
        (ROW | {"extra_info": {"tools_kwargs": "x"}}, "column extra_info.tools_kwargs: found 'x'; expected dict"),
        (ROW | {"reward_model": "2"}, "line 1, column reward_model.ground_truth"),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path, row, message):
    path = write(tmp_path / "mine.jsonl", [row])
    with pytest.raises(DataError, match=message) as error:
        read_sets([path], protocol="code")
    assert "prepare_jsonl.py" in str(error.value)


def test_what_is_no_set_is_said(tmp_path):
    with pytest.raises(DataError, match="aime_2026 is neither a built-in set .aime_2024, aime_2025. nor a file"):
        read_sets(["aime_2026"], protocol="code")
    (tmp_path / "a").mkdir()
    paths = [write(folder / "mine.jsonl", [ROW]) for folder in (tmp_path, tmp_path / "a")]
    with pytest.raises(DataError, match="Two sets are called mine"):
        read_sets(paths, protocol="code")
    with pytest.raises(DataError, match="has no rows"):
        read_sets([write(tmp_path / "none.jsonl", [])], protocol="code")


def test_the_fingerprint_is_of_the_rows_and_their_order(tmp_path):
    other = ROW | {"reward_model": {"style": "rule", "ground_truth": "3"}}
    one, two = (read_sets([write(tmp_path / "mine.jsonl", rows)], protocol="code") for rows in ([ROW], [other]))
    assert fingerprint(one) == fingerprint(one) != fingerprint(two)
    assert fingerprint(one + two) != fingerprint(two + one)
