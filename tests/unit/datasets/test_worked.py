from contextlib import nullcontext

import pytest
from prepare_gsm8k import gold, program
from prepare_mawps import infix, read_fold, tidy
from worked import NO_TOOL, PROTOCOL, Worked, problem_of, split_apart, trace_of, work_out, write_task

from verl_ext.datasets.rows import DataError, read_rows
from verl_ext.datasets.text import bare_problem

FILES = ("sft_train", "sft_val", "rl_train", "eval")
HEADER = "Question,Numbers,Equation,Answer\n"


def worked(text, answer="1"):
    return Worked(text, f"print({answer})", answer, answer, text[:8])


def test_only_a_program_that_gives_the_answer_is_taken():
    assert work_out("?", "print(6 / 4)", "1.5", "x") == Worked("?", "print(6 / 4)", "1.5", "1.5", "x")
    assert work_out("?", "print(0.1 + 0.2)", "0.3", "x").answer == "0.3"
    assert work_out("?", "print(8 / 2)", "4", "x").answer == "4"  # what is printed is 4.0
    assert work_out("?", "print(5 / 8)", "0.63", "x", exact=False).answer == "0.625"
    for code, answer, said in (
        ("print(7)", "8", "prints 7, but the answer is 8"),
        ("print(5 / 8)", "0.63", "prints 0.625"),
        ("print(1 / 3)", "0.33", "not a short decimal"),
        ("a = 1", "1", "no program"),
        ("print(open('x'))", "1", "expected arithmetic"),
    ):
        with pytest.raises(ValueError, match=said):
            work_out("?", code, answer, "x", exact="short" not in said)


def test_a_trace_is_read_by_sft_as_one_call_and_an_answer(tokenizer):
    from verl_ext.protocols.code import CodeProtocol
    from verl_ext.protocols.trace import split_trace

    trace = trace_of(work_out("How many?", "print(40 + 2)", "42", "x"))
    prompt, _, response = split_trace(trace.messages, None, CodeProtocol(tokenizer), tokenizer.eos_token)
    assert prompt[-1]["content"].endswith("in \\boxed{}.\n\nHow many?")
    assert ["".join(part.parts) for part in response] == [
        "<code>\nprint(40 + 2)\n</code>",
        "\n<interpreter>\n42\n</interpreter>\n",
        "The answer is \\boxed{42}.",
        tokenizer.eos_token,
    ]
    assert [part.own for part in response] == [True, False, True, True]


def test_a_trace_without_the_tool_has_the_calculation_as_text():
    trace = trace_of(work_out("How many?", "print((40 + 2) / 4)", "10.5", "x"), NO_TOOL)
    assert [message["role"] for message in trace.messages] == ["user", "assistant"]
    assert "Python" not in trace.messages[0]["content"] and bare_problem(trace.messages[0]["content"]) == "How many?"
    assert trace.messages[1]["content"] == "(40 + 2) / 4 = 10.5\nThe answer is \\boxed{10.5}."


def test_a_later_set_has_nothing_of_an_earlier_one():
    test = [worked("A farmer had 83 sheep and sold 52 sheep at the market. How many are left?")]
    sft = [
        worked("a FARMER had 83 sheep, and sold 52 sheep at the market. How many are left?"),
        worked("On Friday, a farmer had 83 sheep and sold 52 sheep at the market. How many does he have?"),
        worked("Ann has 3 pens."),
        worked("Ann has 3 pens"),
        worked("Ann has 5 pens."),
    ]
    rl = [worked("Ann has 3 pens."), worked("Bob has 1,400 pens."), worked("Ann has 4 cups.")]
    (kept_test, kept_sft, kept_rl), report = split_apart(test, sft, rl)
    assert kept_test == test and kept_sft == [sft[2], sft[4]] and kept_rl == rl[2:]
    assert report.dropped == {
        "the same problem occurs earlier": 3,
        "set 2: overlap with an earlier set": 1,
        "set 3: an earlier set has it with other numbers or names": 1,
    }
    assert (report.rows, report.kept) == (9, 4)


def test_a_task_without_rows_is_refused(tmp_path):
    some = [worked("Ann has 3 pens.")]
    with pytest.raises(DataError, match="No problem is left to write to .*eval.parquet"):
        write_task(tmp_path, sft=some, sft_val=some, rl=some, rl_source="x", evaluation={"x": []})
    with pytest.raises(DataError, match="sft_val.parquet; nothing was written"):
        write_task(tmp_path, sft=some, sft_val=[], rl=some, rl_source="x", evaluation={"x": some})
    assert not [*tmp_path.iterdir()]


