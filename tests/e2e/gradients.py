"""Check the gradient of the stability map's model against the real stack: the norm that verl logs for a run's step 1.

`run` is a `Run` of test_failures.py, whose first step has learning rate 0, so that both its updates have the weights of
`merged`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.studies.tiny_model import TinyModel, load_model
from verl_ext.episode import EpisodeKey
from verl_ext.objectives.mean import mean_loss
from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.terms import Tokens

MAX_TOKENS = 1024


def check_gradient_norm(run: Any, merged: Path) -> None:
    """Check the norm that verl logs, the mean of those of two mini-batches. They are computed again from the batches
    that the sampler gave to the trainer, with PPO's loss over the tokens of a mini-batch.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(merged)
    config, weights = load_model(merged)
    weights = {name: each.requires_grad_() for name, each in weights.items()}
    model = TinyModel(config, max_tokens=MAX_TOKENS)
    said = {EpisodeKey(row["uid"], row["session"]): row for row in run.trajectories()}
    with open(run.out / "tokens.jsonl") as lines:
        noted = json.loads(next(lines))
    batch = run.batches()[0]

    def norm(keys: list[str], advantages: list[float]) -> float:
        rows = [said[EpisodeKey.parse(key).original] for key in keys]
        prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
        responses, log_probs = zip(*(noted[key] for key in keys), strict=True)
        width = max(map(len, responses))
        ids = torch.full((len(keys), max(map(len, prompts)) + width), model.pad)
        places, targets = torch.zeros(2, len(keys), width, dtype=torch.long)
        mask, old = torch.zeros(len(keys), width, dtype=torch.bool), torch.zeros(len(keys), width)
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
            places[i, : len(response)] = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(response))
            targets[i, : len(response)], old[i, : len(response)] = torch.tensor(response), torch.tensor(log_probs[i])
            for turn in rows[i]["turns"]:
                mask[i, turn["start"] : turn["start"] + turn["tokens"]] = turn["role"] == "model"
        found = model.log_probs(weights, ids, places, targets, mask)
        scaled = torch.tensor(advantages)[:, None].expand_as(found)
        terms = ppo(Tokens(found, old, scaled, mask), low=0.2, high=0.28, dual_clip=10.0)
        loss = mean_loss(terms.objective, mask, mode="token-mean")
        gradients = torch.autograd.grad(loss, list(weights.values()))
        return float(torch.cat([each.flatten() for each in gradients]).norm())

    half = len(batch["keys"]) // 2
    halves = [(batch["keys"][part], batch["advantages"][part]) for part in (slice(half), slice(half, None))]
    found, logged = sum(norm(*each) for each in halves) / 2, dict(run.metrics())[1]["actor/grad_norm"]
    print(f"the norm of the first step's gradients is {found:.6f}, verl logs {logged:.6f}")
    assert found == pytest.approx(logged, rel=1e-3) and found > 0.01
