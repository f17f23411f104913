"""How much memory a run needs: GPU while it trains and while it generates, host, and disk for a checkpoint.

The estimate covers dense decoders under FSDP. The formulas are checked by tests/unit/memory/test_simulate.py (a step
counted operation by operation) and test_estimate.py (peaks of an H100, and the published run's log).

verl 0.9.1's own figures: `actor/perf/max_memory_allocated_gb` is torch's peak of the actor's process
(workers/engine_workers.py:219), never reset, of one rank. The first data-parallel rank's metrics are taken instead of
gathering all (utils/tensordict_utils.py:243), and mini-batches are reduced by `max` (utils/metric/utils.py:52).
`perf/cpu_memory_used_gb` (engine_workers.py:221) is the node's use by all processes at the end of an update, when
offloaded tensors are on the GPU; it is reduced by `mean`. In 0.9.1, vLLM has separate processes, whose memory is not in
it.
"""

from dataclasses import dataclass

from verl_ext.memory.shape import ModelShape
from verl_ext.memory.words import GIB, count, size

TOLERANCE = 1.05  # a sum above the memory by this factor is refused: the estimate is within 3% of a simulated step
RESERVED = 1.06  # torch's reserved over allocated memory: 226.8 / 214.8 GB in the published run's log
CONTEXT_GIB = 3.0  # CUDA contexts and NCCL's buffers of actor and vLLM, which torch does not count; an assumption
PROCESS_GIB = 8.0  # host memory per GPU for actor, vLLM server and agent loops; an assumption


@dataclass(frozen=True)
class Plan:
    """All that the memory of a run depends on. The default is one GPU, bf16 under fp32 weights, no vLLM, as in SFT."""

    shape: ModelShape
    tokens: int  # of the largest micro-batch on one GPU, any padding included
    padded: int = 0  # sequences of a micro-batch that is padded, with attention by sdpa; 0: packed, with flash-attn
    ranks: int = 1  # GPUs that share weights, gradients and optimizer
    ranks_per_node: int = 1  # GPUs of a node
    ulysses: int = 1  # GPUs that share a sequence
    weight_bytes: int = 4  # of a sharded weight (model_dtype), its gradient and each of its two moments
    compute_bytes: int = 2  # of a weight and of an activation in forward and backward pass (mixed_precision)
    checkpointing: bool = True  # a layer's activations are recomputed in the backward pass
    reshards: bool = True  # a layer's weights are freed after its forward pass
    defers_gradients: bool = False  # use_no_sync_for_gradient_accumulation: shared once per step, not per micro-batch
    is_fsdp2: bool = True
    fused: bool = True  # AdamW's kernel; foreach, torch's choice on CUDA, copies all second moments
    adapters: int = 0  # parameters of LoRA's adapters, the only trained ones; 0: all are trained
    keeps_logits: bool = False  # their gradient gets a second tensor; verl writes it in place if no entropy is wanted
    entropy: bool = False  # the update needs it: the logits are kept, and it has its own gradient (torch.compile)
    offloads_weights: bool = False  # to the host, while the actor does not train
    offloads_optimizer: bool = False
    reference_bytes: int = 0  # of a weight of the reference model of a KL term; 0 without one
    vllm_bytes: float = 0  # of a weight of vLLM, on each GPU of a server; 0 without one
    vllm_sleeps_on_host: bool = False  # its weights are on the host while the actor trains (sleep level 1)

    @property
    def trained(self) -> int:
        """Number of parameters with gradients and moments."""
        return self.adapters or self.shape.parameters

    @property
    def trained_of_layer(self) -> int:
        return self.adapters // self.shape.layers or self.shape.layer_parameters

    @property
    def held(self) -> int:
        """Number of all parameters, those of adapters included."""
        return self.shape.parameters + self.adapters


@dataclass(frozen=True)
class Memory:
    """Bytes, of one GPU unless said otherwise; `terms` holds the formula of each phase with its numbers."""

    training: float
    resident: float  # of the actor, while vLLM generates
    sync: float  # of the actor, while vLLM takes its weights
    vllm_weights: float
    weights_on_host: float  # of a node: offloaded or being read, and the reference model's
    host: float  # of a node, processes included
    checkpoint: float  # of the whole run, on disk
    terms: dict[str, str]


