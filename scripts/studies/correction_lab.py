"""One recorded batch under every objective: `python -m scripts.studies.correction_lab RUN --step N`.

RUN recorded the batch with record_batches.py. Each preset of configs/objective is applied unchanged
to it, with its own advantages, weights and bounds, at two places:
- start: the trainer is where it was before the first update of the batch. Ratios to the trainer's own old log-probs are
  1; those to the rollout engine's differ from 1 by staleness and the engine's numerics;
- end: the trainer is where it was after the last update. No mini-batch was trained there: the first one saw the ratios
  of the start, and each later one those of the policy after the preceding updates.

A weight is the factor of A x (gradient of log pi) of a token: the ratio, its clips and its corrections. Only tokens
whose advantage is not 0 have a weight. The gradient is by the tokens' log-probs, as an objective's file gives it;
cosines are between these vectors of the whole batch, not between gradients of the model's parameters.

Departures from a run: the batch is one mini-batch. No group is generated anew: if a preset filters groups, one whose
answers are all right or all wrong has advantage 0, as a filler. grpo_roc keeps half of each existing group, but in a
run its groups would have been twice as large; its draws have seed 0.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scripts.studies.drawing import write_heat_map
from scripts.studies.preset import RUN, Batch, Preset, cosine
from scripts.studies.record_batches import RecordedBatch, read_batch
from scripts.studies.shared import command_line
from verl_ext.objectives.group_mean import rows_of_groups
from verl_ext.objectives.grpo_roc import keep, penalty
from verl_ext.objectives.tir_otb import at_last_own, tir_otb
from verl_ext.runs.durable import write_text
from verl_ext.runs.folder import training_folder
from verl_ext.settings import CONFIGS, compose_run

PLACES = ("start", "end")
QUANTILES = (0.5, 0.9, 0.99)


class Applied(NamedTuple):
    """An objective applied to a batch.

    Attributes:
        gradient: float64[B, T], of the loss by the log-probs; 0 for a response that the preset leaves out.
        weights: float64[tokens whose advantage is not 0].
        tokens: number of sampled tokens.
        clipped_low, clipped_high, dropped: numbers of such tokens.
    """

    gradient: Tensor
    weights: Tensor
    tokens: int
    clipped_low: int
    clipped_high: int
    dropped: int


def apply(preset: Preset, recorded: RecordedBatch, log_prob: Tensor) -> Applied:
    """Apply a preset to a recorded batch, with the policy at `log_prob` (float[B, T])."""
    numbers = (recorded.rollout_log_prob, recorded.old_log_prob, log_prob, recorded.sum_pi_squared)
    finite = torch.stack([each.isfinite() for each in numbers]).all(0)
    rows = _kept(preset, recorded)
    mask = (recorded.mask & finite)[rows]
    rollout, old, now, squares = (torch.where(mask, each[rows].double(), 0) for each in numbers)
    groups = [recorded.groups[row] for row in rows.tolist()]
    batch = Batch(mask, rollout, recorded.scores[rows].double(), groups)
    advantages = _advantages(preset, recorded, rows, batch, old, squares)
    old_of_trainer = old if preset.needs_old_log_probs else None
    update = preset.prepare(batch, old_of_trainer, updates=1, advantages=advantages)

    now.requires_grad_()
    value, counts = preset.loss(update, torch.arange(len(rows)), now)
    gradient = torch.zeros(recorded.mask.shape, dtype=torch.float64)
    gradient[rows] = torch.autograd.grad(value, now)[0]
    objective = torch.where(mask, preset.terms(update, now).objective, 0).sum()
    slopes = torch.autograd.grad(objective, now)[0]
    trains = mask & (update.advantages != 0)
    named = {name: round(counts[name]) for name in ("tokens", "clipped_low", "clipped_high", "dropped")}
    return Applied(gradient, slopes[trains] / update.advantages[trains], **named)


def _kept(preset: Preset, recorded: RecordedBatch) -> Tensor:
    """Return int[rows]: all rows, or half of each group."""
    rule = preset.config.trainer.v1.sampler.sampler_kwargs.resample
    if not rule:
        return torch.arange(len(recorded.groups))
    pairs = zip(recorded.calls.tolist(), recorded.failed_calls.tolist(), strict=True)
    right, penalties, rng = (recorded.acc > 0).tolist(), [penalty(*pair) for pair in pairs], random.Random(0)
    kept = []
    for rows in rows_of_groups(recorded.groups):
        own = [right[row] for row in rows], [penalties[row] for row in rows]
        kept += [rows[place] for place in keep(*own, max(len(rows) // 2, 1), rule=rule, rng=rng)]
    return torch.tensor(sorted(kept))


def _advantages(
    preset: Preset, recorded: RecordedBatch, rows: Tensor, batch: Batch, old: Tensor, squares: Tensor
) -> Tensor:
    """Return float64[rows, T], or [rows, 1], as by the preset's estimator, filter of groups and filter of turns."""
    algorithm = preset.config.algorithm
    if algorithm.adv_estimator == "tir_otb":
        found = tir_otb(at_last_own(batch.rewards, batch.mask), batch.mask, batch.groups, old, squares)
    else:
        found = preset.advantages(batch)[:, None]
    found = torch.where(preset.is_trained(recorded.acc[rows], batch.groups)[:, None], found, 0)
    if preset.config.trainer.v1.sampler.sampler_kwargs.void_turn_filter == "loss":
        found = torch.where(recorded.void[rows][:, None], 0, found)
    return found


