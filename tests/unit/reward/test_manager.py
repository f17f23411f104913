"""How the reward manager treats a response: its verdict, its failures, its settings."""

import asyncio
import json
import logging
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.unit.reward.responses import score
from verl_ext.episode import SUMMARY, Episode, EpisodeKey, TokenRow, ToolUse, summary_of
from verl_ext.reward import Score
from verl_ext.reward.numbers import BrokenReward


def test_right_answer_is_plus_one_and_anything_else_minus_one(make_manager):
    manager = make_manager()
    assert score(manager, r"\boxed{42}")[0] == 1.0
    assert score(manager, r"\boxed{41}")[0] == -1.0
    assert score(manager, "I do not know")[0] == -1.0
    assert score(manager, "")[0] == -1.0
    assert score(manager, r"\boxed{42}", ground_truth=42)[0] == 1.0


def test_only_tokens_that_the_model_sampled_can_answer(make_manager):
    manager = make_manager()
    printed = ("tool", r"<interpreter>\boxed{42}</interpreter>")
    unmarked = ("tool", r"\boxed{42}")
    assert score(manager, "<code>print(42)</code>", printed)[0] == -1.0
    assert score(manager, "<code>print(42)</code>", unmarked, "that is it")[0] == -1.0
    assert score(manager, "<code>print(42)</code>", printed, r"so \boxed{41}")[0] == -1.0
    assert score(manager, "<code>print(42)</code>", ("tool", r"\boxed{41}"), r"so \boxed{42}")[0] == 1.0


def test_the_id_of_the_data_is_kept_with_the_sample(make_manager):
    """The id tells which problems were made from one template: evaluation/figures.py."""
    infos = [
        score(make_manager(), "7", **row)[1] for row in ({"extra_info": {"id": "rates-31"}}, {"extra_info": {}}, {})
    ]
    assert [info["id"] for info in infos] == ["rates-31", "", ""]


def test_the_name_of_the_problem_is_kept_with_the_sample(make_manager):
    """In verl's own dumps nothing else distinguishes rows with the same prompt: evaluation/samples.py."""
    prompts = [{"raw_prompt": [{"role": "user", "content": text}]} for text in ("1+1?", "1+2?", "1+1?")]
    names = [score(make_manager(), "7", **row)[1]["problem"] for row in prompts]
    assert names[0] == names[2] != names[1] and all(names)


def test_padding_and_special_tokens_change_nothing(make_manager):
    manager = make_manager()
    assert score(manager, r"\boxed{4", "2}\x00", padding=9) == score(manager, r"\boxed{4", "2}\x00")
    assert score(manager, "\\boxed{\x0042}")[0] == 1.0


def test_without_spans_the_whole_response_counts(make_manager):
    for other in ({}, {"model_spans": None}, {"model_spans": []}):
        assert score(make_manager(), r"\boxed{42}", extra_fields=other)[0] == 1.0


def test_the_spans_of_another_projects_loop_say_what_the_model_wrote(make_manager):
    text = r"\boxed{41}\boxed{42}"
    assert score(make_manager(), text, extra_fields={"model_spans": [(0, 10)]})[0] == -1.0
    reward, info = score(make_manager(), text, extra_fields={"model_spans": [(10, 20)], "finish_reason": "stop"})
    assert (reward, info["response_tokens"], info["model_turns"], info["finish_reason"]) == (1.0, 10.0, 1.0, "stop")


def test_spans_outside_the_response_are_our_error(make_manager):
    with pytest.raises(BrokenReward, match=r"model_spans contains \(0, 99\) in a response of 10 tokens"):
        score(make_manager(), r"\boxed{42}", extra_fields={"model_spans": [(0, 99)]})


def test_every_sample_carries_the_same_keys_of_the_same_types(make_manager, monkeypatch):
    from verl_ext.reward.maths import symbolic

    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    manager = make_manager()
    infos = [
        score(manager, r"\boxed{42}", calls=2, finish_reason="max_tokens")[1],
        score(manager, "nothing", extra_fields={})[1],
        score(manager, r"\boxed{x}", ground_truth=r"\sqrt{y}")[1],
        score(manager, "<code>", finish_reason="sandbox_failure")[1],
    ]
    texts = {"pred", "normalised", "verdict", "method", "data_source", "id", "problem", "finish_reason"}
    for info in infos:
        assert info.keys() == infos[0].keys()
        assert {key for key, value in info.items() if type(value) is str} == texts
        assert all(type(value) is float for key, value in info.items() if key not in texts)
        json.dumps(info)
    assert infos[0]["tool_calls"] == 2.0
    assert infos[0]["truncated"] == 1.0
    assert infos[1]["tool_calls"] == infos[1]["truncated"] == infos[2]["truncated"] == 0.0
    assert [info["verdict"] for info in infos] == ["correct", "no_answer", "unknown", "no_answer"]


