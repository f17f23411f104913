"""Run the stages, or some of them, and write the table of what was expected and seen. scripts/gpu_acceptance.sh."""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def parse(argv: list[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_acceptance.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in small, what a CPU can do")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="of scripts/gpu_wheels.py, where no index answers"
    )
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "gpu_acceptance", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=30, help="for all stages together (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only say what there is, what it needs and what is missing")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in names]:
        parser.error(f"no such stage: {', '.join(unknown)}. There are {', '.join(names)}")
    return args


def main(argv: list[str] | None = None) -> int:
    from tests.gpu.stage import Context, Result, Stage, missing, run_stage, summary, table, write_report
    from tests.gpu.stages import STAGES

    args = parse(argv, [stage.name for stage in STAGES])
    chosen: list[Stage] = [stage for stage in STAGES if not args.stages or stage.name in args.stages]
    out = args.out.resolve()
    site = prepare(out, args.wheels)
    if args.list:
        for stage in chosen:
            lacking = ", ".join(missing(stage.packages)) or "ready"
            print(f"{stage.name:12} {stage.about}; at most {stage.limit_s} s; {lacking}")
        return 0
    for name in ("torch", "transformers"):  # once, for all stages, which are forked from here
        if not missing((name,)):
            __import__(name)
    context = Context(args.device, out, site, args.wheels.resolve() if args.wheels else None)
    results, start = [], time.monotonic()
    for stage in chosen:
        print(f"== {stage.name}: {stage.about}", flush=True)
        left = int(args.minutes * 60 - (time.monotonic() - start))
        if left <= 0:
            results.append(Result(stage.name, not_run=f"{args.minutes:g} minutes were over; run it alone"))
        else:
            stage = replace(stage, limit_s=min(stage.limit_s, left))
            results.append(run_stage(stage, context, show=lambda row: print("  ", table_line(row), flush=True)))
        result = results[-1]
        print(
            f"   {result.not_run and f'not run: {result.not_run}' or result.error or f'{result.seconds:.0f} s'}",
            flush=True,
        )
        write_report(results, out, head(args.device))
    print(f"\n{table(results)}\n\n{summary(results)}\n{out / 'acceptance.md'}")
    return 0 if any(each.passed for each in results) and all(each.passed or each.not_run for each in results) else 1


def prepare(out: Path, wheels: Path | None) -> Path:
    """The folder `site` in `out`, on sys.path here and in what the stages start; the wheels are installed into it."""
    site = out / "site"
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))
    for name, paths in {"PYTHONPATH": (site, REPO), "PATH": (site / "bin", Path(sys.executable).parent)}.items():
        os.environ[name] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get(name)])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "VERL_USE_EXTERNAL_MODULES": "verl_ext"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # torch asks NVML then, and not CUDA, which no fork of a process that has asked it can use; vLLM starts anew, too
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if wheels:  # exit 1: some are missing, as it says; the stages then say which of them they need
        command = [sys.executable, str(REPO / "scripts" / "gpu_wheels.py"), "install", str(wheels), str(site)]
        subprocess.run(command)
    return site


def table_line(row) -> str:
    expected = f" (expected {row.expected})" if row.expected else ""
    return f"{'NOT OK  ' if row.ok is False else ''}{row.what}: {row.seen}{expected}"


def head(device: str) -> str:
    python = f"Python {sys.version.split()[0]}"
    return f"`bash scripts/gpu_acceptance.sh --device {device}`, {python}, {time.strftime('%Y-%m-%d')}"


if __name__ == "__main__":
    sys.exit(main())
