"""Log-probs, entropies and their gradients compared with PyTorch's own on the whole matrix of logits."""

import pytest
import torch

from verl_ext.trainer import linear_log_probs as module
from verl_ext.trainer.linear_log_probs import linear_log_probs

ROWS, HIDDEN, VOCABULARY = 11, 5, 17
LABELS = torch.arange(ROWS) * 3 % VOCABULARY


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three blocks of rows, the last of which is shorter."""
    monkeypatch.setattr(module, "ROWS", 4)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN, dtype=dtype), torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


def of_whole_matrix(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = torch.distributions.Categorical(logits=hidden @ weight.t() / temperature)
    return distribution.log_prob(LABELS), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 1.2])
@pytest.mark.parametrize("coefficient", [0.0, 0.3], ids=["entropy as a metric", "entropy in the loss"])
def test_values_and_gradients_are_those_of_the_whole_matrix(temperature, coefficient):
    importance = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    found = []
    for function in (lambda *args: linear_log_probs(*args[:2], LABELS, args[2]), of_whole_matrix):
        hidden, weight = inputs()
        log_probs, entropy = function(hidden, weight, temperature)
        loss = (importance * log_probs).sum() - coefficient * (importance * entropy).sum()
        found.append((log_probs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_loss_of_only_the_entropy_has_its_gradient():
    hidden, weight = inputs()
    assert torch.autograd.gradcheck(lambda h, w: linear_log_probs(h, w, LABELS, 0.8)[1], (hidden, weight))


def test_hidden_states_have_their_gradient_under_a_head_that_does_not_learn():
    hidden, weight = inputs()
    linear_log_probs(hidden, weight.detach(), LABELS, 1.0)[0].sum().backward()
    expected = torch.autograd.grad(of_whole_matrix(hidden, weight, 1.0)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_hidden_states_of_16_bits_have_log_probs_of_32():
    hidden, weight = inputs(torch.bfloat16)
    log_probs, entropy = linear_log_probs(hidden, weight, LABELS, 1.0)
    logits = (hidden @ weight.t()).float()
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, LABELS[:, None])[:, 0])
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_values_stay_when_the_matrices_are_written_over():
    hidden, weight = inputs()
    log_probs, entropy = linear_log_probs(hidden, weight, LABELS, 1.0)
    before = log_probs.tolist(), entropy.tolist()
    linear_log_probs(2 * hidden, weight, LABELS, 1.0)
    assert (log_probs.tolist(), entropy.tolist()) == before
    torch.testing.assert_close(
        torch.autograd.grad(log_probs.sum(), weight)[0],
        torch.autograd.grad(of_whole_matrix(hidden, weight, 1.0)[0].sum(), weight)[0],
    )
