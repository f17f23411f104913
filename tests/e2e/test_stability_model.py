"""Test that the stability map's model matches the one vLLM serves: equal log-probs, and as much noise in bfloat16."""

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.studies.tiny_model import TinyModel, Weights, load_model
from tests.e2e.versions import SAME
from tests.e2e.vllm_server import serve

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

RESPONSES, LENGTH = 8, 64  # per prompt; tokens at most


def sampled_by_vllm(url: str, prompt: list[int], seed: int) -> list[tuple[list[int], list[float]]]:
    """Sample responses at temperature 1: (tokens, their log-probs)."""
    asked = {"model": "tiny", "prompt": prompt, "n": RESPONSES, "max_tokens": LENGTH, "temperature": 1.0, "seed": seed}
    body = json.dumps(asked | {"logprobs": 0, "return_tokens_as_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        noted = [choice["logprobs"] for choice in json.load(answer)["choices"]]
    return [
        ([int(name.removeprefix("token_id:")) for name in each["tokens"]], each["token_logprobs"]) for each in noted
    ]


def responses_of(url: str, merged: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """Sample vLLM's responses to prompts of three lengths: (prompt, tokens, their log-probs)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(merged)
    texts = ["Total?", "What is 3 times 4?", "Tom has 2 apples and gets 5 more. How many apples does he have now?"]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [(prompt, *each) for seed, prompt in enumerate(prompts) for each in sampled_by_vllm(url, prompt, seed)]
    assert len({len(prompt) for prompt in prompts}) == 3 and len(rows) == 3 * RESPONSES
    return rows


@torch.no_grad()
def redone(model: TinyModel, weights: Weights, rows: list[tuple[list[int], list[int], list[float]]]) -> Tensor:
    """Return log-probs of all responses, float[tokens], computed in one batch that is padded on the right."""
    width = max(len(response) for _, response, _ in rows)
    ids = torch.full((len(rows), max(len(prompt) for prompt, *_ in rows) + width), model.pad)
    places, targets = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, (prompt, response, _) in enumerate(rows):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        places[row, : len(response)] = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        targets[row, : len(response)] = torch.tensor(response)
    found = model.log_probs(weights, ids, places, targets, torch.ones_like(targets, dtype=torch.bool))
    return torch.cat([own[: len(response)] for own, (_, response, _) in zip(found, rows, strict=True)])


def noted(rows: list[tuple[list[int], list[int], list[float]]]) -> Tensor:
    return torch.tensor([log_prob for *_, log_probs in rows for log_prob in log_probs])


def test_log_probs_are_vllms(vllm: str, small: Path) -> None:
    rows = responses_of(vllm, small / "sft" / "merged")
    config, weights = load_model(small / "sft" / "merged")
    differences = (redone(TinyModel(config), weights, rows) - noted(rows)).abs()
    print(f"{len(differences)} log-probs differ from vLLM's by {differences.max():.1e} at most")
    assert len(differences) > 200 and differences.max() < SAME


def test_an_engine_in_bf16_is_as_far_from_fp32_as_vllm_is(python: str, small: Path, tmp_path: Path) -> None:
    """The map's engine rounds like one in bfloat16, and must have the noise level of a real one."""
    merged = small / "sft" / "merged"
    options = ("--dtype", "bfloat16", "--max-model-len", "1024", "--enforce-eager")
    with serve(python, merged, tmp_path / "server.log", *options) as url:
        rows = responses_of(url, merged)
    config, weights = load_model(merged)
    exact = redone(TinyModel(config), weights, rows)
    of_vllm = (noted(rows) - exact).abs()
    rounded = {name: each.bfloat16().float() for name, each in weights.items()}
    ours = (redone(TinyModel(config, bf16=True), rounded, rows) - exact).abs()
    print(
        f"in bfloat16 {len(exact)} log-probs are {of_vllm.mean():.1e} off with vLLM, {ours.mean():.1e} with the map's"
    )
    assert len(exact) > 200 and 0.5 < ours.mean() / of_vllm.mean() < 2
