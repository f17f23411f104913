import json
from pathlib import Path

import pytest

from verl_ext.datasets.problems import Problem, clean_problems, evaluation_problems, read_problems, write_problems
from verl_ext.datasets.rows import DataError
from verl_ext.reward import score_answer

REPO = Path(__file__).parents[3]
DAPO = REPO / "tests" / "data" / "dapo_rows.jsonl"


def clean(*rows, integer_answers=True, evaluation=None):
    """(kept ids, reason -> count) of rows of (text, answer); ids count from 0."""
    problems = [Problem(text, answer, str(i)) for i, (text, answer) in enumerate(rows)]
    kept, report = clean_problems(problems, evaluation=evaluation, integer_answers=integer_answers)
    assert report.rows == len(rows) and report.kept == len(kept) == report.distinct - sum(report.dropped.values())
    return [problem.id for problem in kept], dict(report.dropped)


def test_the_first_of_equal_problems_stays_in_the_order_of_the_source():
    assert clean(("Find $b$", "2"), ("Find a", "1"), ("find b.", "2"), ("Find a", "01")) == (["0", "1"], {})


def test_a_problem_with_different_answers_is_left_out_whole():
    rows = [("Find a", "1"), ("Find b", "2"), ("Find $a$", "1"), ("Find a", "3"), ("Find a", "1")]
    assert clean(*rows) == (["1"], {"the same problem has different answers": 1})
    assert clean(("Find a", r"\frac12"), ("Find a", "0.5"), integer_answers=False) == (["0"], {})
    assert clean(("Find a", r"\frac12"), ("Find a", "0.51"), integer_answers=False)[0] == []
    assert clean(("Find a", ""), ("Find a", "1"))[0] == []


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [
        (r"$\frac{2020}{6063}$", "5", "the problem is empty or only a number"),
        ("", "5", "the problem is empty or only a number"),
        ("Find a", "", "the answer is empty"),
        ("Find a", "34.0", "the answer is not an integer"),
        ("Find a", r"\frac{1}{2}", "the answer is not an integer"),
        ("Find a", "1e5", "the answer is not an integer"),
        ("Find a", "４２", "the answer is not an integer"),
        ("Find a", "22099999999999998951424", "the answer is an integer that was rounded to a floating-point number"),
    ],
)
def test_what_cannot_be_trained_on_is_left_out_with_its_reason(text, answer, reason):
    assert clean((text, answer), ("Find b", "1")) == (["1"], {reason: 1})


@pytest.mark.parametrize("answer", ["0", "-7", "1000000000004", "476837158203126", "2000000000000000000000"])
def test_long_and_round_integers_stay(answer):
    assert clean(("Find a", answer)) == (["0"], {})


def test_leading_zeros_go_and_fractions_stay_where_they_may():
    (problem,), _ = clean_problems([Problem("Find a", "073", "0")], evaluation=None, integer_answers=True)
    assert problem.answer == "73"
    (problem,), _ = clean_problems([Problem("Find a", r"\frac{1}{2}", "0")], evaluation=None, integer_answers=False)
    assert problem.answer == r"\frac{1}{2}"


def test_an_answer_that_the_scorer_does_not_find_equal_to_itself_is_left_out():
    broken = r"\frac{1}{"  # its box never closes
    assert score_answer(f"\\boxed{{{broken}}}", broken).acc == 0.0
    kept, dropped = clean(("Find a", broken), ("Find b", r"\sqrt{2}"), integer_answers=False)
    assert (kept, dropped) == (["1"], {"the scorer does not find the answer equal to itself": 1})


def test_evaluation_problems_are_left_out_of_training_data():
    aime = json.loads((REPO / "data/aime/aime_2024.jsonl").read_text().splitlines()[0])
    kept, dropped = clean((aime["problem"], aime["answer"]), ("Find a", "1"), evaluation=evaluation_problems([]))
    assert (kept, dropped) == (["1"], {"overlap with an evaluation set": 1})


def test_further_evaluation_files_count(tmp_path):
    mine = tmp_path / "mine.jsonl"
    text = "How many ways are there to colour the forty-two doors of the old library?"
    mine.write_text(json.dumps({"problem": text, "answer": "7"}))
    assert clean((text, "7"), evaluation=evaluation_problems([]))[0] == ["0"]
    assert clean((text, "7"), evaluation=evaluation_problems([str(mine)]))[0] == []


def test_real_rows_of_dapo_are_cleaned():
    source = [json.loads(line) for line in DAPO.read_text(encoding="utf-8").splitlines()]
    kept, report = clean_problems(read_problems(str(DAPO)), evaluation=evaluation_problems([]), integer_answers=True)
    assert report.rows == len(source) == 56
    conflicts = {"the same problem has different answers": 7}
    assert report.dropped == conflicts | {"the answer is an integer that was rounded to a floating-point number": 1}
    answers = {row["id"]: row["answer"] for row in source}
    for problem in kept:
        assert problem.answer == answers[problem.id]
        assert score_answer(f"So \\boxed{{{problem.answer}}}.", problem.answer).acc == 1.0
    assert len({problem.id for problem in kept}) == report.kept == report.distinct - 8


def test_parquet_has_verls_columns_and_verl_reads_it(tmp_path, tokenizer):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    path = tmp_path / "p.parquet"
    problems = [Problem("Find $a_{1}$", "1", "x"), Problem("Find {b}", "-2", "y")]
    write_problems(problems, path, data_source="mine", split="train", protocol="code")
    config = OmegaConf.create({"max_prompt_length": 2048, "cache_dir": str(tmp_path / "cache")})
    dataset = RLHFDataset([str(path)], tokenizer, config)
    assert len(dataset) == 2
    row = dataset[1]
    assert row["data_source"] == "mine" and row["ability"] == "math" and row["index"] == 1
    assert row["reward_model"] == {"style": "rule", "ground_truth": "-2"}
    assert row["extra_info"] == {"index": 1, "split": "train", "id": "y"}
    (message,) = row["raw_prompt"]
    assert message["role"] == "user" and message["content"].endswith("*user question:*\nFind {b}")
    assert "<code>\ncode snippet\n</code>" in message["content"] and "\\boxed{'The final" in message["content"]
    assert "agent_name" not in row  # the run's default_agent_loop decides


def test_nothing_left_is_said_and_not_written(tmp_path):
    with pytest.raises(DataError, match="No problem is left"):
        write_problems([], tmp_path / "p.parquet", data_source="d", split="train", protocol="code")
    assert not list(tmp_path.iterdir())