def test_response_tokens_are_the_models_own(make_manager):
    _, info = score(make_manager(), "12345", ("tool", "67"), r"\boxed{42}")
    assert info["response_tokens"] == 15.0


def test_unverified_answer_is_flagged_and_not_scored_as_wrong(make_manager, monkeypatch, caplog):
    from verl_ext.reward.maths import symbolic

    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    manager = make_manager()
    score(manager, r"\boxed{41}")
    with caplog.at_level(logging.WARNING, "verl_ext.reward.rewarder"):
        reward, info = score(manager, r"\boxed{x}", ground_truth=r"\sqrt{y}")
    assert (reward, info["unverified"], info["acc"], info["train_acc"]) == (0.0, 1.0, 0.0, 0.5)
    assert "1 of 2 samples" in caplog.text


@pytest.mark.parametrize(("finish_reason", "flag"), [("sandbox_failure", 1.0), ("aborted", 0.0)])
def test_what_infrastructure_failed_is_named_and_not_scored_as_wrong(make_manager, finish_reason, flag):
    manager = make_manager(max_response_length=20, overlong_buffer_cfg={"enable": True, "len": 10})
    reward, info = score(manager, "<code>print(6*7)</code>", finish_reason=finish_reason)
    assert (reward, info["train_acc"], info["reward_overlong"]) == (0.0, 0.5, 0.0)
    assert (info["sandbox_failure"], info["finish_reason"]) == (flag, finish_reason)
    assert score(manager, "<code>print(6*7)</code>")[1]["sandbox_failure"] == 0.0


def test_unverified_response_is_kept_for_grading_again(make_manager, monkeypatch, tmp_path):
    from verl_ext.reward.maths import symbolic

    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    manager = make_manager(unverified_dir=str(tmp_path / "unverified"))
    score(manager, r"\boxed{41}")
    asked = [{"role": "user", "content": "What is it?"}]
    score(manager, "first", ("tool", "printed"), r"\boxed{x}", ground_truth=r"\sqrt{y}", uid="u1", raw_prompt=asked)
    score(manager, r"\boxed{z}", ground_truth=r"\sqrt{y}")
    (path,) = (tmp_path / "unverified").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["response"] for row in rows] == ["first\n\\boxed{x}", r"\boxed{z}"]
    assert (rows[0]["ground_truth"], rows[0]["uid"], rows[0]["pred"]) == (r"\sqrt{y}", "u1", "x")
    assert (str(rows[0]["index"]), rows[0]["data_source"]) == ("7", "tiny")
    assert [row["prompt"] for row in rows] == ["What is it?", ""]  # to grade it again as it was graded here


def test_padding_after_a_response_is_not_scored(make_manager):
    _, info = score(make_manager(), "abc", padding=5, extra_fields={})  # without spans, all of the row is the model's
    assert info["response_tokens"] == 3


def test_of_several_outputs_of_a_rollout_the_last_is_scored(make_manager):
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    texts = [r"\boxed{41}", r"\boxed{42}", r"\boxed{43}", r"\boxed{42}"]
    responses = torch.tensor([[ord(c) for c in text] for text in texts])
    batch = {"responses": responses, "attention_mask": torch.ones_like(responses)}
    row = {"data_source": "tiny", "reward_model": {"ground_truth": "42"}, "index": 7, "tool_extra_fields": {}}
    for number in (2, 3, 4):
        columns = {key: np.array([value] * number, dtype=object) for key, value in row.items()}
        first = {name: value[:number] for name, value in batch.items()}
        data = DataProto(batch=TensorDict(first, batch_size=number), non_tensor_batch=columns)
        result = asyncio.run(make_manager().run_single(data))
        assert result["reward_extra_info"]["pred"] == texts[number - 1][7:9]


def test_an_episode_is_scored_as_verls_row_of_it(make_manager):
    """Counts of its use of tools and of its turns are in the answer."""
    text = "<code>1</code>reply" + r"\boxed{42}"
    use = ToolUse(ok=2, errors={"timeout": 1, "NameError": 3})
    row = TokenRow(ids=[ord(c) for c in text], model_spans=[(0, 14), (19, 29)])
    episode = Episode(EpisodeKey("u", 3), [TokenRow(ids=[1]), row], "max_tokens", use)
    sample = {"data_source": "tiny", "reward_model": {"style": "rule", "ground_truth": "42"}, "index": 7}
    found = asyncio.run(make_manager().score_episode(episode, sample))
    extra_fields = {SUMMARY: summary_of(episode)}
    assert (found.score, found.info) == score(make_manager(), text, extra_fields=extra_fields)
    counts = {name: found.info[f"tool_{name}"] for name in ("calls", "errors", "timeouts")}
    assert counts == {"calls": 6.0, "errors": 4.0, "timeouts": 1.0}
    assert [found.info[name] for name in ("model_turns", "response_tokens", "truncated")] == [2.0, 24.0, 1.0]


