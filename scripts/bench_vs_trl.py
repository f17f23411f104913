"""Compare verl-retool with TRL on one task: see scripts/bench_vs_trl.sh, which sets up and calls this."""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "scripts"))

from whole_cpu import whole_cpu  # noqa: E402

from verl_ext.quickstart.pipeline import SANDBOX_OPTIONS  # noqa: E402
from verl_ext.quickstart.rungs import RUNGS  # noqa: E402
from verl_ext.quickstart.supervise import Supervisor  # noqa: E402
from verl_ext.records.store import cpu_seconds  # noqa: E402
from verl_ext.runs.metrics import read_metrics  # noqa: E402
from verl_ext.sandbox.launch import running_server  # noqa: E402
from verl_ext.settings import compose_run  # noqa: E402

if TYPE_CHECKING:
    from omegaconf import DictConfig

WARM_UP = 2  # steps left out of the medians
STATIC = "verl-retool, no dynamic sampling"
TRAINERS = ("verl-retool", "TRL", STATIC)


class Model(NamedTuple):
    """The defaults of a comparison for one of the quickstart's models."""

    config: tuple[str, list[str]]  # the run's YAML and overrides
    steps: int
    rounds: int
    latencies: list[float]  # of a sandbox call, in s
    trainers: tuple[str, ...]


MODELS = {
    "tiny": Model(("tiny_dapo", []), 12, 2, [0, 0.1], TRAINERS[:2]),
    "small": Model(("smollm2_dapo", ["+hardware=cpu_small"]), 6, 1, [0], TRAINERS),
}


def sizes(config: "DictConfig") -> dict[str, float]:
    """Return what TRL's side needs to know of an RL run's config; batches are counted in responses."""
    actor, samples = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    mini_batch = actor.ppo_mini_batch_size * samples
    return {
        "samples": samples,
        "responses": config.data.train_batch_size * samples,
        "mini_batch": mini_batch,
        "micro_batch": mini_batch if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        "response_tokens": config.data.max_response_length,
        "tool_calls": config.retool.max_tool_calls,
        "code_timeout_s": config.retool.sandbox.timeout_s,
        "temperature": config.actor_rollout_ref.rollout.temperature,
        "lr": actor.optim.lr,
        "warmup_steps": actor.optim.lr_warmup_steps,
        "beta2": actor.optim.betas[1],
        "clip_low": actor.clip_ratio_low,
        "clip_high": actor.clip_ratio_high,
    }


