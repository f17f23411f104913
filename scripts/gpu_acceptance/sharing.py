"""The actor's update with a group's prompt computed once: is it right, what does it save?

`verl_ext/trainer/shared_prompt.py` beside the plain pass, forward and backward, of one micro-batch in bf16.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scripts.gpu_acceptance.attention import kernels, name_of_kernels
from scripts.gpu_acceptance.numbers import TINY, below, build_model, relative_error
from scripts.gpu_acceptance.stage import Context, Row
from scripts.gpu_acceptance.training import log_probs_of
from verl_ext.memory.shape import ModelShape, read_shape

ROUNDING = 1e-5  # of fp32, in which a CPU computes: there one order of sums may be twice as exact as another
REPEATS = 5  # of an update, after one that is not timed


@dataclass(frozen=True)
class Case:
    """`groups` x `samples` sequences of `prompt` + `response` tokens, in one micro-batch."""

    name: str
    shape: ModelShape
    groups: int
    samples: int
    prompt: int
    response: int


def cases(context: Context) -> list[Case]:
    if not context.is_cuda:
        return [Case("tiny", TINY, 2, 4, 24, 8)]
    qwen = read_shape("Qwen/Qwen3-0.6B")
    assert qwen is not None
    return [
        Case("0.6B, long responses", qwen, 1, 16, 256, 1024),
        Case("0.6B, long prompts", qwen, 1, 8, 2048, 256),
    ]


def check_sharing(context: Context) -> Iterator[Row]:
    """Of each case log-probs and time; of the first the gradient, too, against sequences one by one in fp32."""
    import torch

    attend_as_packed(context)
    yield Row("attention", "", name_of_kernels(context))
    for number, case in enumerate(cases(context)):
        model = build_model(case.shape, context)
        batch = Batch(case, context)
        exact = None if number else gradient(model, batch.one_by_one)
        model.config._attn_implementation = "packed"
        if context.is_cuda:
            model = model.bfloat16()
        ways = {"plain": batch.plain, "shared prompts": batch.shared}
        found = {name: way(model).detach() for name, way in ways.items()}
        text = f"{case.groups} x {case.samples} of {case.prompt} + {case.response} tokens"
        difference = (found["shared prompts"] - found["plain"]).abs().mean().item()
        yield below(f"{case.name}, {text}: log-probs, mean difference from plain", difference, 0.05)
        if exact is not None:
            errors = {name: relative_error(gradient(model, way), exact) for name, way in ways.items()}
            limit = max(1.2 * errors["plain"], ROUNDING)
            told = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
            expected = f"< 1.2 x plain's, or {ROUNDING:g}"
            yield Row(f"{case.name}: error of the gradient", expected, told, max(errors.values()) < limit)
        yield Row(f"{case.name}: an update", "", ", ".join(measure(context, model, ways)))
        del model, batch, exact
        if context.is_cuda:
            torch.cuda.empty_cache()


class Batch:
    """Random tokens of a case, and the ways to the log-probs of its responses, fp32[sequences x response]."""

    def __init__(self, case: Case, context: Context):
        import torch

        self.case, device = case, context.device
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randint(0, case.shape.vocabulary, size, device=device, generator=generator)

        sequences, self.length = case.groups * case.samples, case.prompt + case.response
        prompts = random(case.groups, case.prompt).repeat_interleave(case.samples, 0)
        self.sequences = torch.cat([prompts, random(sequences, case.response)], 1)
        self.ids = self.sequences.reshape(1, -1)
        places = torch.arange(self.length, device=device)
        self.positions = places.repeat(1, sequences)
        self.labels = self.ids.roll(-1, 1)
        starts = torch.arange(sequences, device=device)[:, None] * self.length
        self.responses = (starts + places[case.prompt - 1 : -1]).reshape(-1)
        ends = torch.arange(sequences + 1, device=device, dtype=torch.int32) * self.length
        self.packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        self.packed |= {"max_length_q": self.length, "max_length_k": self.length}

    def one_by_one(self, model: Any) -> Any:
        import torch

        found = []
        for sequence in self.sequences:
            logits = model(input_ids=sequence[None]).logits[0, self.case.prompt - 1 : -1].float()
            labels = sequence[self.case.prompt :, None]
            found.append(logits.log_softmax(-1).gather(1, labels)[:, 0])
        return torch.cat(found)

    def plain(self, model: Any) -> Any:
        logits = model(input_ids=self.ids, position_ids=self.positions, use_cache=False, **self.packed).logits[0]
        return log_probs_of(logits, self.labels[0])[self.responses]

    def shared(self, model: Any) -> Any:
        from verl_ext.trainer.shared_prompt import log_probs_of_rows

        prompts = [self.case.prompt] * len(self.sequences)
        return log_probs_of_rows(model, self.ids, self.positions, self.labels, 1.0, self.responses, prompts)[0]


def gradient(model: Any, log_probs: Callable[[Any], Any]) -> Any:
    """Of a policy-gradient loss with fixed advantages, by all weights, in one vector."""
    import torch

    model.zero_grad()
    found = log_probs(model)
    weights = torch.linspace(-1, 1, len(found), device=found.device)
    (found * weights).mean().backward()
    whole = torch.cat([parameter.grad.float().reshape(-1) for parameter in model.parameters()])
    model.zero_grad()
    return whole


def measure(context: Context, model: Any, ways: dict[str, Callable[[Any], Any]]) -> Iterator[str]:
    """Median milliseconds of forward and backward, how many times plain's that is, and the peak above the weights."""
    import torch

    first = 0.0
    for name, way in ways.items():
        times, peak = [], 0.0
        for _ in range(1 + REPEATS):
            if context.is_cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.synchronize()
            start = time.perf_counter()
            way(model).mean().backward()
            if context.is_cuda:
                torch.cuda.synchronize()
                peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            times.append(time.perf_counter() - start)
            model.zero_grad()
        seconds = statistics.median(times[1:])
        first = first or seconds
        memory = f", {peak:.2f} GiB" if context.is_cuda else ""
        yield f"{name} {1000 * seconds:.1f} ms ({first / seconds:.2f}x{memory})"


def attend_as_packed(context: Context) -> None:
    """Register with transformers the attention "packed": segments by `cu_seq_lens_*`, keys at `key_places`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    _, of_many = kernels(context)

    def attend(module, query, key, value, attention_mask, scaling=None, key_places=None, **packed):
        if key_places is not None:
            key, value = key.index_select(2, key_places), value.index_select(2, key_places)
        out = of_many(
            *(each[0].transpose(0, 1) for each in (query, key, value)),
            packed["cu_seq_lens_q"],
            packed["cu_seq_lens_k"],
            packed["max_length_q"],
            packed["max_length_k"],
            softmax_scale=scaling,
            causal=True,
        )
        return out[None], None

    ALL_ATTENTION_FUNCTIONS.register("packed", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("packed", lambda *args, **kwargs: None)
