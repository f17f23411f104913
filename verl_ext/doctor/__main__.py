"""The command line of the doctor."""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.doctor import checks, config, memory
from verl_ext.doctor.finding import Finding, Level
from verl_ext.doctor.run import Run
from verl_ext.doctor.schema import required_keys
from verl_ext.settings import CONFIGS, START, compose_run


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, or 1 if a finding is a FAIL."""
    args = _parse(argv)
    started = time.monotonic()
    findings = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json and (finding.level != Level.OK or not args.quick or args.simulate):
            print(finding, flush=True)
    counts = {level.value: sum(finding.level == level for finding in findings) for level in Level}
    if args.json:
        report = {"config": args.config_name, "counts": counts, "findings": list(map(asdict, findings))}
        print(json.dumps(report, indent=1))
    else:
        part = "quick checks" if args.quick else "checks"
        summary = ", ".join(f"{number} {level}" for level, number in counts.items())
        print(f"doctor: {args.config_name}, {part}: {summary} ({time.monotonic() - started:.1f} s)")
    return 1 if counts[Level.FAIL] else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Yield all findings as they come."""
    folder = args.config_dir.resolve()
    try:
        composed = compose_run(args.config_name, args.overrides, folder=folder)
        _use_sandboxes_of_launcher(composed, args.overrides)
        required = required_keys(args.config_name, folder)
    except (HydraException, OmegaConfBaseException, OSError, KeyError) as error:
        yield replace(config.explain(error, args.config_name, folder), topic="config")
        return
    run = Run(args.config_name, composed, required, args.nnodes, args.nproc_per_node, START.resolve())
    exam = checks.Examination(run, args.quick, args.gpu_gib, args.load_seconds)
    yield from checks.examine(exam)
    if args.simulate:
        yield from checks.look(exam, "memory", lambda: memory.check_simulation(run))


def _use_sandboxes_of_launcher(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Put the servers that SANDBOX_URL names in place of the YAML's, as the launchers do."""
    urls = os.environ.get("SANDBOX_URL")
    is_given = any("retool.sandbox.urls" in each for each in overrides)
    if urls and not is_given and OmegaConf.select(composed, "retool.sandbox.urls") is not None:  # SFT has none
        composed.retool.sandbox.urls = urls.split(",")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="retool doctor",
        description="Check a run before it starts. The exit status is 1 if something would stop or spoil it (FAIL).",
    )
    parser.add_argument("--config-name", required=True, help="a YAML of configs/, without suffix: qwen2-32b_dapo")
    parser.add_argument("--config-dir", type=Path, default=CONFIGS, help="folder of the YAML; default: configs/")
    parser.add_argument("--quick", action="store_true", help="only the cheap checks; prints only WARN and FAIL")
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON object")
    parser.add_argument("--nnodes", type=int, help="nodes of an SFT run, as for torchrun; an RL YAML has them")
    parser.add_argument("--nproc-per-node", type=int, help="GPUs per node of an SFT run, as for torchrun")
    parser.add_argument("--gpu-gib", type=float, help="estimate for GPUs with this memory, not for this machine's")
    parser.add_argument("--simulate", action="store_true", help="also count the memory of a simulated training step")
    parser.add_argument("--load-seconds", type=float, default=5.0, help="length of the sandbox's load test; default: 5")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for the launcher")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if "--quick" in sys.argv:  # the process is separate and short-lived: both save a tenth of the time
        gc.disable()
        yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # OmegaConf builds its loader on it
    sys.exit(main())
