"""Measure what each way of generating is worth: OlmoRL's table (Olmo 3, arXiv:2512.13961) for the tiny task on a CPU.

    python -m scripts.studies.ablation               # five rows x 3 runs of 12 steps
    python -m scripts.studies.ablation --max-runs 1  # the next run that is missing

The rows are: static batches; continuous batching; agent loops within the server; rollouts in parallel with the learner,
where an update interrupts requests; and the same with updates under running requests. A server has room for 32
sequences, a step trains 128 rollouts, the objective is glm5_async in all rows, and each tool call is delayed by a
log-normal time (slow_sandbox.py). Rows take turns. The result of a run is a line of --results, and that run is not
repeated. The machine should do nothing else meanwhile.

The window runs from the start of the third step to the end of the last step but two. Rollouts that are under way when a
run ends are not recorded; the two steps after the window let its own rollouts finish. P is the number of parameters of
the model, with tied embeddings counted once.

- sampled tokens/s: of all turns. The tokens of a turn are spread evenly over its request; those in the window count.
- trained tokens/s: sampled tokens of the rollouts in the window's batches, without those that fill a batch.
- model utilisation: 2 P FLOPs for each sampled token and 6 P for each token of a batch, per second, over the peak: fp32
  products of 2048 x 2048 by torch. Servers and learner share the cores, so there is one peak for both.
- memory-bandwidth utilisation, of the server only: bytes per second over the peak, a copy of 256 MiB by torch, read
  and written. A decode step reads P once, and for each token it samples, the keys and values of the tokens before it.
  Steps are not recorded. A request gets at most one token per step, so the number of steps is about the number of
  tokens of the fastest request at each moment; if requests wait for room, 32 tokens count as a step. The tiny model
  fits into the cache: the figure says how rows compare, not what memory does.
- server waits: share of the window in which no request is under way. A request that pauses for an update is under way.
  One that an update interrupts is not, for one second: verl's client waits that long before it asks again
  (llm_server.py:345, 0.9.1).
- learner waits: share of the window in which the trainer waits for rollouts.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.studies.compare_modes import SEPARATE, SLOW, launch
from scripts.studies.shared import (
    REPO,
    Published,
    add_places,
    command_line,
    empty,
    made_with,
    markdown,
    metrics_of,
    rl_command,
    spread,
)
from verl_ext.fleet.modes import IN_SERVER
from verl_ext.memory.shape import read_shape
from verl_ext.outcome import PromptEnd
from verl_ext.quickstart.source import find_source
from verl_ext.quickstart.supervise import CommandFailed
from verl_ext.records import store
from verl_ext.runs import durable
from verl_ext.runs.lock import lock_folder

ROOM = 32  # sequences of a server at once; static_batches.SIZE
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
ROWS = {  # name -> description, and overrides
    "static": ("static batches", (f"{MANAGER}=scripts.studies.static_batches.StaticBatchManager",)),
    "continuous": ("continuous batching", (f"{MANAGER}=verl_ext.rollout.workers.LeanAgentLoopManager",)),
    "in_server": (
        "+ agent loops within the server",
        (f"{MANAGER}={IN_SERVER}",),
    ),
    "abort": ("+ rollouts next to the learner, updates interrupt", (*SEPARATE, "retool.fleet.weight_update=abort")),
    "keep": ("+ in-flight updates", (*SEPARATE, "retool.fleet.weight_update=keep")),
}
SHARED = (
    *SLOW,
    "objective=glm5_async",
    f"actor_rollout_ref.rollout.max_num_seqs={ROOM}",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
)
COLD, OPEN = 2, 2  # steps before the window, and after it
ASKS_AGAIN_S = 1.0  # for this long an interrupted request is on no server
BYTES = 4  # of a parameter, a key, a value: fp32
COLUMNS = {  # column of the table -> figure, factor, digits
    "sampled tokens/s": ("sampled_per_s", 1, 0),
    "trained tokens/s": ("trained_per_s", 1, 0),
    "model utilisation (%)": ("model_use", 100, 2),
    "memory-bandwidth utilisation (%)": ("memory_use", 100, 2),
    "server waits (%)": ("server_waits", 100, 1),
    "learner waits (%)": ("learner_waits", 100, 1),
}


class Model(NamedTuple):
    """Sizes of the model: its parameters, and the bytes of a token's keys and values."""

    parameters: int
    kv_bytes: int


class Request(NamedTuple):
    """A turn of the model: seconds since 1970, sampled tokens, and the tokens before them."""

    start_s: float
    end_s: float
    tokens: float
    before: float

    def share(self, start_s: float, end_s: float) -> float:
        """Return the share of the request that lies in an interval."""
        inside = min(self.end_s, end_s) - max(self.start_s, start_s)
        return max(0.0, inside) / (self.end_s - self.start_s)


