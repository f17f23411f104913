import json
from pathlib import Path

import pytest

from verl_ext.datasets.problems import evaluation_problems
from verl_ext.datasets.text import PROMPTS, EvaluationProblems, bare_problem, has_no_words, same_problem_key

DATA = Path(__file__).parents[2] / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


PROBLEM = "Let $f(x)=x^2$.\n\nFind $f(3)$."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{PROBLEM}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
FORMAT = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
RETOOL = (
    "Solve the following problem step by step. You now have the ability to selectively write executable Python code to "
    "enhance your reasoning process.\n<answer>\n\\boxed{{'The final answer goes here.'}}\n</answer>\n\n"
    "*user question:*\nAnswer the following Math Problem and put the answer in the format of \\boxed{{answer}}\n\n"
    f"{PROBLEM}\n\n\n"
    "Remember to place the final answer in the last part using the format: \n"
    "<answer>\n\\boxed{{'The final answer goes here.'}}\n</answer>"
)


@pytest.mark.parametrize(
    "prompt",
    [
        PROBLEM,
        f"  {PROBLEM}\n",
        DAPO,
        DAPO + FORMAT,  # as the published run's data set class leaves it
        RETOOL,
        RETOOL.partition("*user")[1] + RETOOL.partition("*user")[2].replace("<answer>", "").replace("</answer>", ""),
        *(prompt.format(problem=PROBLEM) for prompt in PROMPTS.values()),
    ],
)
def test_the_problem_is_found_within_the_instructions_of_public_data_sets(prompt):
    assert bare_problem(prompt) == PROBLEM


def test_real_dapo_prompts_are_stripped_to_the_problem():
    plain = [row["problem"] for row in rows("dapo_rows.jsonl")]
    for row in rows("dapo_official_form.jsonl"):
        prompt = row["prompt"][0]["content"]
        assert "Answer:" in prompt and bare_problem(prompt) in plain


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"Find $\dfrac{1}{2} x$.", "find  $\\frac12x$", True),
        ("Find $a + b$!", "Find \\(a+b\\)!", True),
        ("words, words and $3$", "Words words and 3.", True),
        (r"where $\left( a,b \right)$", r"where $(a,b)$", True),
        ("求最大值。", "求最大值.", True),
        ("Find $x+1$", "Find $x-1$", False),
        ("Find 1.5", "Find 15", False),
        ("Find $\\sin x$", "Find $\\cos x$", False),
        ("Find $3:4$", "Find $34$", False),
        ("for 2 x 3", "for 2 x 4", False),
        ("Find $f'(2)$.", "Find f’(2)", True),
        ("Find $f'(2)$.", "Find $f(2)$.", False),
        ("Let $A'B'$ be", "Let $AB$ be", False),
        ("Ann's share, the n's sum", "Ann’s share, the ns sum", True),
        # Braces and blanks end numbers, and braces group.
        (r"$\frac{1}{12}$?", r"$\frac{11}{2}$?", False),
        (r"$\frac{1}{12}$?", r"\dfrac1{12}", True),
        (r"$\frac{1}{2}3$?", r"$\frac12 3$", True),
        (r"$\binom{5}{2}$?", r"$\binom52$", True),
        (r"$\binom{5}{21}$?", r"$\binom{52}{1}$", False),
        ("$2^{3}4$?", "$2^{34}$?", False),
        ("1 23?", "12 3?", False),
        ("1 23?", "123?", False),
        ("$1$ $23$?", r"1\quad 23?", True),
        ("$x^{10}$?", "$x^1 0$?", False),
        ("$x^{10}$?", "$x^10$?", True),
        ("$x^{2}y$?", "$x^2 y$?", True),
        ("$a_{12}$?", "$a_1 2$?", False),
        ("$a_{n}$?", "$a_n$?", True),
        ("$a_{{n}}$?", "$a_n$?", True),
        (r"$\sqrt{23}$?", r"$\sqrt23$?", False),
        (r"$\sqrt{2}3$?", r"$\sqrt23$?", True),
        (r"$\sqrt{2}+1$?", r"$\sqrt{2+1}$?", False),
        (r"$\frac{x}{2}+1$?", r"$\frac{x}{2+1}$?", False),
        (r"$\frac{ab}{c}$?", r"$\frac{a}{bc}$?", False),
        ("$x^{n+1}$?", "$x^{n}+1$?", False),
        ("$x^{-1}$?", "$x^-1$?", True),
        ("Find 3.5", "Find 35", False),
        ("Find 3.5", "Find 3. 5", False),
        ("1,000 or 1{,}000?", "$1{,}000$ or 1,000?", True),
        (r"1\,000?", "1000?", True),
        (r"1\,23?", "123?", False),
        ("1, 2, 3?", "1,2,3?", True),
        ("1; 23?", "12; 3?", False),
        ("$x < 3$?", "$x > 3$?", False),
        (r"$x \le 3$?", r"$x \ge 3$?", False),
        (r"$\{1, 2\}$?", r"$\left\{ 1,2 \right\}$?", True),
        (r"\[ \text{Area } A_{1} \]", r"$$\text{area }  a_1$$", True),
    ],
)
def test_spelling_does_not_make_another_problem_but_an_operator_does(one, other, same):
    assert (same_problem_key(one) == same_problem_key(other)) is same


