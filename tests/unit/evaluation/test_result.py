import json

import pytest

from tests.unit.evaluation.rows import TOOL_USE, evaluation, row, write
from verl_ext.evaluation.result import make_result, markdown, write_result
from verl_ext.evaluation.samples import NoSamples, find_samples
from verl_ext.runs.folder import path_of


def test_a_result_has_the_figures_the_settings_and_the_tool_metrics(tmp_path):
    folder = evaluation(tmp_path / "a", [row("p", 0, 1), row("p", 1, 0, pred="5"), row("q", 0, 0), row("q", 1, 0)])
    result, text = make_result(folder, draws=100)
    assert result["samples"] == {
        "file": str(path_of(folder, "trajectories", 0, validate=True)),
        "wanted": 4,
        "judged": 4,
        "missing": 0,
        "sandbox_failure": 0,
        "server_failure": 0,
        "unverified": 0,
    }
    assert result["figures"]["mine"]["metrics"]["acc/mean@k"]["value"] == 0.25  # (1/2 + 0/2) / 2
    assert result["by_k"]["mine"]["pass@k"][1]["value"] == 0.25 and result["by_k"]["mine"]["pass@k"][2]["value"] == 0.5
    assert result["settings"]["temperature"] == 1.0 and result["server"] == "http://127.0.0.1:1/v1"
    assert result["tools"]["tool/code_ratio"] == 1.0 and result["tools"]["tool/ok_rate"] == 0.5  # 1 of 2 calls
    for shown in ("# Evaluation of x", "temperature", "`1.0`", "0.250 [0.000, 0.939]", "by k", "tool/ok_rate"):
        assert shown in text
    assert "not judged" not in text


def test_samples_that_infrastructure_failed_are_said_first_and_are_in_no_figure(tmp_path):
    failed = row("q", 0, 0, calls=0, errors=0, end_reason="aborted", prompt=None, turns=[], tool_use="{}")
    unknown = row("q", 1, 0, end_reason="verifier_unknown")
    result, text = make_result(evaluation(tmp_path / "a", [row("p", 0, 1), failed, unknown], wanted=6), draws=10)
    assert result["samples"] | {"file": ""} == {
        "file": "",
        "wanted": 6,
        "judged": 1,
        "missing": 3,
        "sandbox_failure": 0,
        "server_failure": 1,
        "unverified": 1,
    }
    assert "**5 of 6 samples are not judged** (not taken 3; server_failure 1, unverified 1)" in text
    assert result["figures"]["mine"]["metrics"]["acc/mean@k"]["value"] == 1.0


def test_the_difference_is_from_the_other_and_says_what_else_differs(tmp_path):
    names = "abcdef"
    before = evaluation(tmp_path / "before", [row(name, i, 0) for name in names for i in (0, 1)], temperature=0.6)
    after = evaluation(tmp_path / "after", [row(name, i, 1) for name in [*names, "z"] for i in (0, 1)])
    result, text = make_result(after, compared_with=before, draws=100)
    comparison = result["comparison"]
    assert comparison["difference"]["mine"]["metrics"]["acc/mean@k"]["value"] == 1.0
    assert comparison["difference"]["mine"]["test"] == {
        "better": 6,
        "worse": 0,
        "equal": 0,
        "p_sign_flips": 2 / 64,  # all + or all - of 2^6 ways
        "p_sign_test": 2 / 64,
    }
    assert comparison["settings"] == {"temperature": [0.6, 1.0]}
    assert "- temperature: 0.6 -> 1.0" in text and "+1.000 [+0.081, +1.000]" in text and "0.0312" in text
    assert "1 problems have judged samples on only one side" in text
    backwards, _ = make_result(before, compared_with=after, draws=100)
    assert backwards["comparison"]["difference"]["mine"]["metrics"]["acc/mean@k"]["value"] == -1.0


