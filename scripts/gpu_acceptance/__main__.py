"""Run the stages, or some of them, and print the table of what was expected and seen: scripts/gpu_acceptance.sh.

acceptance.md in --out gets the table of this call below those of earlier ones. The exit status is 0 if every chosen
stage passed, 1 if one failed, 3 if none failed and some did not run (the table says why), and 2 for a wrong option.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from scripts.gpu_acceptance import attention, fleet, learning, machine, runs, sharing, training, weights
from scripts.gpu_acceptance.stage import Context, Result, Row, Stage, missing, run_stage

REPO = Path(__file__).resolve().parents[2]
TORCH = ("torch", "transformers", "psutil", "packaging")
VERL = (
    *TORCH,
    "verl==0.9.1",
    "transformers<5.11",
    "ray",
    "tensordict",
    "hydra-core",
    "wrapt",
    "pyzmq",
    "TransferQueue",
)
RUN = (*VERL, "datasets", "pyarrow", "pandas", "accelerate")
RL = (*RUN, "vllm", "aiohttp", "pydantic", "math-verify")

STAGES = [  # in the order in which they run: those on torch alone first
    Stage("machine", "driver, versions, compiler, arithmetic", TORCH, machine.check_machine, limit_s=60),
    Stage("log_probs", "bf16 against fp32, GPU against CPU", TORCH, attention.check_log_probs, limit_s=120),
    Stage("weights", "3 GB to another process", TORCH, weights.check_weights, limit_s=180),
    Stage("actor_step", "a training step of the 4B: memory", TORCH, training.check_actor_step, limit_s=240),
    Stage("packing", "packed sequences against separate ones", TORCH, attention.check_packing, limit_s=60),
    Stage("sharing", "a group's prompt computed once: gradient, time", TORCH, sharing.check_sharing, limit_s=180),
    Stage("buckets", "3 GB by verl's own transfer", VERL, weights.check_buckets, limit_s=240),
    Stage("sft", "SFT: killed, resumed, merged, against a CPU's losses", RUN, runs.check_sft),
    Stage("rl", "three steps of RL with vLLM and tool calls", RL, runs.check_rl),
    Stage("small", "the small model: SFT and steps of RL", RL, runs.check_small),
    Stage("learning", "RL of the small model until its accuracy rises", RL, learning.check_learning, limit_s=420),
    Stage("separate", "steps of RL, hardware=gpu_separate", RL, learning.check_separate, limit_s=180),
    Stage("peak", "a step of RL: memory against the doctor", RL, learning.check_peak, limit_s=180),
    Stage("sleep", "vLLM gives memory back", RL, runs.check_sleep, limit_s=240, cuda_only=True),
    Stage("fleet", "weights that change in flight, an engine that dies", RL, fleet.check_fleet),
    Stage("evaluation", "evaluation with vLLM in its process", RL, runs.check_evaluation, limit_s=300),
]
SIGNS = {True: "ok", False: "**NOT OK**", None: ""}


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="gpu_acceptance.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; default: all")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in small, what a CPU can do")
    add("--out", type=Path, default=REPO / "outputs" / "gpu_acceptance", help="default: %(default)s")
    add("--minutes", type=float, default=30, help="for all stages together (default: %(default)s)")
    add("--list", action="store_true", help="only say what there is and what it lacks here")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in names]:
        parser.error(f"no such stage: {', '.join(unknown)}. There are {', '.join(names)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    chosen = [stage for stage in STAGES if not args.stages or stage.name in args.stages]
    if args.list:
        for stage in chosen:
            lacking = ", ".join(missing(stage.packages)) or "ready"
            print(f"{stage.name:12} {stage.about}; at most {stage.limit_s} s; {lacking}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stage that continues alone holds the GPU
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    set_environment(args.device)
    for name in ("torch", "transformers"):  # once, for all stages, which are forked from here
        if not missing((name,)) and any(name in stage.packages for stage in chosen):
            __import__(name)
    results, start = [], time.monotonic()
    try:
        for stage in chosen:
            results.append(run_next(stage, Context(args.device, out), args.minutes * 60 - (time.monotonic() - start)))
    finally:  # also when the command is interrupted
        written = f"{table(results)}\n\n{summary(results)}\n"
        with open(out / "acceptance.md", "a") as file:
            file.write(f"## {seen_at()}, {args.device}\n\n{written}\n")
        print(f"\n{written}{out / 'acceptance.md'}")
    return exit_status(results)


def run_next(stage: Stage, context: Context, left_s: float) -> Result:
    print(f"== {stage.name}: {stage.about}", flush=True)
    if left_s <= 0:
        result = Result(stage.name, not_run="the minutes of the command were over; run it alone")
    else:
        stage = replace(stage, limit_s=min(stage.limit_s, left_s))
        result = run_stage(stage, context, show=lambda row: print("  ", line_of(row), flush=True))
    print(
        f"   {(result.not_run and f'not run: {result.not_run}') or result.error or f'{result.seconds:.0f} s'}",
        flush=True,
    )
    return result


def set_environment(device: str) -> None:
    """Set what the stages and the commands that they start need; Python's programs come first on PATH."""
    for name, path in {"PYTHONPATH": REPO, "PATH": Path(sys.executable).parent}.items():
        os.environ[name] = os.pathsep.join([str(path), *filter(None, [os.environ.get(name)])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "VERL_USE_EXTERNAL_MODULES": "verl_ext"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # torch then asks NVML, and not CUDA: no fork of a process that has asked CUDA can use it. vLLM starts anew.
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # small sums, and processes that outnumber cores


def exit_status(results: list[Result]) -> int:
    if any(not each.passed and not each.not_run for each in results):
        return 1
    return 0 if results and all(each.passed for each in results) else 3


def line_of(row: Row) -> str:
    expected = f" (expected {row.expected})" if row.expected else ""
    return f"{'NOT OK  ' if row.ok is False else ''}{row.what}: {row.seen}{expected}"


def cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def table(results: list[Result]) -> str:
    """Return Markdown: a line for each row, and for each stage that did not run or broke off."""
    lines = ["| stage | what | expected | seen | |", "|---|---|---|---|---|"]
    for result in results:
        lines += [cells(result.name, row.what, row.expected, row.seen, SIGNS[row.ok]) for row in result.rows]
        if result.not_run:
            lines.append(cells(result.name, "not run", "", result.not_run, ""))
        if result.error:
            lines.append(cells(result.name, "broke off", "", result.error, SIGNS[False]))
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    counts = {
        "passed": [each.name for each in results if each.passed],
        "failed": [each.name for each in results if not each.passed and not each.not_run],
        "not run": [each.name for each in results if each.not_run],
    }
    return ", ".join(f"{len(names)} {what}" + f" ({', '.join(names)})" * bool(names) for what, names in counts.items())


def seen_at() -> str:
    """Return date, commit and Python; `-dirty`: files differ from the commit."""
    commit = ""
    if shutil.which("git"):
        command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit or 'unknown'}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
