"""The tiny task's model in plain fp32 PyTorch: log-probs, and sampling with tool calls over a cache of keys and values.

A Qwen2 with as many key heads as query heads and tied embeddings (data/tiny_tools/build_model.py), as functions of a
dictionary of weights, so that rollouts can come from any weights. What it computes is what transformers does.
"""

import json
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
    """One response: tokens, 1 where the policy sampled, log-probs (0 elsewhere), and what its tool said."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    calls: int = 0


class TinyModel:
    """Sizes of the model, and what can be computed with weights of these sizes.

    Args:
        config: of transformers.
        bf16: as an engine in bfloat16: weights, what each layer gives, and logits are rounded; sums are in fp32.
        max_tokens: prompt and response.
    """

    def __init__(self, config: dict, *, bf16: bool = False, max_tokens: int = 256):
        self.bf16 = bf16
        self.layers, self.width, self.heads = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        if config["num_key_value_heads"] != self.heads or not config["tie_word_embeddings"]:
            raise ValueError("The harness computes a model with one key head a query head and tied embeddings.")
        self.eps, self.end, self.pad = (config[name] for name in ("rms_norm_eps", "eos_token_id", "pad_token_id"))
        head = self.width // self.heads
        theta = config["rope_parameters"]["rope_theta"]
        frequency = 1.0 / theta ** (torch.arange(0, head, 2).float() / head)
        angle = torch.arange(max_tokens).float()[:, None] * frequency
        self.cos, self.sin = (torch.cat([each, each], -1) for each in (angle.cos(), angle.sin()))

    def log_probs(self, weights: Weights, ids: Tensor, places: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """float[B, R]: of `targets` at the `places` before them; 0 outside of `mask`.

        The layers compute without padding, but for attention, and the head at the mask alone.

        Args:
            ids: int[B, T], padded on the right.
            places, targets: int[B, R].
            mask: bool[B, R].
        """
        lengths = places.amax(1) + 1  # what stands behind is not read
        is_read = torch.arange(ids.shape[1]) < lengths[:, None]
        positions, read = is_read.nonzero()[:, 1], is_read.flatten().nonzero()[:, 0]

        def padded(each: Tensor) -> Tensor:
            rows = each.new_zeros(ids.numel(), self.heads, each.shape[-1])
            rows = rows.index_copy(0, read, each[0].transpose(0, 1))
            return rows.view(*ids.shape, self.heads, -1).transpose(1, 2)

        def attend(_: int, *each: Tensor) -> Tensor:
            attended = F.scaled_dot_product_attention(*map(padded, each), is_causal=True)
            return attended.transpose(1, 2).flatten(0, 1).index_select(0, read).transpose(0, 1)[None]

        hidden = self._embed(weights, ids[is_read])[None]
        hidden = self._body(weights, hidden, self.cos[positions], self.sin[positions], attend)[0]
        picked = hidden[((lengths.cumsum(0) - lengths)[:, None] + places)[mask]]
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
        """A response to each prompt, at temperature 1.

        Args:
            limit: tokens of a response, what its tool says included.
            reply: tokens that follow a response that has sampled `stop`; None ends it.
        """
        weights = {name: self._round(each.detach()) for name, each in weights.items()}
        count, lengths = len(prompts), torch.tensor([len(prompt) for prompt in prompts])
        first = int(lengths.max())
        shape = (self.layers, count, self.heads, first + limit, self.width // self.heads)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        ids = torch.zeros(count, first, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)

        def prefill(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[layer, :, :, :first], values[layer, :, :, :first] = key, value
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        hidden = self._embed(weights, ids)
        hidden = self._body(weights, hidden, self.cos[:first], self.sin[:first], prefill)
        hidden = hidden[torch.arange(count), lengths - 1]
        rollouts, forced = [Rollout() for _ in prompts], [deque() for _ in prompts]
        # Rows of the cache, those of them that go on, and where the next token of each is written. A row that has ended
        # stays, as a copy of the cache costs more, until half of them have.
        rows, alive, positions, tokens = list(range(count)), list(range(count)), lengths.clone(), lengths.clone()
        while True:
            scores = self._round(F.linear(hidden[alive], weights["model.embed_tokens.weight"])).log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=generator)
            found, drawn = scores.gather(1, drawn)[:, 0].tolist(), drawn[:, 0].tolist()
            kept = []
            for place, token, log_prob in zip(alive, drawn, found, strict=True):
                rollout, coming = rollouts[rows[place]], forced[rows[place]]
                rollout.mask.append(int(not coming))
                if coming:
                    token, log_prob = coming.popleft(), 0.0
                rollout.ids.append(token)
                rollout.log_probs.append(log_prob)
                tokens[place] = token
                if rollout.mask[-1] and token == self.end:
                    continue
                if rollout.mask[-1] and token == stop:
                    said = reply(rollout)
                    if said is None or len(said) >= limit - len(rollout.ids):
                        continue
                    coming.extend(said)
                if len(rollout.ids) < limit:
                    kept.append(place)
            if not kept:
                return rollouts
            if 2 * len(kept) <= len(rows):
                keys, values, positions, tokens = keys[:, kept], values[:, kept], positions[kept], tokens[kept]
                rows, kept = [rows[place] for place in kept], list(range(len(kept)))
            hidden = self._step(weights, tokens, positions, keys, values)
            alive = kept
            positions[alive] += 1

    def _step(self, weights: Weights, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The hidden state after one more token of each row, whose keys and values are kept."""
        rows, length = torch.arange(len(tokens)), int(positions.max()) + 1
        seen = (torch.arange(length) <= positions[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[layer][rows, :, positions], values[layer][rows, :, positions] = key[:, :, 0], value[:, :, 0]
            own = keys[layer, :, :, :length], values[layer, :, :, :length]
            return F.scaled_dot_product_attention(query, *own, attn_mask=seen)

        hidden = self._embed(weights, tokens)[:, None]
        cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        return self._body(weights, hidden, cos, sin, attend)[:, 0]

    def _embed(self, weights: Weights, ids: Tensor) -> Tensor:
        """As transformers: the padding token's embedding gets no gradient from where it is read."""
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


def _rotate(each: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = each.chunk(2, -1)
    return each * cos + torch.cat([-second, first], -1) * sin


def load_model(folder: Path) -> tuple[dict, Weights]:
    """A merged checkpoint's config and weights, these in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return config, {name: each.detach() for name, each in model.state_dict().items() if name != HEAD}