def read_model(folder: Path) -> Model:
    """Read the sizes of a merged checkpoint."""
    shape = read_shape(str(folder))
    return Model(shape.parameters, BYTES * shape.kv_bytes_per_token // 2)  # the shape's are 2 bytes a number


def peaks() -> dict[str, float]:
    """Measure FLOPs and bytes per second of this machine: the best of ten matrix products, and of ten copies."""
    import torch

    left, right, source = torch.rand(2048, 2048), torch.rand(2048, 2048), torch.rand(2**26)
    target = torch.empty_like(source)

    def best_s(work: Any) -> float:
        times = []
        for _ in range(10):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    return {
        "peak_flops": 2 * 2048**3 / best_s(lambda: torch.mm(left, right)),
        "peak_bytes": 2 * source.nbytes / best_s(lambda: target.copy_(source)),
    }


def read_requests(run: Path, prompt_tokens: float) -> list[Request]:
    """Read all requests that were recorded and took time; `prompt_tokens` is the mean length of the prompts."""
    return [
        Request(
            turn["started_s"], turn["started_s"] + turn["generate_s"], turn["tokens"], prompt_tokens + turn["start"]
        )
        for row in store.rows(run, columns=["turns"])
        for turn in row["turns"] or ()
        if turn["role"] == "model" and turn["tokens"] and turn["generate_s"]
    ]


def broken_off(requests: Sequence[Request], updates: Sequence[float]) -> list[Request]:
    """Split the requests that updates at these times interrupt: what is left of one begins ASKS_AGAIN_S later."""
    parts = []
    for request in requests:
        pieces, start_s = [], request.start_s
        for at in sorted(updates):
            if start_s < at < request.end_s:
                pieces.append((start_s, at))
                start_s = at + ASKS_AGAIN_S
        if start_s < request.end_s:
            pieces.append((start_s, request.end_s))
        per_s, before = request.tokens / sum(end - start for start, end in pieces), request.before
        for start, end in pieces:
            parts.append(Request(start, end, per_s * (end - start), before))
            before += parts[-1].tokens
    return parts


def moments(requests: Sequence[Request], start_s: float, end_s: float) -> Iterator[tuple[float, list[Request]]]:
    """Yield the intervals of the window in which the same requests are under way: seconds, and the requests."""
    inside = [request for request in requests if request.share(start_s, end_s) > 0]
    edges = {start_s, end_s} | {edge for request in inside for edge in request[:2] if start_s < edge < end_s}
    under_way: list[Request] = []
    coming = sorted(inside, reverse=True)
    for begin, end in itertools.pairwise(sorted(edges)):
        under_way = [request for request in under_way if request.end_s > begin]
        while coming and coming[-1].start_s <= begin:
            under_way.append(coming.pop())
        yield end - begin, under_way


def figures_of(run: Path, model: Model, steps: int, *, breaks_off: bool = False) -> dict[str, float]:
    """Compute a run's figures over its window: tokens, FLOPs and bytes per second, and the shares of time.

    Args:
        steps: of the whole run.
        breaks_off: whether updates of the weights interrupt requests.
    Raises:
        ValueError: the records or the metrics lack a step of the window.
    """
    window = range(COLD + 1, steps - OPEN + 1)
    timeline = [row for row in store.rows(run, "timeline") if COLD <= row["step"] <= window[-1]]
    metrics = metrics_of(run).steps
    if lost := {COLD, *window} - {row["step"] for row in timeline} | set(window) - metrics.keys():
        raise ValueError(f"{run} has nothing of step {min(lost)}. See its log.txt, and delete the folder.")
    start_s = max(row["end_s"] for row in timeline if row["step"] == COLD)
    end_s = max(row["end_s"] for row in timeline)
    seconds = end_s - start_s
    waited = sum(row["end_s"] - row["start_s"] for row in timeline if row["step"] in window and row["what"] == "wait")
    rows = store.rows(run, columns=["trained_step", "model_tokens", "outcome"])
    taken = [row for row in rows if row["trained_step"] in window]
    in_batches = sum(row["model_tokens"] for row in taken)
    trained = sum(row["model_tokens"] for row in taken if row["outcome"] == PromptEnd.TRAINED)
    requests = read_requests(run, fmean(metrics[step]["prompt_length/mean"] for step in window))
    if breaks_off:
        syncs = store.rows(run, "timeline")
        requests = broken_off(requests, [row["start_s"] for row in syncs if row["what"] == "weight_sync"])
    shares = [(request, request.share(start_s, end_s)) for request in requests]
    sampled = sum(share * request.tokens for request, share in shares)
    busy_s, decode_steps = 0.0, 0.0
    for length_s, under_way in moments(requests, start_s, end_s):
        if under_way:
            busy_s += length_s
            rates = [each.tokens / (each.end_s - each.start_s) for each in under_way]
            decode_steps += length_s * max(*rates, sum(rates) / ROOM)
    read = sum(share * each.tokens * (each.before + (each.tokens - 1) / 2) for each, share in shares)
    return {
        "sampled_per_s": sampled / seconds,
        "trained_per_s": trained / seconds,
        "flops_per_s": model.parameters * (2 * sampled + 6 * in_batches) / seconds,
        "bytes_per_s": (decode_steps * model.parameters * BYTES + read * model.kv_bytes) / seconds,
        "server_waits": 1 - busy_s / seconds,
        "learner_waits": waited / seconds,
    }


def row_table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Format the table in Markdown: a line per row, with means and standard deviations over its runs.

    Args:
        found: name of a row -> what its runs published. The peaks are the highest that any run has measured.
    """
    every = [run for runs in found.values() for run in runs]
    flops, bytes_ = (max(run[name] for run in every) for name in ("peak_flops", "peak_bytes"))
    rows = []
    for name, runs in found.items():
        whole = [
            {**run, "model_use": run["flops_per_s"] / flops, "memory_use": run["bytes_per_s"] / bytes_} for run in runs
        ]
        cells = [spread([run[key] * factor for run in whole], digits) for key, factor, digits in COLUMNS.values()]
        rows.append([ROWS[name][0], str(len(runs)), *cells])
    return f"{markdown(['', 'runs', *COLUMNS], rows)}\n\nPeaks: {flops / 1e9:.0f} GFLOP/s, {bytes_ / 1e9:.1f} GB/s."


def command_of(row: str, repeat: int, steps: int, extra: Sequence[str]) -> list[str]:
    return rl_command([*ROWS[row][1], *SHARED, *extra], steps=steps, seed=repeat)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS), help="run only these rows (default: all)")
    parser.add_argument("--mean-s", type=float, default=0.5, help="mean latency of a call (default: .5 s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help=f"steps, at least {COLD + OPEN + 1} (default: 12)")
    parser.add_argument("--max-runs", type=int, help="end after this many runs")
    parser.add_argument("--timeout-s", type=float, default=900, help="stop a run that takes longer (default: 900)")
    add_places(parser, "ablation")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of every run")
    args = parser.parse_args(argv)
    if args.steps <= COLD + OPEN:
        parser.error(f"--steps {args.steps} leaves no step in the window; expected at least {COLD + OPEN + 1}.")
    os.environ["ONEDNN_DEFAULT_FPMATH_MODE"] = "STRICT"  # fp32 in the runs as in the peak
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    source, out = args.source.resolve(), args.out.resolve()
    cells = [(row, repeat) for repeat in range(args.repeats) for row in args.row]
    try:
        digests, results = find_source(source).digests, Published(args.results or out / "results.jsonl")
        settings = {
            row: made_with(digests, steps=args.steps, overrides=[*ROWS[row][1], *SHARED, *args.overrides])
            | {"mean_s": args.mean_s}
            for row in args.row
        }
        missing = [cell for cell in cells if not results.has("_".join(map(str, cell)), settings[cell[0]])]
        for row, repeat in missing[: args.max_runs]:
            name = f"{row}_{repeat}"
            print(f"== {name}", flush=True)
            run, peak = out / name, peaks()
            durable.make_folder(run)
            with lock_folder(run):  # `launch` takes it again
                empty(run)  # of a run that was interrupted
            command = command_of(row, repeat, args.steps, args.overrides)
            launch(command, source, run, args.mean_s, repeat, args.timeout_s)
            model = read_model(source / "sft" / "merged")
            found = figures_of(run, model, args.steps, breaks_off=row == "abort") | peak
            results.add(name, {key: float(f"{value:.5g}") for key, value in found.items()}, settings[row])
    except (CommandFailed, TimeoutError, ValueError) as error:
        sys.exit(f"ablation.py: {error}")
    found = {
        row: [results.rows[f"{row}_{n}"] for n in range(args.repeats) if f"{row}_{n}" in results.rows]
        for row in args.row
    }
    if any(found.values()):
        print(f"\n{row_table({row: runs for row, runs in found.items() if runs})}")


if __name__ == "__main__":
    main()
