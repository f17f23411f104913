"""How much memory a run needs: GPU while it trains and while it generates, host, and disk for a checkpoint.

Counted are dense decoders under FSDP. What is measured about these formulas: tests/unit/memory/test_estimate.py
(gradients, optimizer and activations of a real FSDP model; the published run's log).

Of verl's own figures, verl 0.9.1: `actor/perf/max_memory_allocated_gb` is torch's peak of the actor's process
(workers/engine_workers.py:219), never reset, of one rank: metrics of data-parallel ranks are not gathered but the first
is taken (utils/tensordict_utils.py:243), and its mini-batches reduced by `max` (utils/metric/utils.py:52).
`perf/cpu_memory_used_gb` (engine_workers.py:221) is the node's, of all processes, at the end of an update, when what is
offloaded is on the GPU; it is reduced by `mean`. In 0.9.1 vLLM has processes of its own, whose memory is not in it.
"""

from dataclasses import dataclass

from verl_ext.memory.shape import ModelShape
from verl_ext.memory.words import GIB, count, size

TOLERANCE = 1.12  # a sum that is so much too large is refused: the estimate is known to be within 12%
RESERVED = 1.06  # torch's reserved over allocated memory: 226.8 / 214.8 GB in the published run's log
CONTEXT_GIB = 3.0  # CUDA contexts and NCCL's buffers of actor and vLLM, beside what torch counts; an assumption
PROCESS_GIB = 8.0  # of host memory for each GPU: actor, vLLM server, agent loops; an assumption


@dataclass(frozen=True)
class Plan:
    """All that the memory of a run depends on. By default: one GPU, bf16 under fp32 weights, no vLLM, as in SFT."""

    shape: ModelShape
    tokens: int  # of the largest micro-batch, on one GPU
    ranks: int = 1  # GPUs that share weights, gradients and optimizer
    ranks_per_node: int = 1  # GPUs of a node
    weight_bytes: int = 4  # of a sharded weight (model_dtype); gradients and moments have 4
    compute_bytes: int = 2  # of a weight and of an activation in forward and backward pass (mixed_precision)
    checkpointing: bool = True  # activations of a layer are computed anew in the backward pass
    reshards: bool = True  # a layer's weights are given back after its forward pass
    defers_gradients: bool = False  # use_no_sync_for_gradient_accumulation: shared once a step, not each micro-batch
    is_fsdp2: bool = True
    offloads_weights: bool = False  # to the host, while the actor does not train
    offloads_optimizer: bool = False
    reference_bytes: int = 0  # of a weight of the reference model of a KL term; 0 without one
    tensor_parallel: int = 0  # GPUs of a vLLM server; 0 without one
    vllm_bytes: int = 2  # of a weight there
    vllm_share: float = 0.0  # of each GPU's memory, that vLLM takes (gpu_memory_utilization)


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
    """Of a run with a dense model under FSDP.

    P parameters over W GPUs, T tokens of a micro-batch on a GPU, L layers of width H and MLP width I, vocabulary V:
        weights, gradients, Adam   (b + 4 + 8) P / W         b = 4 (model_dtype fp32), gradients and moments fp32
        unsharded weights          2 (E + 2 l) + 4 l         bf16: FSDP's root E (embedding, head) and two layers of l;
                                                             fp32: the gradients of a layer on their way
        unsharded gradients        2 P (fsdp), 4 P (fsdp2)   only with use_no_sync_for_gradient_accumulation
        activations                2 L T H                   inputs of the layers, bf16, with gradient checkpointing;
                                   2 L T (12 H + 4 I)        all, without it
        peak of the backward pass  max(4 T V, 2 T (12 H + 6 I))   logits and their gradient, or one layer computed anew

    12, 6 and 4 are fitted to what torch's memory tracker counts of Hugging Face's Qwen2. The reference model of a KL
    term is on the host: FSDP offloads what is forward only (engine/fsdp/transformer_impl.py:432, 459), and its forward
    pass takes less of the GPU than training does.
    """
    shape, tokens, ranks = plan.shape, plan.tokens, plan.ranks
    total, root, layer = shape.parameters, shape.embedding_parameters, shape.layer_parameters
    sharded = (plan.weight_bytes + 4 + 8) * total / ranks
    gathered = plan.compute_bytes * (root + 2 * layer) + 4 * layer if plan.reshards else plan.compute_bytes * total
    deferred = plan.defers_gradients * total * (4 if plan.is_fsdp2 else plan.compute_bytes)
    layer_work = plan.compute_bytes * tokens * (12 * shape.hidden + 6 * shape.intermediate)
    logits = 2 * plan.compute_bytes * tokens * shape.vocabulary
    if plan.checkpointing:
        activations, work = plan.compute_bytes * shape.layers * tokens * shape.hidden, max(logits, layer_work)
    else:
        saved = plan.compute_bytes * tokens * (12 * shape.hidden + 4 * shape.intermediate)
        activations, work = shape.layers * saved, max(logits, layer_work - saved)

    weights, moments = plan.weight_bytes * total / ranks, 8 * total / ranks
    offloaded = weights * plan.offloads_weights + moments * plan.offloads_optimizer
    vllm_weights = plan.vllm_bytes * total / plan.tensor_parallel if plan.tensor_parallel else 0
    # from_pretrained: rank 0 reads the weights, or every rank where embedding and head are tied (fsdp_utils.py:64)
    loading = plan.weight_bytes * total * (plan.ranks_per_node if shape.tied else 1)
    reference = plan.reference_bytes * total * plan.ranks_per_node / ranks
    on_host = max(offloaded * plan.ranks_per_node, loading) + reference
    unsharded = f"unsharded gradients {size(deferred)}, " * bool(deferred)
    referred = f"the reference model {size(reference)}, " * bool(reference)
    terms = {
        "training": (
            f"({plan.weight_bytes} + 4 + 8) x {count(total)} parameters / {ranks} GPUs = {size(sharded)}, unsharded "
            f"weights {size(gathered)}, {unsharded}activations of {tokens:,} tokens {size(activations)}, peak of the "
            f"backward pass {size(work)}"
        ),
        "host": (
            f"offloaded {size(offloaded * plan.ranks_per_node)}, or {size(loading)} while the weights are read, "
            f"{referred}and {PROCESS_GIB:g} GiB x {plan.ranks_per_node} for the processes"
        ),
        "checkpoint": f"({plan.weight_bytes} + 8) x {count(total)} parameters",
    }
    return Memory(
        training=sharded + gathered + deferred + activations + work,
        resident=weights + moments - offloaded,
        sync=vllm_weights + weights + moments * (not plan.offloads_optimizer),
        vllm_weights=vllm_weights,
        weights_on_host=on_host,
        host=on_host + PROCESS_GIB * GIB * plan.ranks_per_node,
        checkpoint=(plan.weight_bytes + 8) * total,
        terms=terms,
    )


def kv_tokens(plan: Plan, gpu_gib: float) -> float:
    """Tokens of KV cache of one vLLM server: what its GPUs have beside weights and CONTEXT_GIB."""
    free = (plan.vllm_share * gpu_gib - CONTEXT_GIB) * GIB - estimate(plan).vllm_weights
    return free / (plan.shape.kv_bytes_per_token / min(plan.tensor_parallel, plan.shape.kv_heads))
