"""`scripts/studies/small_study.py` distinguishes kinds of errors by rules."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.evaluation.rows import evaluation, response, write
from tests.unit.evaluation.rows import row as evaluated_row
from verl_ext.evaluation.result import make_result, write_result
from verl_ext.evaluation.samples import read_samples

REPO = Path(__file__).resolve().parents[3]
PROMPT = "user\nPut the answer in \\boxed{}.\n\nAnn has 12 pens and buys 3 bags of 5.\nassistant\n"


def asked(case: dict, number: int = 0, **columns) -> dict:
    own = {"domain": "word_problems", "id": "rate-7", "problem": None, "prompt": PROMPT, "ground_truth": "27"}
    return evaluated_row("", number, 0) | own | case | columns


@pytest.fixture(scope="module")
def study():
    from scripts.studies import small_study

    return small_study


def program(code: str, output: str, answer: str) -> dict:
    end = f"The answer is \\boxed{{{answer}}}." if answer else ""
    return response(f"<code>\n{code}\n</code>\n<interpreter>\n{output}\n</interpreter>\n{end}", answer)


FAILED = [{"turn": 0, "status": "SyntaxError", "fault": "model", "attempts": 1}]
CASES = {
    "right": program("print(12 + 3 * 5)", "27", "27") | {"acc": 1.0},
    "no answer": program("print(12)", "12", ""),
    "its last program failed": program("print(12 +)", "SyntaxError: invalid syntax", "12") | {"calls": FAILED},
    "no program: the right calculation, a wrong result": response("12 + 3 * 5 = 29\nThe answer is 29.", "29"),
    "the answer is not what the program printed": program("print(12 * 3)", "36", "63"),
    "a number of its program is not in the problem": program("print(12 + 7)", "19", "19"),
    "numbers of the problem, another formula": program("print(12 + 3 + 5)", "20", "20"),
}


def test_each_kind_of_error_is_told_by_its_rule(study, tmp_path):
    rows = [asked(case, number) for number, case in enumerate(CASES.values())]
    for when in ("before", "after"):
        file = write(tmp_path / "run" / "eval" / when, rows)
    assert [study.kind_of(sample) for sample in read_samples(file)] == [*CASES] == [*study.ERRORS]
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
    path = write(tmp_path, [asked(program("print(12 * 3 / 5)", "7.20", "7.2"))])
    assert study.kind_of(read_samples(path)[0]) == "numbers of the problem, another formula"


def word_problem(number: int, acc: int, **changes) -> dict:
    return evaluated_row("Ann has 12 pens.", number, acc, domain="word_problems") | changes


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
    write(tmp_path / "eval" / "before", [asked(wrong), asked(wrong, 1, prompt="b")])
    write(tmp_path / "eval" / "after", [asked(right), asked(right, 1, prompt="c")])
    assert study.examples(tmp_path).startswith("Ann has 12 pens and buys 3 bags of 5.\n(numbers of the problem")


def test_without_results_of_the_runs_no_empty_picture_is_drawn(study, tmp_path, capsys):
    (tmp_path / "seed_0").mkdir()
    (tmp_path / "seed_0" / "summary.json").write_text("{}")
    with pytest.raises(SystemExit):
        study.main(["--runs", str(tmp_path)])
    assert "results.jsonl has no result. Set --curves to the --results of" in capsys.readouterr().err
    assert not (tmp_path / "small.svg").exists()