def estimate(plan: Plan) -> Memory:
    """Estimate the memory of a run with a dense model under FSDP2.

    P parameters over W GPUs, l of them in a layer, E in the embedding and as many in the head; T tokens of a GPU's
    micro-batch, L layers of width H, MLP width I, queries Q and keys K wide; vocabulary V. Weights are sent in bf16:
        weights, gradients, Adam   4 b P / W               b = 4 (model_dtype fp32) or 2 bytes, of each of the four;
                                   (b (P + A) + 3 b A) / W   with LoRA, of A parameters in its adapters
        activations                2 L T H                 inputs of the layers, with gradient checkpointing;
                                   L times a layer's own   without it
        and the largest of
        a layer recomputed         2 T (9 H + 2 Q + 2 K + 6 I) + 4 l + 2 H I + 4 E
        the logits                 2 T (V + 6 H) + 2 l + 4 E     their gradient is in their place
                                   4 T V                   or next to them; 6 T V if the entropy is wanted, which
                                                           torch.compile makes of logits and three numbers per token
                                                           (engine/fsdp/transformer_impl.py:184, 1405)
                                   8 T V                   without flash-attn: a copy without padding, and log-probs
                                                           of all tokens in fp32 (utils/torch_functional.py:173);
                                                           18 T V with the entropy, which is not compiled then
        the end, less activations  8 E                     the embedding, its gradient, and that once more in fp32
        the optimizer's step       b P / W, less activations     foreach; with fused: nothing
    4 l are two layers' weights, one prefetched. 4 E is the head's gradient in fp32 while it is sent, or a layer's, 4 l,
    if that is more. If the head is the embedding, 4 E are its weights and gradient in bf16, which stay, and a layer's
    gradient comes on top. Norms of queries and keys (Qwen3) save 3 Q + 3 K more, the exchange of Ulysses Q. With
    `use_no_sync_for_gradient_accumulation`, gradients take 4 P (FSDP1: 2 P) in place of their shards. FSDP1 keeps
    embedding and head unsharded, 4 E more; this comes from torch's source and is not simulated. With LoRA, no gradient
    of E or of a layer's weights is sent. If n > 1 sequences are padded to a length of T / n, T counts padding, sdpa's
    mask takes T^2 / n, and 2 T^2 / n more as numbers (per layer without checkpointing); keys and values are as wide as
    queries.

    verl_ext/trainer/simulate.py counts the same step operation by operation. Both agree within 3% (its test), as do the
    formula and an H100 (test_estimate.py); batches with padding were measured on a CPU only. The reference model of a
    KL term is on the host, because FSDP offloads forward-only models (engine/fsdp/transformer_impl.py:432, 459); its
    forward pass takes less GPU memory than training. Not covered: the entropy with use_torch_compile=false, and the
    entropy of the old log-probs without flash-attn, 10 T V but no gradients; with LoRA it may be 2 T V above the step.
    """
    shape, ranks, total, trained, held = plan.shape, plan.ranks, plan.shape.parameters, plan.trained, plan.held
    sharded = plan.weight_bytes * (held + 3 * trained) / ranks
    deferred = plan.defers_gradients * trained * (4 if plan.is_fsdp2 else plan.compute_bytes)
    waiting = deferred - plan.weight_bytes * trained / ranks if deferred else 0  # in place of their shards
    peaks = _peaks(plan, waiting)  # on top of the shards and the waiting gradients
    where = max(peaks, key=lambda name: peaks[name])

    weights, moments = plan.weight_bytes * held / ranks, 2 * plan.weight_bytes * trained / ranks
    offloaded = weights * plan.offloads_weights + moments * plan.offloads_optimizer
    vllm_weights = plan.vllm_bytes * total
    # from_pretrained: rank 0 reads the weights, or every rank if embedding and head are tied (fsdp_utils.py:64)
    loading = plan.weight_bytes * total * (plan.ranks_per_node if shape.tied else 1)
    reference = plan.reference_bytes * total * plan.ranks_per_node / ranks
    asleep = vllm_weights * plan.ranks_per_node * plan.vllm_sleeps_on_host
    on_host = max(offloaded * plan.ranks_per_node, loading) + reference + asleep
    unsharded = f"unsharded gradients {size(deferred)} instead of their shards, " * bool(deferred)
    referred = f"the reference model {size(reference)}, " * bool(reference)
    referred += f"vLLM's weights while it sleeps {size(asleep)}, " * bool(asleep)
    each = plan.weight_bytes
    parts, stored = (
        f"({each} + {each} + {2 * each}) x {count(total)}",
        f"({each} + {2 * each}) x {count(total)} parameters",
    )
    if plan.adapters:
        parts = f"({each} x {count(held)} + {3 * each} x {count(trained)} of adapters)"
        stored = f"{each} x {count(held)} parameters + {2 * each} x {count(trained)} of adapters"
    terms = {
        "training": (
            f"{parts} parameters / "
            f"{ranks} GPUs = {size(sharded)}, {unsharded}and at the peak {where} {size(peaks[where])}, with "
            f"{plan.tokens:,} tokens"
        ),
        "host": (
            f"offloaded {size(offloaded * plan.ranks_per_node)}, or {size(loading)} while the weights are read, "
            f"{referred}and {PROCESS_GIB:g} GiB x {plan.ranks_per_node} for the processes"
        ),
        "checkpoint": stored,
    }
    return Memory(
        training=sharded + waiting + peaks[where],
        resident=weights + moments - offloaded,
        sync=vllm_weights + weights + moments * (not plan.offloads_optimizer),
        vllm_weights=vllm_weights,
        weights_on_host=on_host,
        host=on_host + PROCESS_GIB * GIB * plan.ranks_per_node,
        checkpoint=plan.weight_bytes * (held + 2 * trained),
        terms=terms,
    )


