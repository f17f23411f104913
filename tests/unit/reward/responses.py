"""Responses of characters, for the reward manager."""

import asyncio

import numpy as np

from verl_ext.episode import SUMMARY, Episode, EpisodeKey, TokenRow, ToolUse, summary_of

PROMPT = "what is 6*7? "


def score(
    manager, *segments, ground_truth="42", padding=0, finish_reason="answer", calls=0, extra_fields=None, **fields
):
    """Reward of a response of (who, text) segments; a plain string is the model's own text.

    Builds the batch of verl 0.9.1's `AgentLoopWorker._compute_score` (agent_loop.py:967), with the column
    `extra_fields` of our loop, whose episode made `calls`, or with that of another project's loop.
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
    if extra_fields is None:
        use, row = ToolUse(ok=calls), TokenRow(model_spans=spans)
        extra_fields = {SUMMARY: summary_of(Episode(EpisodeKey("u", 0), [row], finish_reason, use))}
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
