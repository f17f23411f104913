import asyncio

import numpy as np
import pytest

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
