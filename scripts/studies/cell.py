"""One run of the tiny task with exact staleness and engine noise: a cell of stability_map.py.

A step has the sizes, the reward and the optimizer of configs/tiny_dapo.yaml. Rollouts come from the weights of
`staleness` steps ago. No group is replaced, whatever the preset's filter.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from verl.utils.torch_functional import get_constant_schedule_with_warmup

from scripts.studies.preset import Batch, Preset, Update, cosine, read_preset
from scripts.studies.tiny_model import Rollout, TinyModel, Weights
from verl_ext.objectives.shaping import overlong_penalty
from verl_ext.protocols.base import MalformedCall, SegmentEncoder, cut_output
from verl_ext.protocols.code import CODE_STOP, CodeProtocol, extract_code
from verl_ext.reward.score import score_answer

COSINE_AT, FRESH = (20, 60), 4  # steps that have a cosine; batches of fresh rollouts that it compares with


@dataclass(frozen=True)
class Cell:
    """A run of the map. `bf16`: the rollout engine rounds like one in bfloat16; the trainer is always in fp32."""

    objective: str
    staleness: int
    bf16: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}_s{self.staleness}_{'bf16' if self.bf16 else 'fp32'}_{self.seed}"


class Problem(NamedTuple):
    prompt: list[int]
    truth: str


class Task:
    """Problems, the interpreter and the reward.

    Args:
        config: the run's config.
        interpret: returns what the interpreter answers to code. It gets the model's text and must be safe for any.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: PreTrainedTokenizerBase,
        train: Sequence[Problem],
        held_out: Sequence[Problem],
        interpret: Callable[[str], str],
    ):
        self.train, self.held_out, self.n = train, held_out, config.actor_rollout_ref.rollout.n
        self.limit, self._retool = config.data.max_response_length, config.retool
        self._buffer = config.reward.reward_kwargs.overlong_buffer_cfg.len
        self._tokenizer, self._interpret = tokenizer, interpret
        self._protocol, self._encoder = CodeProtocol(tokenizer), SegmentEncoder(tokenizer)
        (self.stop,) = tokenizer.encode(CODE_STOP, add_special_tokens=False)
        self._said: dict[str, list[int]] = {}

    def reply(self, rollout: Rollout) -> list[int] | None:
        """Return what follows a response that has closed a block of code; None if it may not call again."""
        if rollout.calls == self._retool.max_tool_calls:
            return None
        rollout.calls += 1
        begin = max((place for place, own in enumerate(rollout.mask) if not own), default=-1) + 1
        text = self._tokenizer.decode(rollout.ids[begin:], skip_special_tokens=False)
        if text not in self._said:
            try:
                output = self._interpret(extract_code(text))
            except MalformedCall as error:
                output = str(error)
            limit = self._retool.max_tool_response_tokens
            output = cut_output(self._tokenizer, output, limit, self._encoder.encode_output)
            self._said[text] = self._encoder.encode(self._protocol.reply([output], ended=False))
        return self._said[text]

    def accuracy(self, rollout: Rollout, truth: str) -> float:
        """Return the accuracy of the policy's own turns, as the reward manager reads them."""
        turns = [
            self._tokenizer.decode([token for token, _ in turn], skip_special_tokens=True)
            for is_own, turn in itertools.groupby(zip(rollout.ids, rollout.mask, strict=True), lambda pair: pair[1])
            if is_own
        ]
        return float(score_answer("\n".join(turns), truth).acc or 0.0)

    def rewards(self, accuracies: Sequence[float], lengths: Tensor) -> Tensor:
        """Return float[B]: +1 or -1, plus the soft length penalty."""
        penalty = overlong_penalty(lengths, max_length=self.limit, buffer=self._buffer)
        return 2 * torch.tensor(accuracies) - 1 + penalty


class Sampled(NamedTuple):
    """A step's rollouts as tensors: `ids` with prompts, `places` and `targets` of the responses' tokens."""

    batch: Batch
    ids: Tensor
    places: Tensor
    targets: Tensor
    right: Tensor  # float[B], accuracies
    calls: float


def run_cell(cell: Cell, config: dict, start: Weights, task: Task, *, steps: int) -> dict:
    """Train, and return the cell, the accuracy on held-out problems before and after, and rows of steps."""
    preset = read_preset(cell.objective)
    prompts, optim = preset.config.data.train_batch_size, preset.config.actor_rollout_ref.actor.optim
    trainer, engine = TinyModel(config), TinyModel(config, bf16=cell.bf16)
    generator, rng = torch.Generator().manual_seed(cell.seed), random.Random(cell.seed)
    order = rng.sample(range(len(task.train)), len(task.train))
    weights = {name: each.clone().requires_grad_() for name, each in start.items()}
    optimizer = torch.optim.AdamW(
        weights.values(), lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay
    )
    schedule = get_constant_schedule_with_warmup(
        optimizer, optim.lr_warmup_steps
    )  # step 1 has learning rate 0, as in verl
    past: deque[Weights] = deque(maxlen=cell.staleness + 1)
    before, rows = held_out_accuracy(trainer, weights, task), []
    for step in range(1, steps + 1):
        past.append({name: each.detach().clone() for name, each in weights.items()})
        chosen = [order[((step - 1) * prompts + i) % len(order)] for i in range(prompts)]
        problems = [task.train[i] for i in chosen]
        sampled = roll_out(engine, past[0], problems, task, generator)
        row = {"step": step, "acc": float(sampled.right.mean()), "calls": sampled.calls}
        row["reward_std"] = float(sampled.batch.rewards.std())
        if step in COSINE_AT:
            fresh = [roll_out(trainer, weights, problems, task, generator) for _ in range(FRESH)]
            found, *wanted = (gradient(preset, trainer, weights, each) for each in (sampled, *fresh))
            row["cosine"] = cosine(found, sum(wanted))
        rows.append(row | _update(preset, trainer, weights, optimizer, sampled))
        schedule.step()
    after = held_out_accuracy(trainer, weights, task)
    return {"cell": asdict(cell), "steps": steps, "before": before, "after": after, "rows": rows}


