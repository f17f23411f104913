import asyncio
import json
import logging

import numpy as np
import pytest

from verl_ext.reward import Score

PROMPT = "what is 6*7? "


class CharTokenizer:
    """Stands for the tokenizer: one token per character, 0 is a special token."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join("<eos>" if t == 0 and not skip_special_tokens else chr(t) if t else "" for t in token_ids)


@pytest.fixture
def make_manager():
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import load_reward_manager

    def make(max_response_length=160, custom_path=None, **reward_kwargs):
        """Load the manager as verl does, from the keys that our YAMLs use."""
        manager = {"source": "importlib", "name": "RetoolRewardManager"}
        config = {
            "data": {"max_response_length": max_response_length},
            "reward": {
                "custom_reward_function": {"path": custom_path, "name": "compute_score"},
                "reward_manager": manager | {"module": {"path": "pkg://verl_ext.reward.manager"}},
                "reward_kwargs": reward_kwargs,
            },
        }
        return load_reward_manager(
            OmegaConf.create(config), CharTokenizer(), reward_router_address=None, reward_model_tokenizer=None
        )

    return make


def score(manager, *segments, ground_truth="42", padding=0, **fields):
    """Reward of a response of (who, text) segments; a plain string is the model's own text.

    Builds the batch of verl 0.9.1's `AgentLoopWorker._compute_score` (agent_loop.py:967).
    """
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    text, spans = "", []
    for segment in segments:
        who, said = segment if isinstance(segment, tuple) else ("model", segment)
        if who == "model":
            spans.append((len(text), len(text) + len(said)))
        text += said
    extra_fields = {"model_spans": spans, "finish_reason": "answer"} | fields.pop("extra_fields", {})
    extra_fields = {key: value for key, value in extra_fields.items() if value is not None}
    prompt, response = torch.tensor([[ord(c) for c in PROMPT]]), torch.tensor([[ord(c) for c in text]])
    pad = torch.zeros((1, padding), dtype=torch.int64)
    batch = {
        "prompts": prompt,
        "responses": torch.cat([response, pad], dim=1),
        "attention_mask": torch.cat([torch.ones_like(prompt), torch.ones_like(response), pad], dim=1),
    }
    row = {"data_source": "tiny", "reward_model": {"style": "rule", "ground_truth": ground_truth}, "index": 7} | fields
    non_tensor = {key: np.array([value]) for key, value in row.items()}
    non_tensor["tool_extra_fields"] = np.array([extra_fields], dtype=object)
    data = DataProto(batch=TensorDict(batch, batch_size=1), non_tensor_batch=non_tensor)
    result = asyncio.run(manager.run_single(data))
    return result["reward_score"], result["reward_extra_info"]


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


def test_padding_and_special_tokens_change_nothing(make_manager):
    manager = make_manager()
    assert score(manager, r"\boxed{4", "2}\x00", padding=9) == score(manager, r"\boxed{4", "2}\x00")
    assert score(manager, "\\boxed{\x0042}")[0] == 1.0


def test_without_spans_the_whole_response_counts(make_manager):
    assert score(make_manager(), r"\boxed{42}", extra_fields={"model_spans": None})[0] == 1.0


def test_spans_outside_the_response_are_our_error(make_manager):
    with pytest.raises(ValueError, match=r"model_spans has \(0, 99\) in a response of 10 tokens"):
        score(make_manager(), r"\boxed{42}", extra_fields={"model_spans": [(0, 99)]})


def test_every_sample_carries_the_same_keys_of_the_same_types(make_manager, monkeypatch):
    from verl_ext.reward.maths import symbolic

    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    manager = make_manager()
    infos = [
        score(manager, r"\boxed{42}", extra_fields={"tool_calls": 2, "truncated": 1.0})[1],
        score(manager, "nothing", extra_fields={"finish_reason": None})[1],
        score(manager, r"\boxed{x}", ground_truth=r"\sqrt{y}")[1],
        score(manager, "<code>", extra_fields={"finish_reason": "sandbox_failure"})[1],
    ]
    texts = {"pred", "verdict", "method", "data_source", "finish_reason"}
    for info in infos:
        assert info.keys() == infos[0].keys()
        assert {key for key, value in info.items() if type(value) is str} == texts
        assert all(type(value) is float for key, value in info.items() if key not in texts)
        json.dumps(info)
    assert infos[0]["tool_calls"] == 2.0
    assert infos[0]["truncated"] == 1.0
    assert infos[1]["tool_calls"] == 0.0
    assert [info["verdict"] for info in infos] == ["correct", "no_answer", "unknown", "no_answer"]


def test_response_tokens_are_the_models_own(make_manager):
    _, info = score(make_manager(), "12345", ("tool", "67"), r"\boxed{42}")
    assert info["response_tokens"] == 15.0


def test_unverified_answer_is_flagged_and_not_scored_as_wrong(make_manager, monkeypatch, caplog):
    from verl_ext.reward.maths import symbolic

    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    manager = make_manager()
    score(manager, r"\boxed{41}")
    with caplog.at_level(logging.WARNING, "verl_ext.reward.manager"):
        reward, info = score(manager, r"\boxed{x}", ground_truth=r"\sqrt{y}")
    assert (reward, info["unverified"], info["acc"], info["train_acc"]) == (0.0, 1.0, 0.0, 0.5)
    assert "1 of 2 samples" in caplog.text


@pytest.mark.parametrize(("finish_reason", "flag"), [("sandbox_failure", 1.0), ("aborted", 0.0)])
def test_what_infrastructure_failed_is_named_and_not_scored_as_wrong(make_manager, finish_reason, flag):
    failed = {"finish_reason": finish_reason}
    manager = make_manager(max_response_length=20, overlong_buffer_cfg={"enable": True, "len": 10})
    reward, info = score(manager, "<code>print(6*7)</code>", extra_fields=failed)
    assert (reward, info["train_acc"], info["reward_overlong"]) == (0.0, 0.5, 0.0)
    assert (info["sandbox_failure"], info["finish_reason"]) == (flag, finish_reason)
    assert score(manager, "<code>print(6*7)</code>")[1]["sandbox_failure"] == 0.0


def test_overlong_penalty_is_added_and_logged(make_manager):
    buffer = {"enable": True, "len": 40, "penalty_factor": 1.0, "log": True}
    manager = make_manager(overlong_buffer_cfg=buffer)
    right, wrong = r"\boxed{42}", r"\boxed{41}"
    # 160 - 40 = 120 tokens are free; 140 is half of the buffer: -0.5
    assert score(manager, "a" * 110 + right)[0] == 1.0
    assert score(manager, "a" * 130 + right)[0] == 0.5
    assert score(manager, "a" * 150 + wrong)[0] == -2.0
    _, info = score(manager, "a" * 130 + right)
    assert (info["acc"], info["train_acc"], info["reward_base"], info["reward_overlong"]) == (1.0, 1.0, 1.0, -0.5)


def test_overlong_penalty_counts_tool_output_unless_told_otherwise(make_manager):
    segments = ["<code>1</code>", ("tool", "b" * 116), r"\boxed{42}"]  # 14 + 116 + 10 = 140 tokens
    buffer = {"enable": True, "len": 40}
    assert score(make_manager(overlong_buffer_cfg=buffer), *segments)[0] == 0.5
    assert score(make_manager(overlong_buffer_cfg=buffer, overlong_counts="model"), *segments)[0] == 1.0


def test_overlong_options_of_verl_are_read(make_manager):
    long_answer = "a" * 130 + r"\boxed{42}"
    assert score(make_manager(overlong_buffer_cfg={"enable": False, "len": 40}), long_answer)[0] == 1.0
    assert (
        score(make_manager(overlong_buffer_cfg={"enable": True, "len": 40, "penalty_factor": 0.5}), long_answer)[0]
        == 0.75
    )
    assert (
        score(make_manager(max_resp_len=150, overlong_buffer_cfg={"enable": True, "len": 40}), long_answer)[0] == 0.25
    )


def test_floor_bounds_the_sum(make_manager):
    manager = make_manager(overlong_buffer_cfg={"enable": True, "len": 40}, reward_floor=-1.0)
    assert score(manager, "a" * 150 + r"\boxed{41}")[0] == -1.0
    assert score(manager, "a" * 150 + r"\boxed{42}")[0] == 0.0


def test_reward_parts_are_logged_each_by_itself(make_manager):
    manager = make_manager(
        max_response_length=20000,
        overlong_buffer_cfg={"enable": True, "len": 10000},
        length_penalty="piecewise",
        tool_bonus=True,
    )
    # 14,000 tokens: 4,000 of 10,000 into the buffer, -0.4; piecewise -0.04 - 0.05 x 2; 3 calls, 0.3
    reward, info = score(manager, "a" * 13990 + r"\boxed{41}", extra_fields={"tool_calls": 3})
    parts = {key: round(value, 6) for key, value in info.items() if key.startswith("reward_")}
    assert parts == {"reward_base": -1, "reward_overlong": -0.4, "reward_length": -0.14, "reward_tool_bonus": 0.3}
    assert reward == pytest.approx(-1.24)
    assert (info["acc"], info["train_acc"]) == (0.0, 0.0)


def test_tool_bonus_is_for_wrong_answers_only_and_ends_at_its_ceiling(make_manager):
    def reward(text, calls, **options):
        return score(make_manager(**options), text, extra_fields={"tool_calls": calls})[0]

    assert reward(r"\boxed{41}", 2, tool_bonus=True) == pytest.approx(-0.8)
    assert reward("no box", 9, tool_bonus=True) == pytest.approx(-0.6)
    assert reward(r"\boxed{42}", 9, tool_bonus=True) == 1.0
    assert reward(r"\boxed{41}", 9) == -1.0


def test_piecewise_penalty_counts_what_it_is_told_to(make_manager):
    segments = ["<code>1</code>", ("tool", "b" * 9976), r"\boxed{42}"]  # 14 + 9976 + 10 = 10000 tokens
    options = {"max_response_length": 20000, "length_penalty": "piecewise"}
    assert score(make_manager(**options), *segments)[0] == pytest.approx(0.98)
    assert score(make_manager(**options, overlong_counts="model"), *segments)[0] == 1.0


def test_piecewise_penalty_takes_points_from_the_yaml(make_manager):
    manager = make_manager(length_penalty=[[10, 0], [20, -0.1], [30, -0.5]])
    assert score(manager, "a" * 15 + r"\boxed{42}")[0] == pytest.approx(0.7)  # 25 tokens: -0.3
    assert score(manager, r"\boxed{42}")[0] == 1.0


def test_failed_sample_gets_no_part_of_any_penalty_or_bonus(make_manager):
    manager = make_manager(max_response_length=20000, length_penalty="piecewise", tool_bonus=True)
    failed = {"finish_reason": "sandbox_failure", "tool_calls": 3}
    reward, info = score(manager, "a" * 12000, extra_fields=failed)
    assert (reward, info["reward_length"], info["reward_tool_bonus"]) == (0.0, 0.0, 0.0)


def test_unverified_response_is_kept_for_grading_again(make_manager, monkeypatch, tmp_path):
    from verl_ext.reward.maths import symbolic

    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    manager = make_manager(unverified_dir=str(tmp_path / "unverified"))
    score(manager, r"\boxed{41}")
    score(manager, "first", ("tool", "printed"), r"\boxed{x}", ground_truth=r"\sqrt{y}", uid="u1")
    score(manager, r"\boxed{z}", ground_truth=r"\sqrt{y}")
    (path,) = (tmp_path / "unverified").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["response"] for row in rows] == ["first\n\\boxed{x}", r"\boxed{z}"]
    assert (rows[0]["ground_truth"], rows[0]["uid"], rows[0]["pred"]) == (r"\sqrt{y}", "u1", "x")
    assert (str(rows[0]["index"]), rows[0]["data_source"]) == ("7", "tiny")


@pytest.mark.parametrize(("p", "reward"), [(0.0, -1.0), (1.0, 1.0)])
def test_random_reward_may_be_certain(make_manager, p, reward):
    manager = make_manager(random_reward_p=p)
    assert {score(manager, text)[0] for text in (r"\boxed{42}", r"\boxed{41}", "none")} == {reward}


def test_padding_behind_a_response_is_not_scored(make_manager, monkeypatch):
    manager, seen = make_manager(), []
    monkeypatch.setattr(manager, "_decode", lambda token_ids, spans: seen.append(token_ids) or r"\boxed{42}")
    score(manager, "abc", padding=5)
    assert seen == [[ord(c) for c in "abc"]]


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


def test_row_without_ground_truth_raises_and_is_named(make_manager):
    for broken in ({"style": "rule"}, {"ground_truth": None}):
        with pytest.raises(ValueError, match=r"row 7 of data_source 'tiny' has no reward_model.ground_truth"):
            score(make_manager(), r"\boxed{42}", reward_model=broken)
    with pytest.raises(ValueError, match=r"row 7 of data_source 'tiny' cannot be scored: The ground truth is empty"):
        score(make_manager(), r"\boxed{42}", ground_truth=" ")


class BrokenVerifier:
    def __init__(self, config):
        pass

    async def verify(self, response_text, ground_truth, sample):
        raise KeyError("missing")


def test_error_of_a_verifier_raises_and_is_named(make_manager):
    manager = make_manager(verifiers={"tin*": f"{__name__}.BrokenVerifier"})
    with pytest.raises(RuntimeError, match=r"BrokenVerifier failed on row 7 of data_source 'tiny': KeyError"):
        score(manager, r"\boxed{42}")


class FragileVerifier:
    """Raises on a response that says so."""

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


def test_a_share_of_a_right_answer_earns_no_tool_bonus(make_manager):
    manager = make_manager(
        verifiers={"ifeval": {"path": "verl_ext.reward.verifiers.ifeval.IfevalVerifier", "all_or_nothing": False}},
        tool_bonus=True,
    )
    constraints = [{"id": "punctuation:no_comma"}, {"id": "startend:quotation"}]
    row = {"reward_model": {"ground_truth": json.dumps({"constraints": constraints})}, "data_source": "ifeval"}
    reward, info = score(manager, "no comma", extra_fields={"tool_calls": 3}, **row)
    assert (reward, info["acc"], info["reward_tool_bonus"]) == (0.0, 0.5, 0.0)
    reward, info = score(manager, "a, comma", extra_fields={"tool_calls": 3}, **row)
    assert (reward, info["acc"], info["reward_tool_bonus"]) == (pytest.approx(-0.7), 0.0, pytest.approx(0.3))


def test_random_reward_keeps_the_rate_and_forgets_the_answer(make_manager):
    manager = make_manager(random_reward_p=0.3)
    drawn = {"42": [], "41": []}
    for answer, seen in drawn.items():
        for session in range(200):
            reward, info = score(manager, rf"\boxed{{{answer}}}", session_id=session, global_steps=3)
            assert info["acc"] == float(answer == "42")
            assert reward == 2 * info["train_acc"] - 1
            seen.append(info["train_acc"])
    for seen in drawn.values():
        assert np.mean(seen) == pytest.approx(0.3, abs=0.1)  # 200 draws: standard deviation 0.03


@pytest.mark.parametrize("place", ["index", "global_steps", "session_id"])
def test_random_reward_of_an_equal_response_differs_at_another_place(make_manager, place):
    """The same answer to a problem is not rewarded as such: not at the next step, nor in another sample."""
    manager = make_manager(random_reward_p=0.5)
    fixed = {"index": 7, "global_steps": 3, "session_id": 0}
    draws = [score(manager, r"\boxed{42}", **(fixed | {place: number}))[0] for number in range(40)]
    assert set(draws) == {1.0, -1.0}


def test_random_reward_is_repeatable_and_depends_on_the_seed(make_manager):
    def draws(**options):
        manager = make_manager(random_reward_p=0.5, **options)
        return [score(manager, r"\boxed{42}", session_id=i)[0] for i in range(40)]

    assert draws() == draws()
    assert draws() != draws(random_reward_seed=1)


@pytest.mark.parametrize(
    ("reward_kwargs", "message"),
    [
        ({"overlong_bufer": 1}, "Unknown under reward.reward_kwargs: overlong_bufer"),
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


def test_manager_is_registered_as_retool(make_manager):
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    assert isinstance(make_manager(), get_reward_manager_cls("retool"))


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