def test_row_without_ground_truth_raises_and_is_named(make_manager):
    for broken in ({"style": "rule"}, {"ground_truth": None}):
        with pytest.raises(BrokenReward, match=r"row 7 of data_source 'tiny' has no reward_model.ground_truth"):
            score(make_manager(), r"\boxed{42}", reward_model=broken)
    with pytest.raises(BrokenReward, match=r"row 7 of data_source 'tiny' cannot be scored: The ground truth is empty"):
        score(make_manager(), r"\boxed{42}", ground_truth=" ")


class BrokenVerifier:
    def __init__(self, config):
        pass

    async def verify(self, response_text, ground_truth, sample):
        raise KeyError("missing")


def test_error_of_a_verifier_raises_and_is_named(make_manager):
    manager = make_manager(verifiers={"tin*": f"{__name__}.BrokenVerifier"})
    with pytest.raises(BrokenReward, match=r"BrokenVerifier failed on row 7 of data_source 'tiny': KeyError"):
        score(manager, r"\boxed{42}")


class FragileVerifier:
    """A verifier that raises on a response that says so."""

    def __init__(self, config):
        pass

    async def verify(self, response_text, ground_truth, sample):
        if "raise" in response_text:
            raise {"value": ValueError, "recursion": RecursionError, "worker": RuntimeError}[response_text.split()[1]]
        return Score(1.0, "", "correct", "fragile")


@pytest.mark.parametrize("kind", ["value", "recursion"])
def test_response_that_makes_a_verifier_raise_is_wrong(make_manager, kind):
    manager = make_manager(verifiers={"tin*": f"{__name__}.FragileVerifier"})
    reward, info = score(manager, f"raise {kind}")
    assert (reward, info["verdict"], info["unverified"]) == (-1.0, "wrong", 0.0)
    assert info["method"].startswith("error: ")
    assert score(manager, "fine")[0] == 1.0


def test_worker_that_cannot_be_had_still_raises(make_manager):
    manager = make_manager(verifiers={"tin*": f"{__name__}.FragileVerifier"})
    with pytest.raises(RuntimeError, match="FragileVerifier failed"):
        score(manager, "raise worker")


class FreeVerifier:
    """A verifier that returns what a test says, as a custom one may."""

    gives: Any = None

    def __init__(self, config):
        pass

    async def verify(self, response_text, ground_truth, sample):
        return self.gives


def _score(acc, verdict="correct"):
    return Score(acc, "", verdict, "free")


@pytest.mark.parametrize(
    ("acc", "number"),
    [(np.isclose(1, 1), 1.0), (True, 1.0), (False, 0.0), (1, 1.0), (0.25, 0.25), (Fraction(1, 4), 0.25)]
    + [(np.float32(0.5), 0.5), (np.int64(1), 1.0), (np.array([0.5]), 0.5), (Decimal("0.5"), 0.5)],
)
def test_an_accuracy_is_any_number_in_0_to_1(make_manager, monkeypatch, acc, number):
    monkeypatch.setattr(FreeVerifier, "gives", _score(acc))
    reward, info = score(make_manager(verifiers={"tin*": f"{__name__}.FreeVerifier"}), "text")
    assert reward == 2 * number - 1 and [info[name] for name in ("acc", "train_acc")] == [number, number]
    assert [type(info[name]) for name in ("acc", "train_acc")] == [float, float]


@pytest.mark.parametrize("number", [0.5, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_accuracy_may_be_a_tensor_of_one_element(make_manager, monkeypatch, dtype, number):
    import torch

    monkeypatch.setattr(FreeVerifier, "gives", _score(torch.tensor(number, dtype=getattr(torch, dtype))))
    assert score(make_manager(verifiers={"tin*": f"{__name__}.FreeVerifier"}), "text")[1]["acc"] == number


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        *[(_score(acc), f"returned acc={acc!r} with the verdict 'correct': expected a finite number in [0, 1]")
          for acc in (math.nan, math.inf, -math.inf, 5, -1, 1.01, None, "1", "right", 1j, [1.0], {})],
        *[(_score(acc), f"returned acc={acc!r} ")
          for acc in (np.float64("nan"), np.float32(2), np.array([0.5, 0.5]), np.str_("1"), Decimal("sNaN"))],
        (_score(10**400), "returned acc=10000000000"),
        (_score(math.nan, "unknown"), "returned acc=nan with the verdict 'unknown'"),
        (1.0, "returned 1.0: expected a Score"),
        (None, "returned None: expected a Score"),
    ],
)  # fmt: skip
def test_what_is_no_accuracy_stops_the_run_and_names_verifier_value_and_row(make_manager, monkeypatch, gives, said):
    """Neither a reward nor a quiet -1: the verifier is wrong, and not the response."""
    monkeypatch.setattr(FreeVerifier, "gives", gives)
    manager = make_manager(verifiers={"tin*": f"{__name__}.FreeVerifier"})
    with pytest.raises(
        BrokenReward, match=r"row 7 of data_source 'tiny' cannot be scored: FreeVerifier returned"
    ) as raised:
        score(manager, "text")
    assert said in str(raised.value) and "Correct FreeVerifier." in str(raised.value)


