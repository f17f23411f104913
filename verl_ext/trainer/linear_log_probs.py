"""Log-probs and entropies of labels from hidden states, without the whole matrix of logits.

As in verl/utils/experimental/torch_functional.py:FusedLinearForPPO (0.9.1), logits exist for one block of rows at a
time, and are computed again in the backward pass. In verl each step of the arithmetic allocates a new matrix of rows x
vocabulary, which takes most of the time on a CPU. Here two matrices are reused, and the entropy has a backward pass
only if the loss contains it.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 512  # of logits at a time: 100 MB in fp32 for a vocabulary of 49,152


def linear_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden @ weight.T / temperature) at the labels, and the distributions' entropies, in nats.

    Args:
        hidden: [rows, hidden size].
        weight: [vocabulary, hidden size].
        labels: int64[rows].
    Returns:
        log-probs and entropies, [rows] each, at least in fp32.
    """
    return _LinearLogProbs.apply(hidden, weight, labels, temperature)


def _new_matrices(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    new = functools.partial(torch.empty, rows, vocabulary, dtype=dtype, device=device)
    return new(), new()


_kept_matrices = functools.cache(_new_matrices)


def _matrices(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices [ROWS, vocabulary] to overwrite, which a process on a CPU keeps.

    The operating system clears each page of new memory, which on a CPU takes longer than the arithmetic here. On a GPU,
    PyTorch itself keeps freed memory.
    """
    get = _kept_matrices if weight.device.type == "cpu" else _new_matrices
    return get(ROWS, weight.shape[0], torch.promote_types(weight.dtype, torch.float32), weight.device)


def _log_softmax(
    hidden: Tensor, weight: Tensor, temperature: float, matrices: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all tokens, in the second matrix, and the first, of the same shape, to overwrite."""
    logits, log_probs = (matrix[: len(hidden)] for matrix in matrices)
    if hidden.dtype == logits.dtype:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        logits.copy_(hidden @ weight.t())
    return torch.log_softmax(logits.div_(temperature), -1, out=log_probs), logits


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        found, matrices = [], _matrices(weight)
        for states, own in zip(hidden.split(ROWS), labels.split(ROWS), strict=True):
            log_probs, free = _log_softmax(states, weight, temperature, matrices)
            entropy = -torch.exp(log_probs, out=free).mul_(log_probs).sum(-1)
            found.append((log_probs.gather(1, own[:, None])[:, 0], entropy))
        chosen, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.temperature = temperature
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_chosen: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """With p = softmax(z): d log p[label] / dz = onehot(label) - p; d entropy / dz = -p (log p + entropy)."""
        hidden, weight, labels, entropy = ctx.saved_tensors
        matrices = _matrices(weight)
        with_entropy = bool(of_entropy.any())  # false with `entropy_coeff: 0`: the entropy is only a metric
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # None: LoRA
        blocks = (each.split(ROWS) for each in (hidden, labels, entropy, of_chosen, of_entropy, to_hidden))
        for states, own, entropies, by_chosen, by_entropy, out in zip(*blocks, strict=True):
            by_chosen = by_chosen[:, None]
            log_probs, free = _log_softmax(states, weight, ctx.temperature, matrices)
            to_logits = torch.exp(log_probs, out=free)
            if with_entropy:
                factors = log_probs.add_(entropies[:, None]).mul_(by_entropy[:, None]).add_(by_chosen)
                to_logits.mul_(factors.neg_())
            else:
                to_logits.mul_(-by_chosen)
            to_logits.scatter_add_(1, own[:, None], by_chosen).div_(ctx.temperature)
            to_logits = to_logits.to(hidden.dtype)
            torch.mm(to_logits, weight, out=out)
            if to_weight is not None:
                to_weight.addmm_(to_logits.t(), states)
        return to_hidden, to_weight, None, None
