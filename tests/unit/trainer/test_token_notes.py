"""What the actor's processes send the recorder about the loss."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_ext.records.token_rows import CLIPPED_HIGH, CLIPPED_LOW, DROPPED, KEPT, MASKED, NOT_FINITE, UNKNOWN

SENDING_S = 0.05


class Recorder:
    def __init__(self):
        self.told = []
        self.loss = SimpleNamespace(remote=self._loss)

    def _loss(self, *arguments):
        began = time.thread_time()
        while time.thread_time() - began < SENDING_S:  # as pickling does
            pass
        self.told.append(arguments)


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def ask(cpu_platform, monkeypatch):
    """Call verl's `ppo_loss` as the actor does, on two responses; `records` says which of them are recorded."""
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils import losses

    from verl_ext.trainer import token_notes

    recorder = Recorder()
    monkeypatch.setattr(token_notes, "_recorder", lambda: recorder)
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda values, data: values)

    def ask(log_prob, records, loss_mode="vanilla", weights=None):
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=3.0,
            policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        )
        columns = {
            "response_mask": nested([1, 0, 1], [1, 1]),
            "old_log_probs": nested([-1.0, 0.0, -1.0], [-1.0, -1.0]),
            "advantages": nested([1.0, 0.0, 1.0], [-1.0, -1.0]),
        }
        if records is not None:
            columns["record"] = torch.tensor(records)
        if weights is not None:
            columns["rollout_is_weights"] = nested(*weights)
        data = TensorDict(columns, batch_size=2)
        data = _with_settings(data)
        log_prob = torch.tensor(log_prob, requires_grad=True)
        loss, _ = losses.ppo_loss(config, {"log_probs": log_prob}, data)
        loss.backward()
        return recorder.told, log_prob.grad

    return ask


def _with_settings(data):
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    return data


def test_sending_counts_in_the_next_message(ask, monkeypatch):
    from verl_ext.trainer import token_notes

    monkeypatch.setattr(token_notes, "_sending_s", 0.0)
    for _ in range(2):
        told, _ = ask([[-1.0, 0.0, -1.0]] * 2, [4, -1])
    (_, _, before), (_, _, after) = told
    assert after - before > SENDING_S / 2 and after >= SENDING_S


UP, DOWN = float(np.log(1.5)), float(np.log(0.5))  # ratios beyond the clip
LOG_PROB = [[-1.0, 5.0, -1.0 + UP], [-1.0 + DOWN, -0.99, 0.0]]  # the last one is padding


def test_verls_own_loss_reports_log_probs_and_clips_of_only_the_recorded_response(ask):
    step = 17
    told, gradient = ask(LOG_PROB, [(step << 32) + 4, -1])
    ((at, columns, _),) = told
    assert at == step and columns["record"].tolist() == [(step << 32) + 4]
    assert columns["log_prob"].tolist() == pytest.approx(LOG_PROB[0])
    assert columns["decision"].tolist() == [KEPT, MASKED, CLIPPED_HIGH]
    kept = gradient[0] != 0
    assert kept.tolist() == [True, False, False], "what is reported is what had a gradient"


def test_the_second_response_is_reported_without_its_padding(ask):
    ((_, columns, _),) = ask(LOG_PROB, [-1, 9])[0]
    assert columns["lengths"].tolist() == [2] and columns["decision"].tolist() == [CLIPPED_LOW, KEPT]


def test_a_bug_in_what_is_reported_fails_no_update_and_is_reported_once(ask, monkeypatch, caplog):
    from verl_ext.trainer import token_notes

    monkeypatch.setattr(token_notes, "_verls", lambda *_: 1 / 0)
    for _ in range(2):
        told, gradient = ask(LOG_PROB, [0, 1])
    assert told == [] and gradient[0, 0] != 0 and caplog.text.count("could not be made of a loss") == 1


@pytest.mark.parametrize("records", [None, [-1, -1]])
def test_a_micro_batch_without_a_recorded_response_reports_nothing(ask, records):
    assert ask(LOG_PROB, records)[0] == []


def test_an_objective_of_ours_says_what_it_dropped(ask):
    import functools

    from verl.trainer.ppo import core_algos

    from verl_ext.trainer.objective import LOSSES, policy_loss

    core_algos.POLICY_LOSS_REGISTRY["retool_icepop"] = functools.partial(policy_loss, LOSSES["retool_icepop"])
    broken = [LOG_PROB[0], [float("nan"), -0.99, 0.0]]
    ((_, columns, _),) = ask(broken, [0, 1], "retool_icepop", [[1.0, 1.0, 1.0], [1.0, 0.0]])[0]
    assert columns["correction"] == "icepop"
    assert columns["decision"].tolist() == [KEPT, MASKED, CLIPPED_HIGH, NOT_FINITE, DROPPED]


def test_of_another_loss_of_verl_what_it_did_is_unknown(ask):
    ((_, columns, _),) = ask(LOG_PROB, [0, 1], "gpg")[0]
    assert set(columns["decision"].tolist()) == {UNKNOWN}