def test_tensors_that_are_no_accuracy_stop_the_run(make_manager, monkeypatch):
    import torch

    manager = make_manager(verifiers={"tin*": f"{__name__}.FreeVerifier"})
    for acc in (torch.tensor(math.nan), torch.tensor([0.5, 0.5]), torch.tensor(-1)):
        monkeypatch.setattr(FreeVerifier, "gives", _score(acc))
        with pytest.raises(BrokenReward, match="FreeVerifier returned acc=tensor"):
            score(manager, "text")


def test_verifier_is_chosen_by_data_source_before_ability(make_manager):
    manager = make_manager(verifiers={"Trivia/*": "verl_ext.reward.verifiers.exact.ExactVerifier"})
    half = {"ground_truth": "1/2"}
    assert score(manager, r"\boxed{0.5}", reward_model=half)[0] == 1.0  # mathematics
    assert score(manager, r"\boxed{0.5}", reward_model=half, data_source="trivia/en")[0] == -1.0
    assert score(manager, r"\boxed{0.5}", reward_model=half, ability="exact")[0] == -1.0
    assert score(manager, r"\boxed{0.5}", reward_model=half, ability="MATH")[0] == 1.0


def test_share_of_credit_becomes_a_reward_between(make_manager):
    constraints = [{"id": "punctuation:no_comma"}, {"id": "startend:quotation"}]
    manager = make_manager(
        verifiers={"ifeval": {"path": "verl_ext.reward.verifiers.ifeval.IfevalVerifier", "all_or_nothing": False}}
    )
    reward, info = score(
        manager,
        "no comma",
        reward_model={"ground_truth": json.dumps({"constraints": constraints})},
        data_source="ifeval",
    )
    assert (reward, info["acc"], info["verdict"], info["method"]) == (0.0, 0.5, "partial", "broken: startend:quotation")


@pytest.mark.parametrize(
    ("reward_kwargs", "message"),
    [
        ({"overlong_bufer": 1}, "Unknown settings under reward.reward_kwargs: overlong_bufer"),
        ({"overlong_buffer_cfg": {"enable": True, "length": 4}}, "Unknown .*overlong_buffer_cfg.length"),
        ({"overlong_buffer_cfg": {"enable": True}}, "overlong buffer is 0 tokens"),
        ({"overlong_buffer_cfg": {"enable": True, "len": 161}}, "overlong buffer is 161 tokens"),
        ({"overlong_counts": "tokens"}, "overlong_counts is 'tokens'"),
        ({"random_reward_p": 1.5}, "random_reward_p is 1.5"),
        ({"random_reward_p": -0.1}, "random_reward_p is -0.1"),
        ({"length_penalty": "linear"}, "length_penalty is 'linear'"),
        ({"length_penalty": [[10, -0.1], [20, -0.2]]}, r"length_penalty has the points \[\(10, -0.1\)"),
        ({"verifiers": {"code": "verl_ext.reward.Nothing"}}, "'verl_ext.reward.Nothing', which cannot be imported"),
        ({"verifiers": {"code": {"url": "x"}}}, "verifier for 'code' is None"),
        ({"custom_path": "pkg://verl.utils.reward_score.math_dapo"}, "custom_reward_function.path is .pkg://verl"),
    ],
)
def test_impossible_setting_stops_the_start(make_manager, reward_kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_manager(**reward_kwargs)


def test_verls_validation_metrics_take_the_infos(make_manager):
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    manager = make_manager()
    answers = ["42", "42", "41", None]  # one problem, four samples: majority 42
    infos = [score(manager, rf"\boxed{{{answer}}}" if answer else "no idea")[1] for answer in answers]
    columns = {key: [info[key] for info in infos] for key in infos[0]}
    metrics = process_validation_metrics(["tiny"] * 4, ["a"] * 4, columns, expected_acc_counts={("tiny", "a"): 4})[
        "tiny"
    ]
    assert metrics["acc"]["mean@4"] == 0.5
    assert metrics["reward_base"]["mean@4"] == 0.0
    assert metrics["acc"]["maj@4/mean"] > 0.5
    assert "pred" not in metrics and "verdict" not in metrics