@pytest.mark.parametrize("text", ["", "  ", r"$\frac{2020}{6063}$", "34", "-1,234.5", r"\(\dfrac{1}{2}\)"])
def test_a_number_asks_nothing(text):
    assert has_no_words(text)


@pytest.mark.parametrize("text", ["1+1?", "9^{2022} 的末三位数是", "Find 3", "$x=3$", "2*3="])
def test_a_short_problem_asks_something(text):
    assert not has_no_words(text)


def test_real_evaluation_problems_are_found_in_another_spelling():
    """58 of 60 are found; one of the others is worded differently, one lost its \\frac to escapes."""
    evaluation = evaluation_problems([])
    assert len(evaluation) == 60
    found = [evaluation.find_overlap(row["problem"]) for row in rows("aime_other_spelling.jsonl")]
    assert sum(each is not None for each in found) == 58
    known = {each[0] for each in found if each}
    assert len(known) == 58  # each is recognised as a different one


def test_an_evaluation_problem_is_found_within_a_longer_text_but_its_common_phrases_are_not():
    evaluation = evaluation_problems([])
    problem = json.loads((DATA.parents[1] / "data/aime/aime_2025.jsonl").read_text().splitlines()[0])["problem"]
    name, share = evaluation.find_overlap(f"下面的问题: {problem} Give the answer times two.")
    assert name == "aime_2025 aime2025-0" and share == 1.0
    phrase = "can be expressed as $\\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers. Find $m+n$."
    assert evaluation.find_overlap(f"The repeating decimal $2.0151515\\ldots$ {phrase}") is None
    for row in rows("dapo_rows.jsonl"):
        assert evaluation.find_overlap(row["problem"]) is None


@pytest.mark.parametrize(
    ("known", "text", "found"),
    [
        ("What is 2+3?", "What is 2-3?", False),
        ("What is 2+3?", "What is $2 + 3$", True),
        ("What is 2+3?", "Ann asks: what is 2+3? Say why.", True),
        ("What is 2+3?", "What is 2+3+4?", False),
        ("What is 2+3?", "What is 2+34?", False),
        ("What is 2+3?", "What is 2+3.4?", False),
        ("What is 2+3?", "What is $2+3$ apples worth, at 5 each?", True),
        ("2+3", "12+3", False),
        ("2+3", "Work out 2+3 and 4.", True),
        ("2+3", "求2+3的值", True),
        ("8 9 ?", "8 9 10 ?", False),
        ("8 9 ?", "89 ?", False),
        ("6/2?", "62?", False),
        ("What is 6/2?", r"What is $\frac{6}{2}$?", True),
        ("What is 6/2?", r"What is $\frac62$? Please.", True),
        ("Find 3.5 x", "Find 35 x", False),
        ("x = 1,000", "x = 1000", True),
        ("1 23", "12 3", False),
        ("Is x < 3?", "Is x > 3?", False),
        (r"Is x \le 3?", r"Is x \ge 3?", False),
        (r"Is x \leq 3?", "Is x ≤ 3?", True),
        (r"3 \cdot 4", "3 * 4", True),
        ("3 − 4", "3 - 4", True),
        ("a well-known 7", "A well known 7", True),
        ("Find it", "Find it where it is", False),  # too common to be a leak within a text
        ("Find it", "find it!", True),
        ("What is 2+3?", "What is 2+3" * 20, False),
    ],
)
def test_signs_count_and_a_short_evaluation_problem_is_looked_for_as_a_whole(known, text, found):
    evaluation = EvaluationProblems([("E", known)])
    assert evaluation.find_overlap(text) == (("E", 1.0) if found else None)


def test_signs_count_in_long_problems_too():
    """Half of the runs must be there: a sign takes 30 runs away."""
    problem = "Ann has a number of marbles, and she finds that $x + y + z + a + b + c$ of them are red. How many?"
    evaluation = EvaluationProblems([("E", problem)])
    assert evaluation.find_overlap(problem.replace("$", " ").upper()) == ("E", 1.0)
    other = evaluation.find_overlap(problem.replace("+", "-"))
    assert other is None or other[1] < 0.8


def test_instructions_in_instructions_are_taken_off_up_to_a_depth():
    prompt = PROBLEM
    for _ in range(3):
        prompt = PROMPTS["hermes"].format(problem=prompt)
    assert bare_problem(prompt) == PROBLEM
    assert bare_problem(PROMPTS["code_short"].format(problem="")) != ""


def test_half_of_an_evaluation_problem_must_be_there():
    letters = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz0123456789"  # 62 -> 33 shingles of 30
    evaluation = EvaluationProblems([("E 1", letters)])
    # The first 46 letters hold 17 of the 33 shingles, the first 45 hold 16.
    assert evaluation.find_overlap(letters[:46] + "-" * 9) == ("E 1", 17 / 33)
    assert evaluation.find_overlap(letters[:45]) is None
