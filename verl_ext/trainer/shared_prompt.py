"""The actor's forward pass without what no loss needs: each prompt once for its group, logits only for responses.

    actor_rollout_ref.model: {use_fused_kernels: true, fused_kernel_options: {impl_backend: shared_prompt}}

In SFT the same keys of `model` leave out logits without loss. Log-probs and gradients are those of the plain pass: a
causal model gives equal prefixes equal hidden states. A token of a response attends to the keys of its prompt, wherever
in the packed batch that prompt was computed (flash-attention: fewer queries than keys, aligned at the end). The more
of a group is in one micro-batch, the larger the saving: use `use_dynamic_bsz: false` and micro-batches of whole groups.

Log-probs of tokens that no loss or metric reads are 0.
"""

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from verl_ext.memory.shape import DENSE
from verl_ext.trainer.linear_log_probs import linear_log_probs
from verl_ext.versions import VERL, Library, require_versions

BACKEND = "shared_prompt"
MODEL_TYPES = DENSE  # attention in every layer, and logits that are `lm_head(hidden)`


class Packing(NamedTuple):
    """Layout of a batch in which equal prompts are computed once: U of its T tokens are computed."""

    kept: Tensor  # int64[U], their places among the T
    source: Tensor  # int64[T], for each of the T its place among the U
    keys: Tensor  # int64[K], places among the U: the keys of each segment, one segment after the other
    cu_queries: Tensor  # int32[segments + 1], where the queries of each segment start
    cu_keys: Tensor  # int32[segments + 1], the same of its keys
    max_queries: int
    max_keys: int


def pack(input_ids: Tensor, lengths: list[int], prompt_lengths: list[int]) -> Packing:
    """Pack sequences: the first response to a prompt keeps it, a further one is only a segment with that prompt's keys.

    Args:
        input_ids: int64[T], the sequences one after the other.
        lengths: tokens of each sequence; their sum is T.
        prompt_lengths: tokens of each prompt, at most those of its sequence.
    """
    kept, source, keys, queries_of, keys_of = [], [], [], [], []
    first: dict[tuple[int, ...], int] = {}  # prompt -> where it starts among the U
    start = size = 0  # among the T, among the U
    ids = input_ids.tolist()
    for length, prompt_length in zip(lengths, prompt_lengths, strict=True):
        prompt = tuple(ids[start : start + prompt_length])
        known = first.setdefault(prompt, size)
        shared = 0 if known == size else prompt_length
        new = length - shared
        own = torch.arange(size, size + new)
        prefix = torch.arange(known, known + shared)
        kept.append(torch.arange(start + shared, start + length))
        source.extend((prefix, own))
        if new:
            keys.extend((prefix, own))
            queries_of.append(new)
            keys_of.append(length)
        start, size = start + length, size + new

    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], device=input_ids.device).cumsum(0).to(torch.int32)

    kept, source, keys = (torch.cat(parts).to(input_ids.device) for parts in (kept, source, keys))
    return Packing(kept, source, keys, ends(queries_of), ends(keys_of), max(queries_of), max(keys_of))