def test_the_columns_of_a_comparison_subtract_to_its_difference(tmp_path):
    """Of four problems before, the last two right; only the first two were reached after, one is right."""
    before = evaluation(tmp_path / "before", [row(name, 0, name in "cd") for name in "abcd"])
    after = evaluation(tmp_path / "after", [row(name, 0, name == "a") for name in "ab"], wanted=4)
    result, text = make_result(after, compared_with=before, draws=100)
    sides = [result["comparison"][side]["mine"]["metrics"]["acc/mean@k"] for side in ("before", "after", "difference")]
    assert [side["value"] for side in sides] == [0.0, 0.5, 0.5]
    (line,) = (line for line in text.split("acc (mean)")[1].split("code use")[0].splitlines() if "mine" in line)
    assert [cell.split()[0] for cell in line.split("|")[2:6]] == ["2", "0.000", "0.500", "+0.500"]
    assert "2 problems have judged samples on only one side" in text


def test_a_run_is_evaluated_by_its_last_validation(tmp_path):
    sides = {4: (0, 0, 1), 8: (1, 1, 1)}
    raised = {"uid": "d", "session": 0, "problem": "d", "domain": "mine", "end_reason": "raised"}
    before, last = (
        write(tmp_path, [*(row(name, 0, acc) for name, acc in zip("abc", accs, strict=True)), raised], step=step)
        for step, accs in sides.items()
    )
    result, _text = make_result(tmp_path, compared_with=before, draws=100)
    assert result["samples"]["file"] == str(last) and "settings" not in result
    assert (result["samples"]["judged"], result["samples"]["unverified"]) == (3, 1)
    assert result["figures"]["mine"]["metrics"]["acc/mean@k"]["value"] == 1.0
    assert result["comparison"]["difference"]["mine"]["metrics"]["acc/mean@k"]["value"] == pytest.approx(2 / 3)
    assert result["tools"]["tool/ok_rate"] == 0.5
    assert result["tools"]["tool/first_call_position"] == pytest.approx(0.08)  # 2 of 25 tokens


def test_an_agents_episode_of_two_rows_has_its_turns_by_row_and_its_own_metrics(tmp_path):
    """Turns of 10, 10 and 4 tokens, and 5 of a tool's between the first two: those of different rows have nothing."""
    of_two = [*row("p", 0, 1)["turns"], {"role": "model", "text": "7", "tokens": 4, "start": 0, "row": 1}]
    agent = json.dumps({"requests": 4, "rows": 2, "forks": {"history": 1}})
    result, text = make_result(write(tmp_path, [row("p", 0, 1, turns=of_two, agent=agent)]), draws=10)
    names = ("turn/model_tokens", "turn/tool_tokens", "agent/requests", "agent/rows", "agent/forks/history")
    assert [result["tools"][name] for name in names] == [8.0, 5.0, 4.0, 2.0, 1.0] and "agent/rows" in text


def test_samples_that_note_no_use_of_tools_have_no_metrics_of_them(tmp_path):
    imported = [row("p", 0, 1, tool_use=None), row("p", 1, 1, tool_use="{}")]
    result, text = make_result(write(tmp_path, imported), draws=10)
    assert result["tools"] == {} and "tool metric" not in text
    assert result["figures"]["mine"]["metrics"]["tool/error_rate"]["value"] == 0.5  # these are of the calls


def test_without_samples_there_is_no_result(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NoSamples, match="No samples at"):
            find_samples(path)
    with pytest.raises(NoSamples, match="it is empty"):
        make_result(write(tmp_path, []))
    failed = evaluation(tmp_path / "a", [row("p", 0, 0, end_reason="sandbox_failure")])
    with pytest.raises(NoSamples, match="'sandbox_failure': 1"):
        make_result(failed)
    one, other = (evaluation(tmp_path / name, [row(name, 0, 1)]) for name in ("b", "c"))
    with pytest.raises(NoSamples, match="no judged problem in common"):
        make_result(one, compared_with=other)


def test_files_are_written_whole(tmp_path):
    result, text = make_result(evaluation(tmp_path, [row("p", 0, 1)]), draws=10)
    write_result(tmp_path, result, text)
    assert (tmp_path / "result.md").read_text() == text
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["figures"]["mine"]["n"] == 1 and written["tools"]["tool/calls"] == TOOL_USE["ok"] + 1
    assert not list(tmp_path.glob("*.part"))


def test_a_table_is_markdown_and_aligned():
    assert markdown([["name", "x"], ["a", "1.25"]]) == "| name |    x |\n|------|-----:|\n| a    | 1.25 |"
