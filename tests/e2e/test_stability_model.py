"""The stability map's own model is the one that vLLM serves: it gives the same log-probs."""

import json
import urllib.request
from pathlib import Path

import pytest
import torch

from tests.e2e.versions import SAME
from verl_ext.analysis.tiny_model import TinyModel, load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RESPONSES, LENGTH = 8, 64  # of each prompt; tokens at the most


def sampled_by_vllm(url: str, prompt: list[int], seed: int) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probs) of responses at temperature 1."""
    asked = {"model": "tiny", "prompt": prompt, "n": RESPONSES, "max_tokens": LENGTH, "temperature": 1.0, "seed": seed}
    body = json.dumps(asked | {"logprobs": 0, "return_tokens_as_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        noted = [choice["logprobs"] for choice in json.load(answer)["choices"]]
    return [
        ([int(name.removeprefix("token_id:")) for name in each["tokens"]], each["token_logprobs"]) for each in noted
    ]


def test_log_probs_are_vllms(vllm: str, small: Path) -> None:
    """Prompts of three lengths, in one batch that is padded on the right."""
    from transformers import AutoTokenizer

    merged = small / "sft" / "merged"
    tokenizer, (config, weights) = AutoTokenizer.from_pretrained(merged), load_model(merged)
    texts = ["Total?", "What is 3 times 4?", "Tom has 2 apples and gets 5 more. How many apples does he have now?"]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    rows = [(prompt, *each) for seed, prompt in enumerate(prompts) for each in sampled_by_vllm(vllm, prompt, seed)]
    assert len({len(prompt) for prompt in prompts}) == 3 and len(rows) == 3 * RESPONSES

    width = max(len(response) for _, response, _ in rows)
    ids = torch.full((len(rows), max(map(len, prompts)) + width), config["pad_token_id"])
    places, targets = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, (prompt, response, _) in enumerate(rows):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        places[row, : len(response)] = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        targets[row, : len(response)] = torch.tensor(response)
    with torch.no_grad():
        found = TinyModel(config).log_probs(weights, ids, places, targets)
    differences = torch.cat(
        [(own[: len(noted)] - torch.tensor(noted)).abs() for own, (_, _, noted) in zip(found, rows, strict=True)]
    )
    print(f"{len(differences)} log-probs differ from vLLM's by {differences.max():.1e} at most")
    assert len(differences) > 200 and differences.max() < SAME
