"""`scripts/studies/small_study.py` distinguishes kinds of errors by rules."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.evaluation.rows import evaluation
from tests.unit.evaluation.rows import row as evaluated_row
from verl_ext.evaluation.result import make_result, write_result
from verl_ext.evaluation.samples import read_dump

REPO = Path(__file__).resolve().parents[3]
PROMPT = "user\nPut the answer in \\boxed{}.\n\nAnn has 12 pens and buys 3 bags of 5.\nassistant\n"
BASE = {"input": PROMPT, "gts": "27", "verdict": "different", "method": "integer", "finish_reason": "answer"}
BASE |= {"data_source": "word_problems", "id": "rate-7", "score": -1.0, "acc": 0.0, "tool_calls": 1.0}
BASE |= dict.fromkeys(("tool_errors", "tool_timeouts", "truncated", "unverified", "sandbox_failure"), 0.0)
BASE |= {"model_turns": 2.0, "response_tokens": 30.0}


@pytest.fixture(scope="module")
def study():
    from scripts.studies import small_study

    return small_study


def response(code: str, output: str, answer: str) -> dict:
    text = f"<code>\n{code}\n</code>\n<interpreter>\n{output}\n</interpreter>\nThe answer is \\boxed{{{answer}}}."
    return {"output": text, "pred": answer}


CASES = {
    "right": response("print(12 + 3 * 5)", "27", "27") | {"acc": 1.0},
    "no answer": {"output": "<code>\nprint(12)\n</code>\n<interpreter>\n12\n</interpreter>\n", "pred": ""},
    "its last program failed": response("print(12 +)", "SyntaxError: invalid syntax", "12") | {"tool_errors": 1.0},
    "no program: the right calculation, a wrong result": {"output": "12 + 3 * 5 = 29\nThe answer is 29.", "pred": "29"},
    "the answer is not what the program printed": response("print(12 * 3)", "36", "63"),
    "a number of its program is not in the problem": response("print(12 + 7)", "19", "19"),
    "numbers of the problem, another formula": response("print(12 + 3 + 5)", "20", "20"),
}


def test_each_kind_of_error_is_told_by_its_rule(study, tmp_path):
    rows = [BASE | case | {"uid": f"u{i}_0_0"} for i, case in enumerate(CASES.values())]
    for when in ("before", "after"):
        folder = tmp_path / "run" / "eval" / when
        folder.mkdir(parents=True)
        (folder / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [study.kind_of(sample) for sample in read_dump(folder / "0.jsonl")] == [*CASES] == [*study.ERRORS]
    found = study.study_of(tmp_path / "run", problems=0)  # no seed: it is not evaluated again
    table = study.error_table({"control": found})
    assert table[0][1] == "control" and {row[1] for row in table[1:]} == {"14.3% -> 14.3%"}


def test_greedy_accuracy_and_pass_at_k_of_each_run_and_model(study):
    def found(greedy):
        mean = {"value": 0.3, "low": 0.2, "high": 0.4}
        return {"greedy": mean | {"value": greedy}, "sampled": mean, "pass@k": {str(k): k / 10 for k in (1, 2, 4, 8)}}

    studies = {"control": {}, "seed_0": {"evaluated": {"SFT": found(0.35), "after RL": found(0.6)}}}
    _, *rows = study.evaluation_table(studies)
    assert rows[0] == ["seed_0, SFT", "0.350 [0.200, 0.400]", "0.300 [0.200, 0.400]", "0.200", "0.400", "0.800"]
    assert rows[1][:2] == ["seed_0, after RL", "0.600 [0.200, 0.400]"] and len(rows) == 2


def test_the_table_of_curves_has_a_mean_of_each_six_steps(study):
    curves = {key: [[], []] for key, _, _ in study.CURVES}
    curves["train/acc"] = [[1, 2, 6, 7, 8], [0.2, 0.3, 0.7, 0.5, 0.6]]
    title, *rows = study.curve_table({"seed 0": {"curves": curves}})
    assert title == ["means of 6 steps", "1-6", "7-8"]
    assert rows[0] == ["seed 0: Accuracy in training, share of rollouts", "0.4", "0.55"]
    assert rows[1] == ["seed 0: Calls that failed, share of calls", "", ""]


def test_a_number_printed_with_a_point_is_the_same_number(study, tmp_path):
    path = tmp_path / "0.jsonl"
    path.write_text(json.dumps(BASE | response("print(12 * 3 / 5)", "7.20", "7.2") | {"uid": "u_0_0"}) + "\n")
    assert study.kind_of(read_dump(path)[0]) == "numbers of the problem, another formula"


def word_problem(number: int, acc: int, **changes) -> dict:
    return evaluated_row("Ann has 12 pens.", number, acc, data_source="word_problems") | changes


@pytest.fixture
def evaluate(study, monkeypatch):
    """Stands in for the command: writes what the real one makes of `rows`. `commands` has (command, environment)."""
    told = SimpleNamespace(rows=[], wanted=None, commands=[])

    def run(command, *, cwd, env, stdout):
        told.commands.append((command, env))
        out = Path(command[command.index("--out") + 1])
        out.parent.mkdir(parents=True, exist_ok=True)
        if told.rows:
            write_result(out, *make_result(evaluation(out, told.rows, wanted=told.wanted)))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(study.subprocess, "run", run)
    monkeypatch.setattr(study, "whole_cpu", lambda: {"OMP_NUM_THREADS": "all"})
    return told


def test_an_evaluation_is_read_as_the_command_writes_it_and_may_use_all_cores(study, evaluate, tmp_path):
    evaluate.rows = [word_problem(i, i < 6) for i in range(8)]
    found = study.evaluated(tmp_path, "rl", problems=96)
    assert found["greedy"]["value"] == found["sampled"]["value"] == 0.75  # 6 of 8
    assert found["pass@k"]["8"] == 1.0 and found["pass@k"]["1"] == 0.75
    assert study.evaluation_table({"seed_0": {"evaluated": {"after RL": found}}})[1][-1] == "1.000"
    assert [env["OMP_NUM_THREADS"] for _, env in evaluate.commands] == ["all"] * 2


def test_one_sample_in_a_hundred_may_stay_without_a_judgment(study, evaluate, tmp_path):
    evaluate.rows, evaluate.wanted = [word_problem(i, 1) for i in range(99)], 100
    assert study.evaluated(tmp_path, "rl", problems=96)["greedy"]["value"] == 1.0
    evaluate.wanted = 101
    with pytest.raises(ValueError, match="rl_greedy_96: 99 of 101 samples are judged; expected 99%"):
        study.evaluated(tmp_path, "rl", problems=96)
    evaluate.rows = []  # it fails at once, and an earlier result is there
    with pytest.raises(subprocess.CalledProcessError):
        study.evaluated(tmp_path, "rl", problems=96)


def test_examples_pass_over_problems_that_one_side_has_no_judged_sample_of(study, tmp_path):
    right, wrong = CASES["right"], CASES["numbers of the problem, another formula"]
    sides = {"before": [BASE | wrong, BASE | wrong | {"input": "b"}]}
    sides["after"] = [BASE | right, BASE | right | {"input": "c"}]
    for when, rows in sides.items():
        (tmp_path / "eval" / when).mkdir(parents=True)
        lines = [json.dumps(row | {"uid": f"u{i}_0_0"}) for i, row in enumerate(rows)]
        (tmp_path / "eval" / when / "0.jsonl").write_text("\n".join(lines) + "\n")
    assert study.examples(tmp_path).startswith("Ann has 12 pens and buys 3 bags of 5.\n(numbers of the problem")


def test_without_results_of_the_runs_no_empty_picture_is_drawn(study, tmp_path, capsys):
    (tmp_path / "seed_0").mkdir()
    (tmp_path / "seed_0" / "summary.json").write_text("{}")
    with pytest.raises(SystemExit):
        study.main(["--runs", str(tmp_path)])
    assert "results.jsonl has no result. Set --curves to the --results of" in capsys.readouterr().err
    assert not (tmp_path / "small.svg").exists()
