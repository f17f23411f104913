"""Compare the time of an RL step with that of Hugging Face TRL's GRPOTrainer with a tool, on one task.

    python -m scripts.bench.vs_trl                # the tiny model, calls as they are and 100 ms slower: 15 minutes
    python -m scripts.bench.vs_trl --model small  # SmolLM2-135M-Instruct, weights from 4 bits

Both take turns with the same model, batch and sandbox. A third run of the small model, ours without dynamic sampling,
does the same work as TRL, which has none. TRL's asynchronous trainer, which overlaps tool calls, needs NCCL and is not
measured. Starts from the SFT model of a quickstart, and makes it if it is missing. Installs TRL into a separate
environment, outputs/bench_vs_trl/venv (requirements/trl.txt, 1.5 GB). Prints a table; the figures go to a new folder
below --out.
"""

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scripts.studies.shared import REPO, command_line, make_sft, markdown, metrics_of, rl_environment, whole_cpu
from scripts.studies.slow_sandbox import proxied
from verl_ext.cpu import is_cpu_only
from verl_ext.quickstart.pipeline import SANDBOX_OPTIONS
from verl_ext.quickstart.rungs import RUNGS
from verl_ext.quickstart.supervise import Supervisor
from verl_ext.records.store import cpu_seconds
from verl_ext.sandbox.launch import running_server
from verl_ext.settings import compose_run

if TYPE_CHECKING:
    from omegaconf import DictConfig

WARM_UP = 2  # steps left out of the medians
FP32 = {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}  # of all products, on both sides
STATIC = "verl-retool, no dynamic sampling"
TRAINERS = ("verl-retool", "TRL", STATIC)
FOLDER = REPO / "outputs" / "bench_vs_trl"
TRL_PYTHON = FOLDER / "venv" / "bin" / "python"
TRL_SIDE = "scripts.bench.trl_side"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
COLUMNS = {
    "warm step": ("step_s", "{:.2f} s"),
    "responses per second": ("responses_per_s", "{:.1f}"),
    "command to first update": ("first_step_s", "{:.0f} s"),
    "accuracy, last step": ("last_accuracy", "{:.2f}"),
    "calls": ("calls", "{:.2f}"),
    "model's tokens": ("tokens", "{:.1f}"),
}


class Model(NamedTuple):
    """The defaults of a comparison for one of the quickstart's models."""

    config: tuple[str, list[str]]  # the run's YAML and overrides
    run: Path  # a quickstart's folder
    steps: int
    rounds: int
    latencies: list[float]  # of a sandbox call, in s
    trainers: tuple[str, ...]


MODELS = {
    "tiny": Model(("tiny_dapo", []), Path("outputs/quickstart"), 12, 2, [0, 0.1], TRAINERS[:2]),
    "small": Model(("smollm2_dapo", ["+hardware=cpu_small"]), Path("outputs/small"), 6, 1, [0], TRAINERS),
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


def install_trl() -> None:
    """Install TRL, with this project's torch, into the environment of TRL_PYTHON, unless it is there.

    Raises:
        CalledProcessError: pip failed.
    """
    ready, wanted = FOLDER / "venv" / "ready", REPO / "requirements" / "trl.txt"
    if ready.is_file() and ready.read_bytes() == wanted.read_bytes():
        return
    print(f"== installing TRL into {ready.parent}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ready.parent)], check=True)
    pip = [str(TRL_PYTHON), "-m", "pip", "install", "--quiet"]
    pins = (REPO / "requirements" / "cpu.txt").read_text().splitlines()
    torch = next(line.split()[0] for line in pins if line.startswith("torch=="))
    # As in setup_env.sh: the CPU build is in pip's configured indexes, or in PyTorch's own index.
    if subprocess.run([*pip, torch], stderr=subprocess.DEVNULL).returncode:
        subprocess.run([*pip, torch, "--index-url", TORCH_INDEX], check=True)
    subprocess.run([*pip, "-r", str(wanted)], check=True)
    shutil.copy(wanted, ready)


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
        env=rl_environment(run, out, sandbox) | {"PYTHON": python, **FP32},
    )
    (file,) = out.glob("metrics-*.jsonl")
    metrics = metrics_of(out)
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
    """Run trl_side.py in TRL's environment."""
    figures, batch = out / "figures.json", sizes(compose_run(*MODELS[model].config))
    variables = whole_cpu() if model == "small" else {}  # as that model's launcher sets them for ours
    started = time.time()
    supervisor.run(
        [
            *(str(python), "-m", TRL_SIDE, "--steps", str(steps), "--out", str(figures)),
            *("--model", str(run / "sft/merged"), "--data", str(run / "data/rl_train.parquet"), "--sandbox", sandbox),
            *("--sizes", json.dumps(batch)),
        ],
        log=out / "log.txt",
        env=variables | {"HF_HUB_OFFLINE": "1", **FP32},
    )
    found = json.loads(figures.read_text())
    ends = [end - started for end in found["step_ends"]]
    step_s = [end - start for start, end in itertools.pairwise(ends)][WARM_UP - 1 :]
    return {
        "first_step_s": ends[0],
        "step_s": statistics.median(step_s),
        "responses_per_s": batch["responses"] * len(step_s) / sum(step_s),
        "last_accuracy": (found["reward"][-1] + 1) / 2,
        "calls": statistics.mean(found["calls_per_response"][WARM_UP:]),
        "tokens": statistics.mean(found["tokens_per_response"][WARM_UP:]),
    }


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="the quickstart's model (default: %(default)s)")
    parser.add_argument("--run", type=Path, help="a quickstart (default: outputs/quickstart, small: outputs/small)")
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL (default: one is installed)")
    parser.add_argument("--out", type=Path, default=FOLDER / "runs")
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
    if not is_cpu_only():
        parser.error(
            "TRL runs on the CPU, but our side would use the GPU that this torch is for. Set up a clone with "
            "RETOOL_HARDWARE=cpu."
        )
    if not args.trl_python:
        install_trl()
    make_sft(args.run, args.model)
    folder = new_folder(args.out)

    rows: dict[tuple[float, str], list[dict[str, float]]] = {}
    with Supervisor() as supervisor, running_server(options=SANDBOX_OPTIONS) as url:
        for latency_s in args.latencies:

            def hold_back(_: str, seconds: float = latency_s) -> None:
                time.sleep(seconds)

            with proxied(url, hold_back) if latency_s else nullcontext(url) as sandbox:
                for number in range(args.rounds):
                    for name in args.trainers:
                        print(f"== {name}, sandbox calls + {1000 * latency_s:g} ms, round {number + 1}", flush=True)
                        out = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{latency_s:g}s_{number}"
                        out.mkdir(parents=True)
                        common = (supervisor, args.run, sandbox, args.steps, out)
                        if name == "TRL":
                            figures = run_trl(*common, args.trl_python or TRL_PYTHON, args.model)
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
    head = ("sandbox call", "trainer", *COLUMNS)
    cells = [
        [f"+ {1000 * latency_s:g} ms", name, *(form.format(row[key]) for key, form in COLUMNS.values())]
        for (latency_s, name), row in means.items()
    ]
    print(markdown(head, cells))
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
