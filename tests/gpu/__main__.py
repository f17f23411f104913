"""Run the stages, or some of them, and write the table of what was expected and seen. scripts/gpu_acceptance.sh.

acceptance.md in --out keeps the rows of earlier runs: a new result of a stage replaces its earlier result of equal
options. The exit status is 0 if every chosen stage passed, 1 if one failed, 3 if none failed and some did not run (the
table says why), and 2 for a wrong option.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
OPTIONS = {  # -> the stages that look at it
    "shape": ("sft_step", "actor_step"),
    "tokens": ("sft_step", "actor_step"),
    "no_checkpointing": ("sft_step", "actor_step"),
    "keep_logits": ("sft_step", "actor_step"),
    "run": ("evaluation",),
}


def parse(argv: list[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_acceptance.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; default: all")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in small, what a CPU can do")
    add("--wheels", type=Path, metavar="FOLDER", help="of scripts/gpu_wheels.py, where no index answers")
    add("--out", type=Path, default=REPO / "outputs" / "gpu_acceptance", help="default: %(default)s")
    add("--minutes", type=float, default=30, help="for all stages together (default: %(default)s)")
    add("--list", action="store_true", help="only say what there is, what it needs and what is missing")
    add = parser.add_argument_group("of sft_step and actor_step").add_argument
    add("--shape", default="", metavar="MODEL", help="a folder with config.json, or Qwen/Qwen3-0.6B; default: the 4B")
    add("--tokens", type=int, default=0, metavar="N", help="of a micro-batch; default: 10240, and 128 on a CPU")
    add("--no-checkpointing", action="store_true", help="without gradient checkpointing")
    add("--keep-logits", action="store_true", help="beside their gradient, as in the rows of docs/evidence/gpu.md")
    add = parser.add_argument_group("of evaluation").add_argument
    run = (
        "an SFT or RL run of the tiny task (outputs/quickstart); default: the model of the stage rl, else a random one"
    )
    add("--run", type=Path, metavar="FOLDER", help=run)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in names]:
        parser.error(f"no such stage: {', '.join(unknown)}. There are {', '.join(names)}")
    for option, stages in OPTIONS.items():
        if getattr(args, option) and not (args.stages and {*args.stages} <= {*stages}):
            parser.error(f"--{option.replace('_', '-')} is an option of {' and '.join(stages)}; name no other stage")
    if args.tokens < 0:
        parser.error(f"--tokens is {args.tokens}: expected at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    from tests.gpu.report import exit_status, read_results, record, seen_at, summary, table
    from tests.gpu.stage import Context, Result, Stage, missing, run_stage
    from tests.gpu.stages import STAGES

    names = [stage.name for stage in STAGES]
    args = parse(argv, names)
    chosen: list[Stage] = [stage for stage in STAGES if not args.stages or stage.name in args.stages]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a stage that goes on alone holds the GPU
    out = args.out.resolve()
    site = prepare(out, args.wheels)
    if args.list:
        for stage in chosen:
            lacking = ", ".join(missing(stage.packages)) or "ready"
            print(f"{stage.name:12} {stage.about}; at most {stage.limit_s} s; {lacking}")
        return 0
    if args.device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # small sums, and processes that outnumber cores
    read_results(out)  # says so now, and not after the first stage, if it cannot be read
    for name in ("torch", "transformers"):  # once, for all stages, which are forked from here
        if not missing((name,)) and any(name in stage.packages for stage in chosen):
            __import__(name)
    context = Context(
        args.device,
        out,
        site,
        wheels=args.wheels and args.wheels.resolve(),
        shape=args.shape,
        tokens=args.tokens,
        checkpointing=not args.no_checkpointing,
        keep_logits=args.keep_logits,
        run=args.run and args.run.resolve(),
    )
    options, at = written(args), seen_at()
    results, start = [], time.monotonic()
    for stage in chosen:
        print(f"== {stage.name}: {stage.about}", flush=True)
        left = int(args.minutes * 60 - (time.monotonic() - start))
        if left <= 0:
            result = Result(stage.name, not_run=f"{args.minutes:g} minutes were over; run it alone")
        else:
            stage = replace(stage, limit_s=min(stage.limit_s, left))
            result = run_stage(stage, context, show=lambda row: print("  ", table_line(row), flush=True))
        results.append(replace(result, options=options, at=at))
        print(
            f"   {result.not_run and f'not run: {result.not_run}' or result.error or f'{result.seconds:.0f} s'}",
            flush=True,
        )
        record(results[-1], out, names)
    print(f"\n{table(results)}\n\n{summary(results)}\n{out / 'acceptance.md'}")
    return exit_status(results)


def written(args: argparse.Namespace) -> str:
    """The options that change what a stage sees, as they are typed."""
    words = ["--device cpu"] if args.device == "cpu" else []
    for option in OPTIONS:
        if value := getattr(args, option):
            words.append(f"--{option.replace('_', '-')}" + f" {value}" * (value is not True))
    return " ".join(words)


def prepare(out: Path, wheels: Path | None) -> Path:
    """The folder `site` in `out`, on sys.path here and in what the stages start; the wheels are installed into it.

    Raises:
        SystemExit: the wheels could not be installed, as scripts/gpu_wheels.py says above.
    """
    site = out / "site"
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))
    for name, paths in {"PYTHONPATH": (site, REPO), "PATH": (site / "bin", Path(sys.executable).parent)}.items():
        os.environ[name] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "VERL_USE_EXTERNAL_MODULES": "verl_ext"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # torch asks NVML then, and not CUDA, which no fork of a process that has asked it can use (tests/conftest.py has
    # it, too: pytest imports verl before it comes here); vLLM starts anew
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if wheels:
        command = [sys.executable, str(REPO / "scripts" / "gpu_wheels.py"), "install", str(wheels), str(site)]
        status = subprocess.run(command).returncode
        if status not in (0, 3):  # 3: some are missing, as it says; the stages then say which of them they need
            raise SystemExit(f"gpu_acceptance: the wheels of {wheels} were not installed (exit status {status})")
    return site


def table_line(row) -> str:
    expected = f" (expected {row.expected})" if row.expected else ""
    return f"{'NOT OK  ' if row.ok is False else ''}{row.what}: {row.seen}{expected}"


if __name__ == "__main__":
    sys.exit(main())