@contextlib.contextmanager
def delayed(url: str, delay_s: float) -> Iterator[str]:
    """Open a port on 127.0.0.1 that forwards what it receives to `url` after `delay_s`; answers go back at once."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lag_s: float) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    break
                writer.write(data)
            writer.close()

        sender = asyncio.ensure_future(send())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                queue.put_nowait((loop.time() + lag_s, data))
        queue.put_nowait((loop.time() + lag_s, b""))
        with contextlib.suppress(ConnectionError):
            await sender

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(url)
        server_reader, server_writer = await asyncio.open_connection(target.hostname, target.port)
        with contextlib.suppress(asyncio.CancelledError):  # at the end, when clients keep connections open
            await asyncio.gather(pump(reader, server_writer, delay_s), pump(server_reader, writer, 0.0))

    ready: Future[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        ready.set_result((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop))
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    port, loop, stop = ready.result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def new_folder(out: Path) -> Path:
    """Make a folder for this start in `out`, named after the time: the figures of earlier starts stay as they are."""
    folder = out / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    return folder


def run_ours(
    supervisor: Supervisor,
    run: Path,
    sandbox: str,
    steps: int,
    out: Path,
    overrides: Sequence[str] = (),
    python: str = sys.executable,
    repo: Path = REPO,
    model: str = "tiny",
) -> dict[str, float]:
    """Run RL with the launcher of `repo`, without checkpoints."""
    started = time.time()
    supervisor.run(
        [
            *("bash", str(repo / "recipe/retool" / RUNGS[model].rl_launcher), f"trainer.total_training_steps={steps}"),
            *("trainer.save_freq=-1", "trainer.resume_mode=disable", *overrides),
        ],
        log=out / "log.txt",
        env={
            "PYTHON": python,
            "DATA_DIR": str(run / "data"),
            "MODEL_PATH": str(run / "sft" / "merged"),
            "OUTPUT_DIR": str(out),
            "SANDBOX_URL": sandbox,
            "DOCTOR": "0",
            "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",  # all in fp32, like TRL
        },
    )
    (file,) = out.glob("metrics-*.jsonl")
    metrics = read_metrics([file])
    _, step_s = metrics.curve("timing_s/step")
    _, prompts = metrics.curve("filter_groups/generated")
    _, update_s = metrics.curve("timing_s/update_actor")
    _, accuracy = metrics.curve("train/acc")
    _, calls = metrics.curve("tool/calls")
    _, tokens = metrics.curve("train/model_tokens")
    samples = sizes(compose_run(*MODELS[model].config))["samples"]
    return {
        "first_step_s": file.stat().st_mtime - started - sum(step_s[1:]),  # last written at the last step
        "step_s": statistics.median(step_s[WARM_UP:]),
        "update_s": statistics.median(update_s[WARM_UP:]),
        "responses_per_s": sum(prompts[WARM_UP:]) * samples / sum(step_s[WARM_UP:]),
        "last_accuracy": accuracy[-1],
        "calls": statistics.mean(calls[WARM_UP:]),
        "tokens": statistics.mean(tokens[WARM_UP:]),
        "records_cpu_s": statistics.median([*cpu_seconds(out).values()][WARM_UP:] or [0.0]),
    }


def run_trl(
    supervisor: Supervisor, run: Path, sandbox: str, steps: int, out: Path, python: Path, model: str
) -> dict[str, float]:
    """Run scripts/bench_trl_side.py in TRL's environment."""
    figures, batch = out / "figures.json", sizes(compose_run(*MODELS[model].config))
    variables = whole_cpu() if model == "small" else {}  # as that model's launcher sets them for ours
    started = time.time()
    supervisor.run(
        [
            *(str(python), str(REPO / "scripts/bench_trl_side.py"), "--steps", str(steps), "--out", str(figures)),
            *("--model", str(run / "sft/merged"), "--data", str(run / "data/rl_train.parquet"), "--sandbox", sandbox),
            *("--sizes", json.dumps(batch)),
        ],
        log=out / "log.txt",
        env=variables | {"HF_HUB_OFFLINE": "1", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"},
    )
    found = json.loads(figures.read_text())
    ends = [end - started for end in found["step_ends"]]
    step_s = [end - start for start, end in zip(ends, ends[1:], strict=False)][WARM_UP - 1 :]
    return {
        "first_step_s": ends[0],
        "step_s": statistics.median(step_s),
        "responses_per_s": batch["responses"] * len(step_s) / sum(step_s),
        "last_accuracy": (found["reward"][-1] + 1) / 2,
        "calls": statistics.mean(found["calls_per_response"][WARM_UP:]),
        "tokens": statistics.mean(found["tokens_per_response"][WARM_UP:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="the quickstart's model (default: %(default)s)")
    parser.add_argument("--run", type=Path, required=True, help="a quickstart's folder, with data and sft/merged")
    parser.add_argument("--trl-python", type=Path, required=True, help="Python executable of TRL's environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="RL steps per run (default: 12, small: 6)")
    parser.add_argument("--rounds", type=int, help="runs per trainer, alternating (default: 2, small: 1)")
    parser.add_argument("--latencies", type=float, nargs="+", help="seconds per call (default: 0 0.1, small: 0)")
    parser.add_argument(
        "--trainers", nargs="+", choices=TRAINERS, help="which run (default: the first two, small: all)"
    )
    args = parser.parse_args()
    for name, value in MODELS[args.model]._asdict().items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.steps <= WARM_UP + 1:
        parser.error(f"--steps is {args.steps}, but the first {WARM_UP} do not count; expected {WARM_UP + 2} or more")
    folder = new_folder(args.out)

    rows: dict[tuple[float, str], list[dict[str, float]]] = {}
    with Supervisor() as supervisor, running_server(options=SANDBOX_OPTIONS) as url:
        for latency_s in args.latencies:
            with delayed(url, latency_s) if latency_s else contextlib.nullcontext(url) as sandbox:
                for number in range(args.rounds):
                    for name in args.trainers:
                        print(f"== {name}, sandbox calls + {1000 * latency_s:g} ms, round {number + 1}", flush=True)
                        out = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{latency_s:g}s_{number}"
                        out.mkdir(parents=True)
                        common = (supervisor, args.run, sandbox, args.steps, out)
                        if name == "TRL":
                            figures = run_trl(*common, args.trl_python, args.model)
                        else:
                            overrides = ["algorithm.filter_groups.enable=false"] if name == STATIC else []
                            figures = run_ours(*common, overrides, model=args.model)
                        print(f"   {figures}", flush=True)
                        rows.setdefault((latency_s, name), []).append(figures)
                        done = [{"latency_s": key[0], "trainer": key[1], "runs": runs} for key, runs in rows.items()]
                        (folder / "summary.json").write_text(json.dumps(done, indent=2))  # if a later run fails

    means = {key: {name: statistics.mean(run[name] for run in runs) for name in runs[0]} for key, runs in rows.items()}
    responses = sizes(compose_run(*MODELS[args.model].config))["responses"]
    print(
        f"\nSteps that train on {responses} responses, median from step {WARM_UP + 1} on; "
        f"calls and tokens per response; means of {args.rounds} runs.\n"
    )
    print(
        "| sandbox call | trainer | warm step | responses per second | command to first update | accuracy, last step "
        "| calls | model's tokens |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (latency_s, name), row in means.items():
        print(
            f"| + {1000 * latency_s:g} ms | {name} | {row['step_s']:.2f} s | {row['responses_per_s']:.1f} "
            f"| {row['first_step_s']:.0f} s | {row['last_accuracy']:.2f} | {row['calls']:.2f} | {row['tokens']:.1f} |"
        )
    for latency_s, name in means:
        theirs = means.get((latency_s, "TRL"))
        if name == "TRL" or theirs is None:
            continue
        ours = means[latency_s, name]
        print(
            f"+ {1000 * latency_s:g} ms: a step of {name} takes {ours['step_s'] / theirs['step_s']:.2f} x TRL's, "
            f"and it generates {ours['responses_per_s'] / theirs['responses_per_s']:.2f} x as many responses per second"
        )


if __name__ == "__main__":
    main()
