"""Models by their shape, errors against a reference, and a process group of one: for the stages on torch alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.gpu_acceptance.stage import Context, Row
from verl_ext.memory.shape import ModelShape, read_shape

if TYPE_CHECKING:
    import torch

FOUR_B = "Qwen/Qwen3-4B-Instruct-2507"
TINY = ModelShape("qwen3", 2, 64, 128, 4, 2, 32, 512, True)


def four_b(context: Context) -> ModelShape:
    """The shape of the 4B on a GPU, of a tiny model of its kind on a CPU."""
    shape = read_shape(FOUR_B) if context.is_cuda else TINY
    assert shape is not None
    return shape


def relative_error(seen: "torch.Tensor", reference: "torch.Tensor") -> float:
    """Norm of the difference over the norm of the reference, both in fp64; NaN where either has one."""
    seen, reference = seen.double(), reference.double()
    return ((seen - reference).norm() / reference.norm()).item()


def below(what: str, seen: float, limit: float) -> Row:
    """A row that is well where `seen` is below `limit`; NaN is not."""
    return Row(what, f"< {limit:g}", f"{seen:.3g}", seen < limit)


def build_model(shape: ModelShape, context: Context, attention: str = "sdpa"):
    """Hugging Face's model of this shape on the device, random weights of seed 0, fp32, training."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config(), use_cache=False)
    torch.manual_seed(0)
    with torch.device(context.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    model.train()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    return model


@contextmanager
def one_rank(context: Context) -> Iterator[None]:
    """A process group of this process alone, by a file instead of a port."""
    import torch.distributed as dist

    backend = "nccl" if context.is_cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{Path(context.folder) / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
