"""The tiny task's model in plain fp32 PyTorch: log-probs, and sampling with tool calls over a cache of keys and values.

A Qwen2 with as many key heads as query heads and tied embeddings (data/tiny_tools/build_model.py), as functions of a
dictionary of weights, so that rollouts can come from any weights. It computes what transformers computes.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

Weights = dict[str, Tensor]
HEAD = "lm_head.weight"  # the embedding again


@dataclass
class Rollout:
    """One response: tokens, mask (1 where the policy sampled), log-probs (0 elsewhere), and what its tool said."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    calls: int = 0


class TinyModel:
    """Sizes of the model, and what can be computed with weights of these sizes.

    Args:
        config: transformers' config.
        bf16: round weights, layer outputs and logits like an engine in bfloat16; sums are in fp32.
        max_tokens: limit of prompt and response together.
    """

    def __init__(self, config: dict, *, bf16: bool = False, max_tokens: int = 256):
        self.bf16 = bf16
        self.layers, self.width, self.heads = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        if config["num_key_value_heads"] != self.heads or not config["tie_word_embeddings"]:
            raise ValueError("The harness supports only models with one key head per query head and tied embeddings.")
        self.eps, self.end, self.pad = (config[name] for name in ("rms_norm_eps", "eos_token_id", "pad_token_id"))
        head = self.width // self.heads
        theta = config["rope_parameters"]["rope_theta"]
        frequency = 1.0 / theta ** (torch.arange(0, head, 2).float() / head)
        angle = torch.arange(max_tokens).float()[:, None] * frequency
        self.cos, self.sin = (torch.cat([each, each], -1) for each in (angle.cos(), angle.sin()))

    def log_probs(self, weights: Weights, ids: Tensor, places: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """Return float[B, R], the log-probs of `targets` at the `places` before them; 0 outside `mask`.

        Except for attention, the layers compute a common beginning of rows only once, such as a group's prompt, and no
        padding; the head computes only the mask.

        Args:
            ids: int[B, T], padded on the right.
            places, targets: int[B, R].
            mask: bool[B, R].
        """
        nodes, first = prefix_tree(ids, places.amax(1) + 1)  # later tokens are not read
        tokens, positions = ids.flatten()[first], first % ids.shape[1]

        def padded(each: Tensor) -> Tensor:
            of_nodes = each[0].transpose(0, 1).flatten(1)
            # index_select gives the same result, but its gradient is a loop over rows
            return F.embedding(nodes, of_nodes).view(*nodes.shape, self.heads, -1).transpose(1, 2)

        def attend(_: int, *each: Tensor) -> Tensor:
            attended = F.scaled_dot_product_attention(*map(padded, each), is_causal=True)
            return attended.transpose(1, 2).flatten(0, 1).index_select(0, first).transpose(0, 1)[None]

        hidden = self._embed(weights, tokens)[None]
        hidden = self._body(weights, hidden, self.cos[positions], self.sin[positions], attend)[0]
        picked = hidden[nodes.gather(1, places)[mask]]
        logits = self._round(F.linear(picked, weights["model.embed_tokens.weight"]))
        found = logits.log_softmax(-1).gather(-1, targets[mask][:, None])[:, 0]
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    @torch.no_grad()
    def sample(
        self,
        weights: Weights,
        prompts: Sequence[list[int]],
        *,
        limit: int,
        reply: Callable[[Rollout], list[int] | None],
        stop: int,
        generator: torch.Generator,
    ) -> list[Rollout]:
        """Sample a response to each prompt, at temperature 1.

        Args:
            limit: tokens of a response, tool output included.
            reply: returns the tokens that follow a response that has sampled `stop`; None ends the response.
        """
        weights = {name: self._round(each.detach()) for name, each in weights.items()}
        count, lengths = len(prompts), torch.tensor([len(prompt) for prompt in prompts])
        first = int(lengths.max())
        shape = (self.layers, count, self.heads, first + limit, self.width // self.heads)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        same = torch.tensor([numbers[tuple(prompt)] for prompt in prompts])  # a group's prompt is computed once
        ids = torch.zeros(len(numbers), first, dtype=torch.long)
        for prompt, number in numbers.items():
            ids[number, : len(prompt)] = torch.tensor(prompt)

        def prefill(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[layer, :, :, :first], values[layer, :, :, :first] = key[same], value[same]
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        hidden = self._embed(weights, ids)
        hidden = self._body(weights, hidden, self.cos[:first], self.sin[:first], prefill)
        hidden = hidden[same, lengths - 1]
        rollouts, forced = [Rollout() for _ in prompts], [deque() for _ in prompts]
        rows, positions = list(range(count)), lengths.clone()  # of the cache: rows that continue come first
        while True:
            scores = self._round(F.linear(hidden, weights["model.embed_tokens.weight"])).log_softmax(-1)
            below = scores.exp().cumsum(-1)  # torch.multinomial takes ten times as long
            chance = 1 - torch.rand(len(rows), 1, generator=generator)  # above 0
            drawn = torch.searchsorted(below, chance * below[:, -1:])
            found, tokens, ended = scores.gather(1, drawn)[:, 0].tolist(), drawn[:, 0].tolist(), []
            for place, (row, log_prob) in enumerate(zip(rows, found, strict=True)):
                rollout, coming = rollouts[row], forced[row]
                is_own = not coming
                if coming:
                    tokens[place], log_prob = coming.popleft(), 0.0
                token = tokens[place]
                rollout.ids.append(token)
                rollout.mask.append(int(is_own))
                rollout.log_probs.append(log_prob)
                said = reply(rollout) if is_own and token == stop else []
                if said is None or len(said) >= limit - len(rollout.ids) or (is_own and token == self.end):
                    ended.append(place)
                else:
                    coming.extend(said)
            length = int(positions[: len(rows)].max())
            for place in reversed(ended):  # the last one takes its place
                last = len(rows) - 1
                keys[:, place, :, :length], values[:, place, :, :length] = (
                    each[:, last, :, :length] for each in (keys, values)
                )
                rows[place], tokens[place], positions[place] = rows[last], tokens[last], positions[last]
                del rows[last], tokens[last]
            if not rows:
                return rollouts
            now = slice(len(rows))
            hidden = self._step(weights, torch.tensor(tokens), positions[now], keys[:, now], values[:, now])
            positions[now] += 1

    def _step(self, weights: Weights, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the hidden state after one more token of each row; keep the token's keys and values."""
        rows, length = torch.arange(len(tokens)), int(positions.max()) + 1
        is_ahead = (torch.arange(length) > positions[:, None])[:, None, None]
        # What torch makes of a mask of bools, computed once for all layers
        unseen = torch.zeros(is_ahead.shape).masked_fill(is_ahead, -math.inf)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[layer][rows, :, positions], values[layer][rows, :, positions] = key[:, :, 0], value[:, :, 0]
            own = keys[layer, :, :, :length], values[layer, :, :, :length]
            return F.scaled_dot_product_attention(query, *own, attn_mask=unseen)

        hidden = self._embed(weights, tokens)[:, None]
        cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        return self._body(weights, hidden, cos, sin, attend)[:, 0]

    def _embed(self, weights: Weights, ids: Tensor) -> Tensor:
        """Return embeddings as transformers does: the padding token's gets no gradient from where it is read."""
        return F.embedding(ids, weights["model.embed_tokens.weight"], padding_idx=self.pad)

    def _body(self, weights: Weights, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        for layer in range(self.layers):
            hidden = self._round(self._layer(weights, layer, hidden, cos, sin, attend))
        return self._round(self._norm(hidden, weights["model.norm.weight"]))

    def _layer(self, weights: Weights, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Callable):
        def of(name: str) -> Tensor:
            return weights[f"model.layers.{layer}.{name}"]

        batch, length, _ = hidden.shape
        normed = self._norm(hidden, of("input_layernorm.weight"))
        query, key, value = (
            F.linear(normed, of(f"self_attn.{name}_proj.weight"), of(f"self_attn.{name}_proj.bias"))
            .view(batch, length, self.heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        attended = attend(layer, _rotate(query, cos, sin), _rotate(key, cos, sin), value)
        attended = attended.transpose(1, 2).reshape(batch, length, self.width)
        hidden = hidden + F.linear(attended, of("self_attn.o_proj.weight"))
        normed = self._norm(hidden, of("post_attention_layernorm.weight"))
        gate = F.silu(F.linear(normed, of("mlp.gate_proj.weight")))
        return hidden + F.linear(gate * F.linear(normed, of("mlp.up_proj.weight")), of("mlp.down_proj.weight"))

    def _round(self, each: Tensor) -> Tensor:
        return each.bfloat16().float() if self.bf16 else each

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self.width,), weight, self.eps)


def prefix_tree(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tree of the rows' common beginnings.

    Args:
        ids: int[B, T], padded on the right.
        lengths: int[B].
    Returns:
        int[B, T]: the node of each token, shared by rows that are equal up to there; 0 for padding. int[N]: for each
        node, a place in `ids.flatten()`.
    """
    nodes, first, branch = torch.zeros_like(ids), [], torch.zeros(len(ids), dtype=torch.long)
    vocabulary, count, width = int(ids.max()) + 1, 0, ids.shape[1]
    for place in range(int(lengths.max())):
        rows = (lengths > place).nonzero()[:, 0]
        found, branch[rows] = (branch[rows] * vocabulary + ids[rows, place]).unique(return_inverse=True)
        nodes[rows, place] = branch[rows] + count
        first.append(torch.empty_like(found).scatter_(0, branch[rows], rows * width + place))
        count += len(found)
    return nodes, torch.cat(first)


def _rotate(each: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = each.chunk(2, -1)
    return each * cos + torch.cat([-second, first], -1) * sin


def load_model(folder: Path) -> tuple[dict, Weights]:
    """Return a merged checkpoint's config and its weights in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return config, {name: each.detach() for name, each in model.state_dict().items() if name != HEAD}