def effective_share(weights: Tensor) -> float | None:
    """Return effective sample size over number of weights, (sum w)^2 / (n sum w^2): 1 if all equal, None if none."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else None


def figures(applied: Applied) -> dict[str, Any]:
    """Return the numbers of a line of the table."""
    tokens, weights = max(applied.tokens, 1), applied.weights.numpy()
    return {
        "tokens": applied.tokens,
        "weighed_tokens": len(weights),
        "effective_share": effective_share(applied.weights),
        "dropped": applied.dropped / tokens,
        "clipped_low": applied.clipped_low / tokens,
        "clipped_high": applied.clipped_high / tokens,
        "weights": _tails(weights) if len(weights) else None,
    }


def _tails(weights: np.ndarray) -> dict[str, float]:
    quantiles = zip(map(str, QUANTILES), np.quantile(weights, QUANTILES).tolist(), strict=True)
    return {**dict(quantiles), "max": float(weights.max())}


def look(recorded: RecordedBatch, presets: Sequence[Preset]) -> dict[str, Any]:
    """Return place -> figures of each preset, and cosines between their gradients."""
    result = {}
    for place, log_prob in zip(PLACES, (recorded.old_log_prob, recorded.log_prob), strict=True):
        applied = {}
        for preset in presets:
            found = apply(preset, recorded, log_prob)
            # The padding of all presets' gradients would take most of the memory.
            applied[preset.name] = found._replace(gradient=found.gradient[recorded.mask])
        result[place] = {
            "presets": {name: figures(each) for name, each in applied.items()},
            "cosines": {
                one: {other: cosine(first.gradient, second.gradient) for other, second in applied.items()}
                for one, first in applied.items()
            },
        }
    return result


def table(found: dict[str, Any]) -> str:
    """Return the figures of one place, a line per preset."""
    head = "".join(f"{name:>10}" for name in ("dropped", "low", "high", "w .5", "w .9", "w .99", "w max"))
    lines = [f"{'objective':<16}{'ESS':>7}{head}"]
    for name, each in found["presets"].items():
        ess = "-" if each["effective_share"] is None else f"{each['effective_share']:.3f}"
        shares = "".join(f"{each[key]:>10.3%}" for key in ("dropped", "clipped_low", "clipped_high"))
        tails = "".join(f"{value:>10.4g}" for value in (each["weights"] or {}).values())
        lines.append(f"{name:<16}{ess:>7}{shares}{tails or '  no token has an advantage'}")
    return "\n".join(lines)


def describe(recorded: RecordedBatch, step: int) -> str:
    """Describe the batch, and how far apart its policies are."""
    mask = recorded.mask
    versions = sorted({each for pair in recorded.versions for each in pair if each is not None})
    distance = {
        "trainer versus rollout engine at the start": recorded.old_log_prob - recorded.rollout_log_prob,
        "trainer at the end versus at the start": recorded.log_prob - recorded.old_log_prob,
    }
    written = f"versions {versions[0]} to {versions[-1]}" if versions else "unknown versions"
    return "\n".join(
        [
            f"Step {step}: {len(mask)} responses of {len(set(recorded.groups))} prompts, {int(mask.sum())} sampled "
            f"tokens, written by {written} of the weights; updates of the batch: {recorded.updates}",
            *(f"Mean |log-ratio| of {name}: {float(each[mask].abs().mean()):.3g}" for name, each in distance.items()),
        ]
    )


def draw(found: dict[str, Any], place: str, out: Path) -> None:
    """Draw the cosines of one place as a heat map."""
    names = list(found["presets"])
    cells = {
        (one, other): (value, f"{value:.3f}")
        for one, row in found["cosines"].items()
        for other, value in row.items()
        if value is not None
    }
    title = f"Cosines of gradients by log-probs, {place} of the step"
    write_heat_map(title, names, names, cells, scale=(0.0, 1.0), out=out)


def all_presets() -> list[Preset]:
    """Return every preset of configs/objective."""
    names = sorted(path.stem for path in (CONFIGS / "objective").glob("*.yaml"))
    return [Preset(name, compose_run(RUN, [f"objective={name}"])) for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, or the quickstart's above it")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step whose batch was recorded")
    parser.add_argument("--out", type=Path, help="folder of the results (default: correction_lab in the run's folder)")
    args = parser.parse_args(argv)
    try:
        run = training_folder(args.run, "rl")
        recorded = read_batch(run, args.step)
    except (OSError, ValueError) as error:
        sys.exit(f"correction_lab: {error}")
    found = look(recorded, all_presets())
    out = args.out or run / "correction_lab"
    print(describe(recorded, args.step))
    paths = [out / f"step_{args.step}.json"]
    for place in PLACES:
        print(f"\n{place} of the step\n{table(found[place])}")
        paths.append(out / f"step_{args.step}_{place}.svg")
        draw(found[place], place, paths[-1])
    write_text(paths[0], json.dumps({"step": args.step, **found}, indent=1) + "\n")
    print("", *paths, sep="\n")


if __name__ == "__main__":
    main()
