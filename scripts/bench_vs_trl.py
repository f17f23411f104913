"""verl-retool and TRL side by side on the tiny tool task: see scripts/bench_vs_trl.sh, which sets up and calls this."""

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
from urllib.parse import urlsplit

from verl_ext.quickstart.pipeline import SANDBOX_OPTIONS
from verl_ext.quickstart.supervise import Supervisor
from verl_ext.records.run_record import read_metrics
from verl_ext.sandbox.launch import running_server

REPO = Path(__file__).resolve().parents[1]
WARM_UP = 2  # steps left out of the medians
PROMPTS, SAMPLES = 16, 8  # of a step


@contextlib.contextmanager
def delayed(url: str, delay_s: float) -> Iterator[str]:
    """A port on 127.0.0.1 that passes on to `url` what it receives, `delay_s` later; answers go back at once."""

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
    """A folder of this start in `out`, named after the time: the figures of earlier starts stay as they are."""
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
) -> dict[str, float]:
    """RL by the launcher of `repo`, without checkpoints."""
    started = time.time()
    supervisor.run(
        [
            *("bash", str(repo / "recipe/retool/run_tiny_dapo.sh"), f"trainer.total_training_steps={steps}"),
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
        },
    )
    (file,) = out.glob("metrics-*.jsonl")
    metrics = read_metrics([file])
    _, step_s = metrics.curve("timing_s/step")
    _, prompts = metrics.curve("filter_groups/generated")
    _, update_s = metrics.curve("timing_s/update_actor")
    _, accuracy = metrics.curve("train/acc")
    return {
        "first_step_s": file.stat().st_mtime - started - sum(step_s[1:]),  # last written at the last step
        "step_s": statistics.median(step_s[WARM_UP:]),
        "update_s": statistics.median(update_s[WARM_UP:]),
        "responses_per_s": sum(prompts[WARM_UP:]) * SAMPLES / sum(step_s[WARM_UP:]),
        "last_accuracy": accuracy[-1],
    }


def run_trl(supervisor: Supervisor, run: Path, sandbox: str, steps: int, out: Path, python: Path) -> dict[str, float]:
    """scripts/bench_trl_side.py in TRL's environment."""
    figures, started = out / "figures.json", time.time()
    supervisor.run(
        [
            *(str(python), str(REPO / "scripts/bench_trl_side.py"), "--steps", str(steps), "--out", str(figures)),
            *("--model", str(run / "sft/merged"), "--data", str(run / "data/rl_train.parquet"), "--sandbox", sandbox),
        ],
        log=out / "log.txt",
        env={"HF_HUB_OFFLINE": "1"},
    )
    found = json.loads(figures.read_text())
    ends = [end - started for end in found["step_ends"]]
    step_s = [end - start for start, end in zip(ends, ends[1:], strict=False)][WARM_UP - 1 :]
    return {
        "first_step_s": ends[0],
        "step_s": statistics.median(step_s),
        "responses_per_s": PROMPTS * SAMPLES * len(step_s) / sum(step_s),
        "last_accuracy": (found["reward"][-1] + 1) / 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="a quickstart's folder, with data and sft/merged")
    parser.add_argument("--trl-python", type=Path, required=True, help="Python of TRL's environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12, help="RL steps of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, alternating (default: %(default)s)")
    parser.add_argument("--latencies", type=float, nargs="+", default=[0, 0.1], help="of a sandbox call, in s")
    args = parser.parse_args()
    if args.steps <= WARM_UP + 1:
        parser.error(f"--steps is {args.steps}, but the first {WARM_UP} are left out; take at least {WARM_UP + 2}")
    folder = new_folder(args.out)

    rows: dict[tuple[float, str], list[dict[str, float]]] = {}
    with Supervisor() as supervisor, running_server(options=SANDBOX_OPTIONS) as url:
        for latency_s in args.latencies:
            with delayed(url, latency_s) if latency_s else contextlib.nullcontext(url) as sandbox:
                for number in range(args.rounds):
                    for name in ("verl-retool", "TRL"):
                        print(f"== {name}, sandbox calls + {1000 * latency_s:g} ms, round {number + 1}", flush=True)
                        out = folder / f"{name}_{latency_s:g}s_{number}"
                        out.mkdir(parents=True)
                        if name == "TRL":
                            figures = run_trl(supervisor, args.run, sandbox, args.steps, out, args.trl_python)
                        else:
                            figures = run_ours(supervisor, args.run, sandbox, args.steps, out)
                        print(f"   {figures}", flush=True)
                        rows.setdefault((latency_s, name), []).append(figures)

    means = {key: {name: statistics.mean(run[name] for run in runs) for name in runs[0]} for key, runs in rows.items()}
    (folder / "summary.json").write_text(
        json.dumps([{"latency_s": key[0], "trainer": key[1], "runs": runs} for key, runs in rows.items()], indent=2)
    )
    print(
        f"\nSteps of {PROMPTS} x {SAMPLES} responses, median from step {WARM_UP + 1} on; means of {args.rounds} runs.\n"
    )
    print(
        "| sandbox call | trainer | warm step | responses per second | command to first update | accuracy, last step |"
    )
    print("|---|---|---|---|---|---|")
    for (latency_s, name), row in means.items():
        print(
            f"| + {1000 * latency_s:g} ms | {name} | {row['step_s']:.2f} s | {row['responses_per_s']:.0f} "
            f"| {row['first_step_s']:.0f} s | {row['last_accuracy']:.2f} |"
        )
    for latency_s in args.latencies:
        ours, theirs = means[latency_s, "verl-retool"], means[latency_s, "TRL"]
        print(
            f"+ {1000 * latency_s:g} ms: a step of verl-retool takes {ours['step_s'] / theirs['step_s']:.2f} x TRL's, "
            f"and it generates {ours['responses_per_s'] / theirs['responses_per_s']:.2f} x as many responses a second"
        )


if __name__ == "__main__":
    main()