def roll_out(
    engine: TinyModel, weights: Weights, problems: Sequence[Problem], task: Task, generator: torch.Generator
) -> Sampled:
    """Return `task.n` responses to each problem, scored."""
    asked = [problem for problem in problems for _ in range(task.n)]
    prompts = [problem.prompt for problem in asked]
    rollouts = engine.sample(weights, prompts, limit=task.limit, reply=task.reply, stop=task.stop, generator=generator)
    right = [task.accuracy(rollout, problem.truth) for rollout, problem in zip(rollouts, asked, strict=True)]
    lengths = torch.tensor([len(rollout.ids) for rollout in rollouts])
    rewards = task.rewards(right, lengths)
    width = int(lengths.max())
    total = max(len(prompt) + len(rollout.ids) for prompt, rollout in zip(prompts, rollouts, strict=True))
    ids = torch.zeros(len(asked), total, dtype=torch.long)
    mask = torch.zeros(len(asked), width, dtype=torch.bool)
    noted = torch.zeros(len(asked), width)
    places, targets = torch.zeros_like(mask, dtype=torch.long), torch.zeros_like(mask, dtype=torch.long)
    for row, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        length = len(rollout.ids)
        ids[row, : len(prompt) + length] = torch.tensor(prompt + rollout.ids)
        mask[row, :length] = torch.tensor(rollout.mask, dtype=torch.bool)
        noted[row, :length] = torch.tensor(rollout.log_probs)
        places[row, :length] = torch.arange(len(prompt) - 1, len(prompt) - 1 + length)
        targets[row, :length] = torch.tensor(rollout.ids)
    groups = [str(i // task.n) for i in range(len(asked))]
    batch = Batch(mask, noted, rewards, groups)
    return Sampled(batch, ids, places, targets, torch.tensor(right), fmean(rollout.calls for rollout in rollouts))


def _log_probs(model: TinyModel, weights: Weights, sampled: Sampled, rows: Tensor) -> Tensor:
    mask = sampled.batch.mask[rows]
    return model.log_probs(weights, sampled.ids[rows], sampled.places[rows], sampled.targets[rows], mask)


def _prepared(preset: Preset, sampled: Sampled, old: Tensor | None, updates: int) -> Update:
    advantages = preset.advantages(sampled.batch)
    advantages = torch.where(preset.is_trained(sampled.right, sampled.batch.groups), advantages, 0)
    return preset.prepare(sampled.batch, old, updates=updates, advantages=advantages[:, None])


def gradient(preset: Preset, model: TinyModel, weights: Weights, sampled: Sampled) -> Tensor:
    """Return float[parameters], the gradient of the loss of the whole batch, as for the first update."""
    rows = torch.arange(len(sampled.ids))
    log_prob = _log_probs(model, weights, sampled, rows)
    old = log_prob.detach() if preset.needs_old_log_probs else None
    loss, _ = preset.loss(_prepared(preset, sampled, old, 1), rows, log_prob)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(weights.values()))])


def held_out_accuracy(model: TinyModel, weights: Weights, task: Task) -> float:
    """Return the accuracy of one response to each held-out problem, always drawn from the same seed."""
    prompts = [problem.prompt for problem in task.held_out]
    generator = torch.Generator().manual_seed(0)
    rollouts = model.sample(weights, prompts, limit=task.limit, reply=task.reply, stop=task.stop, generator=generator)
    return fmean(task.accuracy(rollout, each.truth) for rollout, each in zip(rollouts, task.held_out, strict=True))


def _update(
    preset: Preset, model: TinyModel, weights: Weights, optimizer: torch.optim.Optimizer, sampled: Sampled
) -> dict[str, float]:
    """Apply a step's updates; return token shares by kind, the largest gradient, and how far the engine is off."""
    counts: dict[str, float] = {}
    norms, update = [], None
    for rows in torch.arange(len(sampled.ids)).chunk(preset.updates):
        log_prob = _log_probs(model, weights, sampled, rows)
        if update is None:  # nothing has moved: these are also the old log-probs
            off = (log_prob.detach() - sampled.batch.rollout_log_prob[rows]).abs()
            difference = float(off[sampled.batch.mask[rows]].mean())
            old = log_prob.detach() if preset.needs_old_log_probs else None
            if old is not None and len(rows) < len(sampled.ids):
                with torch.no_grad():
                    others = torch.arange(len(rows), len(sampled.ids))
                    old = torch.cat([old, _log_probs(model, weights, sampled, others)])
            update = _prepared(preset, sampled, old, preset.updates)
        loss, found = preset.loss(update, rows, log_prob)
        counts = {name: counts.get(name, 0.0) + count for name, count in found.items()}
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), preset.config.actor_rollout_ref.actor.optim.clip_grad)
        if torch.isfinite(norm):
            optimizer.step()
        norms.append(float(norm))
    tokens = max(counts.pop("tokens"), 1.0)
    shares = {name: count / tokens for name, count in counts.items()}
    return shares | {"grad_norm": max(norms), "log_prob_difference": difference}