def test_text_rl_has_the_same_problems_and_traces_without_calls(tmp_path):
    task = {
        "sft": [worked("Ann has 3 pens.")],
        "sft_val": [worked("Ann has 5 pens.")],
        "rl": [worked("Bob has 9 pens.")],
    }
    for protocol in (PROTOCOL, NO_TOOL):
        evaluation = {"x": [problem_of(worked("Bob has 4 cups."))]}
        write_task(tmp_path / protocol, **task, rl_source="x", evaluation=evaluation, protocol=protocol)
    tool, text = (
        {name: [row for _, row in read_rows(str(tmp_path / protocol / f"{name}.parquet"))] for name in FILES}
        for protocol in (PROTOCOL, NO_TOOL)
    )
    assert all(tool[name] == text[name] for name in ("rl_train", "eval")), "a run's protocol replaces the instructions"
    assert len(tool["sft_train"][0]["messages"]) == 4 and len(text["sft_train"][0]["messages"]) == 2


@pytest.mark.parametrize(("gold", "is_right"), [("1,005", True), ("2010/2", True), ("100500%", True), ("1006", False)])
def test_a_gold_answer_may_be_written_with_commas_as_a_fraction_or_in_percent(gold, is_right):
    with nullcontext() if is_right else pytest.raises(ValueError, match="the answer is 1006"):
        assert work_out("x", "print(1000 + 5)", gold, "a").answer == "1005"


# MAWPS ---------------------------------------------------------------------------------------------------------------


def test_prefix_becomes_infix_with_the_brackets_it_needs():
    assert infix("- number0 number1".split(), ["9", "3"]) == "9 - 3"
    assert infix("- number0 * number1 2.0".split(), ["9", "3"]) == "9 - (3 * 2)"
    assert infix("/ + number0 number1 number0".split(), ["9", "3"]) == "(9 + 3) / 9"
    for words in ("- number0", "+ number0 number5", "+ a b", "+ 1 2 3", ""):
        with pytest.raises(DataError, match="not an equation in prefix form"):
            infix(words.split(), ["9", "3"])


def test_a_question_loses_the_marks_of_its_tokeniser():
    assert tidy("mary has 2 cups . she needs 6 , or more ?") == "Mary has 2 cups. She needs 6, or more?"


def test_a_fold_is_read_and_what_is_wrong_in_it_counted(tmp_path, capsys):
    (tmp_path / "train.csv").write_text(
        HEADER + "Ann has number0 pens and gets number1 . How many ?,8.0 2.5,+ number0 number1,10.5\n"
        "Ann has number0 pens . How many ?,8.0,+ number0 number0,15\n"
    )
    (tmp_path / "dev.csv").write_text(
        HEADER + "It costs number0 dollars for number1 . Each ?,5.0 8.0,/ number0 number1,0.63\n"
    )
    train, dev = read_fold(tmp_path)
    assert [(w.text, w.code, w.output, w.answer, w.id) for w in train] == [
        ("Ann has 8 pens and gets 2.5. How many?", "print(8 + 2.5)", "10.5", "10.5", "train-0")
    ]
    assert [w.answer for w in dev] == ["0.625"]
    assert "train-1: the program prints 16, but the answer is 15" in capsys.readouterr().out
    (tmp_path / "dev.csv").write_text("Question\nx\n")
    with pytest.raises(DataError, match="dev.csv, row 0: no Numbers, Equation, Answer"):
        read_fold(tmp_path)
    for numbers, seen in (("8.0 x", "row 0: .*'x'"), ("8.0", "row 0: list index"), ("1/0 2", "row 0: Fraction")):
        row = f"Ann has number0 pens and number1 .,{numbers},+ number0 number1,9\n"
        (tmp_path / "dev.csv").write_text(HEADER + row)
        with pytest.raises(DataError, match=rf"dev.csv, {seen}.*Expected numbers"):
            read_fold(tmp_path)
    (tmp_path / "dev.csv").write_text(
        HEADER + 'Ann has number0 pens and number1 .,"1,000 50%",+ number0 number1,"1,000.5"\n'
    )
    assert [w.answer for w in read_fold(tmp_path)[1]] == ["1000.5"]
    (tmp_path / "dev.csv").unlink()
    with pytest.raises(DataError, match="dev.csv does not exist. MAWPS is not in this repository"):
        read_fold(tmp_path)


# GSM8K ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (
            "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
            "# Natalia sold clips in May\na = 48 / 2\n# She sold clips\nb = 48 + a\nprint(b)",
        ),
        ("It is $5 x 10% = $<<5*10%=0.5>>0.5\n#### 0.5", "# It is\na = 5 * (10 / 100)\nprint(a)"),
        ("<<05+1=6>>6 then 1*6 = <<1*6=6>>6\n#### 6", "# then\na = 5 + 1\nb = 1 * a\nprint(b)"),
        ("It is six.\n#### 6", ""),
        ("\n".join(f"<<{i}+1={i + 1}>>" for i in range(20)) + "\n#### 20", ""),  # more results than names
    ],
)
def test_annotations_become_statements_over_earlier_results(answer, code):
    assert program(answer) == code


def test_the_answer_stands_after_the_hashes():
    assert gold("a #### b\n#### $1,080.") == "1080"