def _peaks(plan: Plan, waiting: float) -> dict[str, float]:
    """Return the bytes at each possible peak of a step, on top of shards and gradients that wait to be shared."""
    shape, compute, layer = plan.shape, plan.compute_bytes, plan.shape.layer_parameters
    if plan.adapters:
        layer += plan.trained_of_layer
    embedding, per_token = shape.vocabulary * shape.hidden, compute * plan.tokens
    of_weights = 0 if plan.adapters else 1  # whether these have gradients
    gathered = compute * (2 * layer if plan.reshards else shape.parameters)
    resting = gathered * (not plan.reshards)
    saved, work = (per_token * width for width in _layer_widths(plan))
    inputs = per_token * shape.hidden
    masks = 1 + compute * (1 if plan.checkpointing else shape.layers)  # booleans of all layers, numbers of each
    mask = masks * plan.tokens**2 / plan.padded if plan.padded > 1 else 0  # one sequence has no padding
    of_loss = 2 * plan.keeps_logits  # tensors of the logits' size
    if plan.padded:
        of_loss = 9 if plan.entropy else 4
    elif plan.entropy:
        of_loss = 3
    activations = shape.layers * inputs
    if not plan.checkpointing:
        activations, work = shape.layers * saved, work - saved
    logits, weight = per_token * shape.vocabulary, compute * shape.hidden * shape.intermediate * of_weights
    sent = max(0, 4 * plan.trained_of_layer - inputs)  # the gradient of the layer above, whose input is gone
    kept = (2 + 2 * of_weights) * embedding  # the head's weights, and their gradient
    head = kept + sent if shape.tied else max(kept * of_weights, sent)
    root = 0 if plan.is_fsdp2 or shape.tied else 2 * compute * embedding
    return {
        "of a layer's backward pass": activations + gathered + head + root + work + weight + mask,
        "of the logits": activations
        + root
        + mask
        + max(
            logits + 6 * inputs + gathered - compute * layer + kept,
            of_loss * logits + resting + compute * embedding * shape.tied,
        ),
        "of the embedding's gradient": resting + 8 * embedding * of_weights,
        "of the optimizer's step (foreach)": (0 if plan.fused else plan.weight_bytes * plan.trained / plan.ranks)
        - waiting,
    }


def _layer_widths(plan: Plan) -> tuple[int, int]:
    """Return numbers per token: what a layer saves for its backward pass, and its peak there, at gate * up."""
    shape = plan.shape
    query, key = shape.heads * shape.head_dim, max(shape.kv_heads, plan.ulysses) * shape.head_dim
    if plan.padded > 1:
        key = query  # sdpa with a mask gets them repeated
    saved = 8 * shape.hidden + 2 * query + 2 * key + 4 * shape.intermediate
    if shape.model_type == "qwen3":  # in fp32, and normed
        saved += 3 * query + 3 * shape.kv_heads * shape.head_dim
    if plan.ulysses > 1:
        saved += query  # the attention's result before the exchange and after it
    return saved, saved + shape.hidden + 2 * shape.intermediate


def kv_tokens(shape: ModelShape, free: float, parallel: int) -> float:
    """Return the tokens in the KV cache of one vLLM server, whose `parallel` GPUs have `free` bytes each for it."""
    return free / (shape.kv_bytes_per_token / min(parallel, shape.kv_heads))
