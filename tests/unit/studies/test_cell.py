"""A run of the stability map: staleness, tool calls, rewards and what is reported."""

import itertools

import pytest
import torch

from scripts.studies import cell as cells
from scripts.studies.cell import Cell, run_cell
from scripts.studies.tiny_model import Rollout


@pytest.fixture
def short(task, monkeypatch):
    """The task with responses of 16 tokens, two to a prompt."""
    monkeypatch.setattr(task, "limit", 16)
    monkeypatch.setattr(task, "n", 2)
    monkeypatch.setattr(task, "_buffer", 4)
    return task


def play(tiny, task, monkeypatch, *, steps=4, **changes):
    """(result, weights that rollouts came from, in order; except those of the last evaluation)."""
    used, real = [], cells.roll_out

    def roll_out(engine, weights, *rest):
        used.append(torch.cat([each.detach().flatten() for each in weights.values()]).clone())
        found = real(engine, weights, *rest)
        rewards = torch.where(torch.arange(len(found.ids)) % 3 == 0, 1.0, -1.0)  # the random model has none right
        return found._replace(batch=found.batch._replace(rewards=rewards), right=(rewards > 0).float())

    monkeypatch.setattr(cells, "roll_out", roll_out)
    cell = Cell(**({"objective": "dapo", "staleness": 0, "bf16": False, "seed": 0} | changes))
    return run_cell(cell, tiny.config, tiny.weights, task, steps=steps), used


def test_rollouts_are_as_stale_as_the_cell_says(tiny, short, monkeypatch):
    """At staleness 2, steps 1 to 3 use the first weights and step 5 those of step 3; otherwise each has its own.

    Step 1 has learning rate 0, so step 2 also begins with the first weights.
    """
    _, fresh = play(tiny, short, monkeypatch, steps=5)
    assert [torch.equal(a, b) for a, b in itertools.pairwise(fresh)] == [True, False, False, False]
    result, stale = play(tiny, short, monkeypatch, steps=5, staleness=2)
    assert torch.equal(stale[0], stale[3]) and not torch.equal(stale[0], stale[4])
    # steps 1 and 2 train on the same rollouts in both cells, so what step 3 starts from is the same
    assert torch.equal(stale[4], fresh[2])
    assert [row["log_prob_difference"] > 1e-4 for row in result["rows"]] == [False, False, True, True, True]


def test_the_learning_rate_rises_as_in_the_run(tiny, short, monkeypatch):
    """tiny_dapo: 3e-4 after a warm-up of 3 steps, which verl begins at 0. A step has two updates."""
    rates, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or real(self))
    play(tiny, short, monkeypatch, steps=4)
    assert rates == pytest.approx([0, 0, 1e-4, 1e-4, 2e-4, 2e-4, 3e-4, 3e-4])


def test_a_cell_is_repeated_by_its_seed(tiny, short, monkeypatch):
    first, _ = play(tiny, short, monkeypatch, steps=2, objective="icepop_onpolicy", bf16=True, staleness=1)
    again, _ = play(tiny, short, monkeypatch, steps=2, objective="icepop_onpolicy", bf16=True, staleness=1)
    other, _ = play(tiny, short, monkeypatch, steps=2, objective="icepop_onpolicy", bf16=True, staleness=1, seed=1)
    assert first == again and first["rows"] != other["rows"]
    assert first["rows"][0]["log_prob_difference"] > 1e-4  # the engine rounds, from the first step on


def test_some_steps_have_a_cosine(tiny, short, monkeypatch):
    monkeypatch.setattr(cells, "COSINE_AT", (2,))
    result, used = play(tiny, short, monkeypatch, steps=2)
    assert "cosine" not in result["rows"][0] and -1 <= result["rows"][1]["cosine"] <= 1
    assert len(used) == 2 + cells.FRESH


def rollout(task, tiny, text, calls=0):
    ids = tiny.tokenizer.encode(text, add_special_tokens=False)
    return Rollout(ids, [1] * len(ids), [0.0] * len(ids), calls)


def test_code_is_answered_until_the_limit_of_calls(tiny, task):
    asked = rollout(task, tiny, "<code>print(7)</code>")
    said = tiny.tokenizer.decode(task.reply(asked))
    assert said == "\n<interpreter>\n7\n</interpreter>\n" and asked.calls == 1
    assert task.reply(rollout(task, tiny, "<code>print(7)</code>", calls=3)) is None


def test_what_cannot_be_run_is_said(tiny, task):
    assert "</code> without <code>" in tiny.tokenizer.decode(task.reply(rollout(task, tiny, "print(7)</code>")))


def test_accuracy_is_of_the_policys_own_tokens(tiny, task):
    own = rollout(task, tiny, "\\boxed{7}")
    assert task.accuracy(own, "7") == 1 and task.accuracy(own, "8") == 0
    own.mask = [0] * len(own.ids)
    assert task.accuracy(own, "7") == 0


def test_rewards_are_the_runs(task):
    """128 tokens, the last 32 of which cost up to 1: right with 96: 1; right with 128: 0; wrong with 112: -1.5."""
    assert task.rewards([1.0, 1.0, 0.0], torch.tensor([96, 128, 112])).tolist() == [1.0, 0.0, -1.5]
