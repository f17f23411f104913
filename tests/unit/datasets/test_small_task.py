"""The word problems of the small run (data/small), and the files that its prepare.py writes."""

import random
import re
import sys
from collections import Counter

import pytest
from arithmetic import evaluate

from verl_ext.datasets.text import EvaluationProblems, bare_problem


@pytest.fixture(scope="module")
def problems(small_task):
    rng = random.Random(5)
    return {name: small_task.word_problems.make_problems(name, 240, rng) for name in ("sft", "rl", "test")}


def test_there_are_sixty_templates_of_twelve_kinds_in_each_of_three_disjoint_sets(small_task):
    templates = small_task.word_problems.read_templates()
    kinds = {name: Counter(t.kind for t in templates if t.set == name) for name in ("sft", "rl", "test")}
    assert len(templates) >= 60 and all(len(of_set) >= 12 and min(of_set.values()) >= 3 for of_set in kinds.values())
    assert kinds["sft"].keys() == kinds["rl"].keys() == kinds["test"].keys()
    assert len({template.text for template in templates}) == len(templates)
    others = EvaluationProblems((f"{t.line}", t.text) for t in templates if t.set == "test")
    leaked = {t.line: others.find_overlap(t.text) for t in templates if t.set != "test"}
    assert {line: found for line, found in leaked.items() if found} == {}


def test_every_template_shows_the_numbers_of_its_formula_and_names_no_unknown_slot(small_task):
    for template in small_task.word_problems.read_templates():
        shown = set(re.findall(r"\{(\w)\}", template.text)) & {name for name, _, _ in template.numbers}
        assert set(re.findall(r"[a-z]", template.formula)) <= shown, template
        text = small_task.word_problems.make_problem(template, random.Random(0)).text
        assert "{" not in text and text.endswith("?") and re.match(r"[A-Z0-9]", text), text


def test_answers_are_positive_whole_numbers_of_a_formula_over_numbers_of_the_text(problems):
    for problem in problems["sft"] + problems["rl"] + problems["test"]:
        formula = problem.code.removeprefix("print(").removesuffix(")")
        value = evaluate(formula)
        assert problem.answer == str(round(value)) and value == round(value) > 0, problem
        constants = {"2", "3", "4", "5", "7", "12", "60", "100"}  # half, a third, a week, a dozen, an hour, percent
        assert set(re.findall(r"\d+", formula)) - constants <= set(re.findall(r"\d+", problem.text)), problem


def test_problems_differ_and_come_from_all_templates_alike(small_task, problems):
    for name, of_set in problems.items():
        templates = [t for t in small_task.word_problems.read_templates() if t.set == name]
        counts = Counter(problem.id for problem in of_set)
        assert len({problem.text for problem in of_set}) == 240
        assert len(counts) == len(templates) and max(counts.values()) - min(counts.values()) <= 1


def test_a_set_that_is_too_small_is_told(small_task, monkeypatch):
    word_problems = small_task.word_problems
    template = word_problems.Template("test", "k", (("a", "2", "4"),), "a * 7", "How many days are {a} weeks?", 1)
    monkeypatch.setattr(word_problems, "read_templates", lambda: [template])
    assert len(word_problems.make_problems("test", 3, random.Random(0))) == 3
    with pytest.raises(ValueError, match="gave 3 problems; expected 4"):
        word_problems.make_problems("test", 4, random.Random(0))


@pytest.mark.parametrize("line", ["sft | k | a=2..9 | a | x | y", "dev | k | a=2..9 | a | x", "sft | k | a=x..,b | a"])
def test_a_line_that_is_no_template_is_named(small_task, tmp_path, line):
    path = tmp_path / "templates.txt"
    path.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(ValueError, match="line 3: expected set"):
        small_task.word_problems.read_templates(path)


@pytest.fixture
def prepare(small_task, tmp_path, monkeypatch, capsys):
    import pandas as pd

    def run(*args):
        out = tmp_path / "-".join(args)
        sizes = ["--sft=40", "--sft-val=8", "--rl=70", "--test=50", "--svamp=20"]
        monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", *sizes, *args])
        small_task.prepare.main()
        return {path.stem: pd.read_parquet(path) for path in out.glob("*.parquet")}, capsys.readouterr().out

    return run


def test_prepare_writes_what_the_run_reads_and_prints_what_shortcuts_score(prepare):
    tables, printed = prepare("--seed=0")
    assert {name: len(rows) for name, rows in tables.items()} == {
        **{"sft_train": 40, "sft_val": 8, "rl_train": 70, "eval": 70}
    }
    assert tables["eval"]["data_source"].value_counts().to_dict() == {"word_problems": 50, "svamp_ood": 20}
    assert re.search(r"word_problems: largest minus smallest \d.*\n +svamp_ood: largest minus smallest \d", printed)
    assert "Accuracy of rules" in printed
    asked = {name: [bare_problem(p[0]["content"]) for p in tables[name]["prompt"]] for name in ("rl_train", "eval")}
    assert not any("Solve the problem" in text for text in asked["rl_train"] + asked["eval"])
    assert len(set(asked["rl_train"])) == 70 and set(asked["rl_train"]).isdisjoint(asked["eval"])


def test_prepare_is_deterministic_and_all_seeds_share_the_test(prepare):
    first, again, other = (prepare(*args)[0] for args in (["--seed=0"], ["--seed=0", "--svamp=20"], ["--seed=1"]))
    for name, rows in first.items():
        assert rows.map(str).equals(again[name].map(str)), name
        assert rows.map(str).equals(other[name].map(str)) == (name == "eval"), name


def test_mawps_by_path_takes_the_place_of_our_problems(prepare, tmp_path):
    header = "Question,Numbers,Equation,Answer\n"
    kinds = ("pen", "cup", "hat", "toy", "car", "dog", "cat", "nut", "key", "map")
    items = [f"{kind}{end}s" for end in "abcdefghijklm" for kind in kinds]  # with only other numbers it is the same
    for name, start in (("train", 2), ("dev", 100)):
        verb = "saw" if name == "train" else "sold"
        rows = (
            f"Pat {verb} number0 {item} {i} . All ?,{start + i}.0 1.0,+ number0 number1,{start + i + 1}"
            for i, item in enumerate(items)
        )
        (tmp_path / f"{name}.csv").write_text(header + "\n".join(rows) + "\n")
    held_out = (tmp_path / "dev.csv").read_text().splitlines()[1:31]  # which training also has, and must drop
    with open(tmp_path / "train.csv", "a") as train:
        train.write("\n".join(held_out) + "\n")
    tables, _ = prepare(f"--mawps={tmp_path}", "--sft=40", "--rl=30")
    assert [len(tables[name]) for name in ("sft_train", "sft_val", "rl_train")] == [40, 8, 30]
    assert (
        set(tables["eval"]["data_source"])
        == {"mawps", "svamp_ood"}
        == {*tables["rl_train"]["data_source"], "svamp_ood"}
    )
    assert tables["eval"]["prompt"].iloc[0][0]["content"].endswith("Pat sold 100 penas 0. All?")
