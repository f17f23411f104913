"""What holds for every objective: its gradient is its formula's, and what must not matter does not."""

import ast
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import verl_ext.objectives
from tests.unit.objectives.cases import FIXED, OBJECTIVES, random_batch
from verl_ext.objectives.mean import mean_loss
from verl_ext.objectives.terms import Tokens

ROOT = Path(__file__).parents[3]


def rows_of(given, rows):
    return Tokens(*(None if each is None else each[rows] for each in given))


def loss_of(name, given, **numbers):
    objective, settings, mode, _ = OBJECTIVES[name]
    scale = 8 if mode == FIXED else None  # tokens, whatever the padding
    return mean_loss(objective(given, **settings).objective, given.mask, mode=mode, scale=scale, **numbers)


def gradient_of(name, given, **numbers):
    """(loss, gradient by log pi)"""
    leaf = given.log_prob.clone().requires_grad_()
    loss = loss_of(name, given._replace(log_prob=leaf), **numbers)
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


@contextlib.contextmanager
def constants_of(record, monkeypatch):
    """What `detach` returned at the point of `record` is what it returns here, in the order of the calls."""
    values = iter(record)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "detach", lambda self: next(values))
        yield


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_finite_differences(name, monkeypatch):
    """For logits over 4 words, in float64, the difference is below 1e-8. Weights without gradient are constants."""
    given = random_batch(seed=1, responses=4, width=4, weighted=OBJECTIVES[name][3])
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(*given.mask.shape, 4, generator=generator, dtype=torch.float64)
    words = torch.randint(4, given.mask.shape, generator=generator)

    def log_prob(x):
        return x.log_softmax(-1).gather(-1, words[..., None])[..., 0]

    given = given._replace(old_log_prob=log_prob(logits) + 0.2 * (given.log_prob - given.old_log_prob))
    record, detach = [], torch.Tensor.detach
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "detach", lambda self: record.append(detach(self)) or record[-1])
        leaf = logits.clone().requires_grad_()
        loss = loss_of(name, given._replace(log_prob=log_prob(leaf)))
    (exact,) = torch.autograd.grad(loss, leaf)

    def at(x):
        with constants_of(record, monkeypatch), torch.no_grad():
            return loss_of(name, given._replace(log_prob=log_prob(x)))

    numeric, step = torch.zeros_like(logits), 1e-5
    for i in given.mask.flatten().nonzero().flatten().tolist():
        for word in range(4):
            shift = torch.zeros(given.mask.numel(), 4, dtype=torch.float64)
            shift[i, word] = step
            shift = shift.view_as(logits)
            numeric.view(-1, 4)[i, word] = (at(logits + shift) - at(logits - shift)) / (2 * step)
    assert (exact - numeric).abs().max() < 1e-8 and exact.abs().max() > 1e-3


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tool_tokens_padding_and_order_do_not_matter(name):
    given = random_batch(weighted=OBJECTIVES[name][3])
    loss, gradient = gradient_of(name, given)
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(8, generator=generator)
    noise = 3 * torch.randn(8, 6, generator=generator, dtype=torch.float64)
    other = [None if each is None else torch.where(given.mask, each, noise) for each in given]
    other[3] = given.mask
    padded = [None if each is None else torch.nn.functional.pad(each, (0, 3)) for each in other]
    for each in (padded[0], padded[1], padded[2]):
        each[:, 6:] = -7.0
    moved = rows_of(Tokens(*padded), order)
    found, its_gradient = gradient_of(name, moved)
    assert found == pytest.approx(loss, abs=1e-12)
    back = torch.empty_like(gradient)
    back[order] = its_gradient[:, :6]
    assert torch.allclose(back, gradient, atol=1e-12, rtol=0) and its_gradient[:, 6:].abs().sum() == 0
    assert gradient[~given.mask].abs().sum() == 0


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("split", [[8], [4, 4], [1, 7], [1] * 8])
def test_micro_batches_do_not_matter(name, split):
    given = random_batch(weighted=OBJECTIVES[name][3])
    numbers = {"tokens": int(given.mask.sum()), "responses": 8}
    loss, gradient = gradient_of(name, given)
    rows = torch.randperm(8, generator=torch.Generator().manual_seed(5)).split(split)
    parts = [gradient_of(name, rows_of(given, own), **numbers) for own in rows]
    assert sum(part for part, _ in parts) == pytest.approx(loss, abs=1e-12)
    for own, (_, part) in zip(rows, parts, strict=True):
        assert torch.allclose(part, gradient[own], atol=1e-12, rtol=0)


@pytest.mark.parametrize("factor", [0.25, 8.0])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_objective_is_linear_in_a_factor_of_the_advantages(name, factor):
    """So that the unit of the mean can be a factor of them (mean.py)."""
    given = random_batch(weighted=OBJECTIVES[name][3])
    loss, gradient = gradient_of(name, given)
    found, its_gradient = gradient_of(name, given._replace(advantages=factor * given.advantages))
    assert found == pytest.approx(factor * loss, abs=1e-12)
    assert torch.allclose(its_gradient, factor * gradient, atol=1e-12, rtol=0)


RANK = """
import sys, torch
from tests.unit.objectives.cases import OBJECTIVES, random_batch
from tests.unit.objectives.test_all import loss_of, rows_of
rank, file, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
found = {}
for name, (*_, weighted) in OBJECTIVES.items():
    given = random_batch(weighted=weighted)
    tokens = given.mask[rank::2].sum()
    torch.distributed.all_reduce(tokens)
    theta = torch.zeros(6, dtype=torch.float64, requires_grad=True)  # a parameter that all ranks share
    own = rows_of(given, slice(rank, None, 2))
    for part in (rows_of(own, slice(0, 1)), rows_of(own, slice(1, 4))):  # two micro-batches
        moved = part._replace(log_prob=part.log_prob + theta)
        loss_of(name, moved, ranks=2, tokens=int(tokens), responses=8).backward()
    torch.distributed.all_reduce(theta.grad)
    found[name] = theta.grad / 2  # FSDP averages
if rank == 0:
    torch.save(found, out)
torch.distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_two_ranks_do_not_matter(tmp_path):
    """Gradients of two gloo processes, averaged as FSDP does, are those of one process, to 1e-12."""
    out = tmp_path / "gradients.pt"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    arguments = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "store"), str(out)], env=environment, cwd=ROOT)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    found = torch.load(out)
    for name, (*_, weighted) in OBJECTIVES.items():
        _, gradient = gradient_of(name, random_batch(weighted=weighted))
        assert torch.allclose(found[name], gradient.sum(0), atol=1e-12, rtol=0), name


def test_only_torch_and_the_standard_library_are_imported():
    folder = Path(verl_ext.objectives.__file__).parent
    allowed = {"torch", "verl_ext.objectives", *sys.stdlib_module_names}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("verl_ext.objectives"), (path.name, name)
