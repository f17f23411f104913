"""Test which weights wrote which token: `max_staleness` is kept, and a span's log-probs are those of its version.

Each tau gets six steps in verl's mode `separate_async`, with a sandbox so slow that responses outlast updates. Every
version is a checkpoint. Plain transformers in fp32 recompute the log-probs of every response that was trained on, with
the weights that its spans name and with those of the version before and the one after.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.studies.slow_sandbox import slow_sandbox
from tests.e2e.conftest import launch_tiny, read_metrics, run_to_end
from tests.e2e.versions import SAME, load_version, log_probs_of, recorded_responses
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS = 6
OTHER = 1e-3  # a neighbour version's differ by more in some token, except in a span that both versions are sure of
OVERRIDES = (
    "hardware=cpu_separate",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "retool.checkpoints.keep_last=null",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.v1.separate_async.num_warmup_batches=3",  # this many more batches are in flight, and age
    "actor_rollout_ref.rollout.max_num_seqs=4",  # the trainer waits for the server: updates interrupt turns
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",  # a version differs from its neighbours from the first one on
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "++reward.reward_kwargs.random_reward_p=0.5",  # gives useful groups, whatever the model can do
    "retool.recorder.token_share=1",
)


PLACES = ("not after an update", "in a turn after an update", "in a turn that an update broke off")


@dataclass
class Span:
    """Tokens [start, end) of a response, whose log-probs vLLM noted at `version`."""

    response: int
    start: int
    end: int
    version: int
    place: str  # of PLACES


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_spans_are_of_their_version_and_no_response_is_too_old(small: Path, tmp_path: Path, tau: int) -> None:
    out = tmp_path / "rl"
    with running_server() as url, slow_sandbox(url, mean_s=2.0, seed=tau) as slow_url:
        staleness = f"trainer.v1.sampler.sampler_kwargs.max_staleness={tau}"
        process = launch_tiny("dapo", out, small, *OVERRIDES, staleness, SANDBOX_URL=slow_url)
        run_to_end(process, out / "log.txt")
    model = small / "sft" / "merged"
    trained = [(step, row) for step in range(1, STEPS + 1) for row in recorded_responses(out, model, step)]
    check(out, model, dict(read_metrics(out)), trained, tau)


def spans_of(number: int, row: dict) -> Iterator[Span]:
    before, start = None, 0
    for version, tokens in itertools.groupby(row["version"]):
        end = start + len(list(tokens))
        if version is not None:
            is_behind = before is not None and before.version != version
            before = Span(number, start, end, version, PLACES[is_behind + (is_behind and before.end == start)])
            yield before
        start = end


def check(out: Path, model: Path, metrics: dict, trained: list[tuple[int, dict]], tau: int) -> None:
    assert sorted({step for step, _ in trained}) == list(range(1, STEPS + 1))
    ages = [step - 1 - version for step, row in trained for version in row["version"] if version is not None]
    dropped = sum(data["staleness/dropped"] for data in metrics.values())
    print(f"tau {tau}: {len(trained)} responses, ages {sorted(set(ages))}, dropped as too old {dropped:.0f}")
    assert min(ages) >= 0 and max(ages) <= tau
    assert max(ages) == tau, "nothing was as old as is allowed: tau was not tested"
    assert dropped, "nothing was too old: tau was not tested"

    rows = [row for _, row in trained]
    spans = [span for number, row in enumerate(rows) for span in spans_of(number, row)]
    for row in rows:  # each token of the policy has a version, and none of a tool's
        assert [version is not None for version in row["version"]] == row["mask"].tolist()
    places = {span.place for span in spans}  # turns of the tiny model are so short that few runs interrupt one
    assert PLACES[0] in places and (PLACES[1] in places or not tau), "no response outlasted an update"
    versions = {span.version for span in spans}
    differences: list[dict[int, float]] = [{} for _ in spans]  # neighbour (-1, 0, 1) -> largest of a span's tokens
    for version in range(max(versions) + 2):
        near = {span.response for span in spans if abs(span.version - version) <= 1}
        numbers = sorted(near)
        redone = log_probs_of(load_version(out, model, version), [rows[number] for number in numbers])
        found = dict(zip(numbers, redone, strict=True))
        for i, span in enumerate(spans):
            if abs(span.version - version) <= 1:
                sampled = rows[span.response]["mask"][span.start : span.end].bool()
                noted = rows[span.response]["rollout_log_prob"][span.start : span.end]
                difference = (found[span.response][span.start : span.end] - noted).abs()[sampled]
                differences[i][version - span.version] = difference.max().item()
    own = {place: [] for place in places}
    for span, by in zip(spans, differences, strict=True):
        own[span.place].append(by[0])
    for place, values in own.items():
        print(f"  {len(values)} spans {place} differ from their version by {max(values):.1e} at most")
    other = [value for by in differences for step, value in by.items() if step]
    clear = sum(value > OTHER for value in other)
    print(f"  from a neighbour's by {min(other):.1e} at least, {clear} of {len(other)} by more than {OTHER}")
    worst = max(max(values) for values in own.values())
    assert worst < SAME and worst < min(other)
    assert clear > 0.9 * len(other)
