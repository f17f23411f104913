import asyncio

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_ext.reward.verifiers import BUILT_IN, MATH, Verifiers


def name_of(verifiers, data_source, ability=""):
    return type(verifiers.find(data_source, ability)).__name__


def test_built_in_verifiers_are_found_by_data_source_or_ability():
    verifiers = Verifiers({"retool": {"sandbox": {"urls": ["http://127.0.0.1:1"]}}})
    assert name_of(verifiers, "code") == "CodeVerifier"
    assert name_of(verifiers, "IFEval") == "IfevalVerifier"
    assert name_of(verifiers, "mmlu", "multiple_choice") == "ChoiceVerifier"
    assert name_of(verifiers, "math_dapo", "MATH") == "MathVerifier"
    assert name_of(verifiers, "", "") == "MathVerifier"


def test_own_entry_comes_before_a_built_in_one_and_takes_settings():
    own = {"code*": {"path": BUILT_IN["exact"], "ignore_case": False}}
    verifiers = Verifiers({}, own)
    assert name_of(verifiers, "code") == name_of(verifiers, "code_contests") == "ExactVerifier"


def test_verifier_is_built_once():
    verifiers = Verifiers({})
    assert verifiers.find("exact", "") is verifiers.find("exact", "")


def test_unknown_setting_of_a_verifier_raises_when_it_is_built():
    with pytest.raises(TypeError, match="ignore_cases"):
        Verifiers({}, {"exact": {"path": BUILT_IN["exact"], "ignore_cases": True}}).find("exact", "")


@pytest.mark.parametrize("path", [MATH, BUILT_IN["exact"], BUILT_IN["multiple_choice"]])
def test_box_in_unfinished_thoughts_counts_if_the_verifiers_entry_says_so(path):
    verdicts = []
    for settings in ({}, {"unfinished_thinking": True}):
        verifier = Verifiers({}, {"mine": {"path": path, **settings}}).find("mine", "")
        verdicts.append(asyncio.run(verifier.verify(r"<think>So \boxed{C}", "C", {})).verdict)
    assert verdicts == ["no_answer", "correct"]


def test_mathematics_reads_in_the_prompt_what_an_answer_may_count():
    verifier = Verifiers({}).find("math", "")
    asked = [{"role": "system", "content": "Count pears."}, {"role": "user", "content": "How many apples are left?"}]
    prompts = [{"raw_prompt": asked}, {"raw_prompt": np.array(asked)}, {"prompt": asked[1]["content"]}, {}]
    said = [
        [asyncio.run(verifier.verify(rf"\boxed{{7 {noun}}}", "7", row)).acc for row in prompts]
        for noun in ("apples", "pears")
    ]
    assert said == [[1.0, 1.0, 1.0, 0.0], [0.0] * 4]


OWN = """
from verl_ext.reward.score import Score

class Yes:
    def __init__(self, config, word="yes"):
        self.word = word

    async def verify(self, response_text, ground_truth, sample):
        return Score.graded(float(self.word in response_text), self.word, "yes")
"""


def test_a_domain_names_its_verifier_by_name_or_by_file_and_comes_first(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    table = {"a*b": {"verifier": {"path": f"{file}:Yes", "word": "ja"}}, "science": {"verifier": "multiple_choice"}}
    table |= {"Code": {"verifier": "exact"}, "code": {"verifier": "ifeval"}}
    config = OmegaConf.create(
        {"retool": {"domains": table}, "reward": {"reward_kwargs": {"verifiers": {"s*": MATH, "code": MATH}}}}
    )
    verifiers = Verifiers.of_run(config)
    assert name_of(verifiers, "science") == "ChoiceVerifier", "before the run's own pattern s*"
    assert name_of(verifiers, "sums") == "MathVerifier"
    assert (name_of(verifiers, "Code"), name_of(verifiers, "code")) == ("ExactVerifier", "IfevalVerifier")
    assert name_of(verifiers, "axb") == "MathVerifier", "the name of a domain is no pattern"
    assert asyncio.run(verifiers.find("a*b", "").verify("ja", "", {})).acc == 1.0


@pytest.mark.parametrize("path", ["nowhere.py:Yes", "own.py", "no_such_name", "verl_ext.reward.score:NoSuch"])
def test_a_verifier_that_leads_nowhere_is_named(path):
    with pytest.raises(ValueError, match="The verifier for 'mine' is .*cannot be imported"):
        Verifiers({}, {"mine": path})