def log_probs_of_rows(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    labels: Tensor,
    temperature: float,
    rows: Tensor,
    prompt_lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the labels at `rows`, and entropies in nats, [R] each.

    Args:
        model: a causal LM of MODEL_TYPES, with attention that knows `key_places`.
        input_ids, position_ids, labels: int64[1, T]; each sequence's positions start with 0.
        rows: int64[R], the places whose next token's log-prob is requested.
        prompt_lengths: tokens of each sequence's prompt; None: no sequence shares anything.
    """
    shared = {}
    if prompt_lengths is not None:
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        lengths = [end - start for start, end in zip(starts, [*starts[1:], input_ids.shape[1]], strict=True)]
        packing = pack(input_ids[0], lengths, prompt_lengths)
        input_ids, position_ids = input_ids[:, packing.kept], position_ids[:, packing.kept]
        shared = {
            "key_places": packing.keys,
            "cu_seq_lens_q": packing.cu_queries,
            "cu_seq_lens_k": packing.cu_keys,
            "max_length_q": packing.max_queries,
            "max_length_k": packing.max_keys,
        }
    hidden = model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **shared)[0][0]
    hidden = hidden.index_select(0, rows if prompt_lengths is None else packing.source[rows])
    return linear_log_probs(hidden, model.lm_head.weight, labels[0, rows], temperature)


def forward(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    shift_labels: Tensor,
    temperature: float,
    rows: Tensor,
    prompt_lengths: list[int] | None = None,
    **_: Any,
) -> Any:
    """Replace a causal LM's `forward`, as verl/models/transformers/dense_common.py:76 does (0.9.1).

    Returns:
        `log_probs` and `entropy`, [1, T], 0 outside `rows`: those of `log_probs_of_rows`.
    """
    from verl.models.transformers.dense_common import CausalLMOutputForPPO

    found = log_probs_of_rows(self, input_ids, position_ids, shift_labels, temperature, rows, prompt_lengths)
    whole = shift_labels.shape[1]
    log_probs, entropy = (_spread(values, rows, whole) for values in found)
    return CausalLMOutputForPPO(log_probs=log_probs, entropy=entropy)


def _spread(values: Tensor, rows: Tensor, length: int) -> torch.FloatTensor:
    return cast(torch.FloatTensor, values.new_zeros(length).index_copy(0, rows, values)[None])


def attend_to_places(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, key_places: Tensor | None = None, **kwargs: Any
) -> Any:
    """Call transformers' flash-attention 2 on keys and values [1, heads, U, head dim] at `key_places`."""
    from transformers.integrations.flash_attention import flash_attention_forward

    if key_places is not None:
        key, value = key.index_select(2, key_places), value.index_select(2, key_places)
    return flash_attention_forward(module, query, key, value, *args, **kwargs)


def add_backend(monkey_patch: Library) -> None:
    """verl/models/transformers/monkey_patch.py:237 `patch_forward_with_backends` (0.9.1) skips names it does not know.

    Raises, in a run that names this backend:
        ValueError: the model is not one whose forward pass is known.
    """
    require_versions(VERL, "verl_ext/trainer/shared_prompt.py")
    patch = monkey_patch.patch_forward_with_backends

    def patch_forward(model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None) -> None:
        if not (use_fused_kernels and fused_kernels_backend == BACKEND):
            return patch(model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend)
        kind, attention = model.config.model_type, model.config._attn_implementation
        if kind not in MODEL_TYPES or attention != "flash_attention_2":
            raise ValueError(
                f"fused_kernel_options.impl_backend={BACKEND} needs {', '.join(MODEL_TYPES)} with flash_attention_2, "
                f"but the model is {kind} with {attention}. Set use_fused_kernels=false."
            )
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", attend_to_places)
        model.__class__.forward = forward
        name_rows()

    monkey_patch.patch_forward_with_backends = patch_forward


@functools.cache
def name_rows() -> None:
    """verl/workers/engine/fsdp/transformer_impl.py:1145 (0.9.1): tell `forward` where responses are; once a process.

    Raises, in a run that names the backend:
        ValueError: padding is not removed, or Ulysses splits sequences.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = cast(Library, FSDPEngineWithLMHead)
    prepare = engine.prepare_model_inputs

    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        inputs, output_args = prepare(self, micro_batch)
        model = self.model_config
        if not (model.use_fused_kernels and (model.fused_kernel_options or {}).get("impl_backend") == BACKEND):
            return inputs, output_args
        if self.ulysses_sequence_parallel_size > 1 or "shift_labels" not in inputs:
            raise ValueError(
                f"fused_kernel_options.impl_backend={BACKEND} needs use_remove_padding=true and "
                f"ulysses_sequence_parallel_size=1, not {self.ulysses_sequence_parallel_size}."
            )
        offsets = micro_batch["input_ids"].offsets()
        if "prompts" in micro_batch.keys():
            prompt_lengths = micro_batch["prompts"].offsets().diff()
            inputs["prompt_lengths"] = prompt_lengths.tolist()
            spans = zip((offsets[:-1] + prompt_lengths - 1).tolist(), (offsets[1:] - 1).tolist(), strict=True)
            rows = torch.cat([torch.arange(*span) for span in spans])
        else:  # SFT: the loss is on the next token (verl/workers/utils/losses.py:45)
            rows = micro_batch["loss_mask"].values().roll(-1).nonzero()[:, 0]
        inputs["rows"] = rows.to(inputs["input_ids"].device)
        return inputs, output_args

    engine.prepare_model_inputs = prepare_model_inputs
