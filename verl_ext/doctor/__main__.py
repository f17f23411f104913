"""The command line of the doctor."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl_ext.doctor import (
    batch,
    checkpoints,
    config,
    data,
    machine,
    memory,
    names,
    sandbox,
    timeouts,
    values,
    versions,
)
from verl_ext.doctor.finding import Finding, Level, Topic
from verl_ext.doctor.run import Run
from verl_ext.doctor.schema import required_keys
from verl_ext.settings import CONFIGS, REPO, compose_run

Check = Callable[[], Iterable[Finding]]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where a finding is a FAIL."""
    args = _parse(argv)
    started = time.monotonic()
    findings = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json and (finding.level != Level.OK or not args.quick):
            print(finding, flush=True)
    counts = {level.value: sum(finding.level == level for finding in findings) for level in Level}
    if args.json:
        print(
            json.dumps(
                {"config": args.config_name, "counts": counts, "findings": list(map(asdict, findings))}, indent=1
            )
        )
    else:
        part = "quick checks" if args.quick else "checks"
        summary = ", ".join(f"{number} {level}" for level, number in counts.items())
        print(f"doctor: {args.config_name}, {part}: {summary} ({time.monotonic() - started:.1f} s)")
    return 1 if counts[Level.FAIL] else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, as they come."""
    folder = args.config_dir.resolve()
    try:
        composed = compose_run(args.config_name, args.overrides, folder=folder)
        required = required_keys(args.config_name, folder)
    except (HydraException, OmegaConfBaseException, OSError, KeyError) as error:
        yield config.explain(error, args.config_name, folder)
        return
    run = Run(args.config_name, composed, required, args.nnodes, args.nproc_per_node, REPO)
    try:
        here = machine.Machine.here()
    except Exception as error:
        here = None
        yield _broken(machine.topic, error)
    quick: list[tuple[Topic, Check]] = [
        (versions.topic, versions.check_versions),
        (versions.topic, lambda: versions.check_external_modules(dict(os.environ))),
        (config.topic, lambda: config.check_config(run)),
        (names.topic, lambda: names.check_names(run)),
        (values.topic, lambda: values.check_values(run)),
        (batch.topic, lambda: batch.check_batch(run)),
        (timeouts.topic, lambda: timeouts.check_timeouts(run)),
        (machine.topic, lambda: machine.check_gpus(run, here)),
        (machine.topic, lambda: machine.check_limits(run, here)),
        (machine.topic, lambda: machine.check_ray(run, here)),
        (data.topic, lambda: data.check_files(run)),
        (data.topic, lambda: data.check_agent_names(run)),
        (data.topic, lambda: data.check_protocol(run)),
        (memory.topic, lambda: memory.check_memory(run, here, args.gpu_gib)),
        (checkpoints.topic, lambda: checkpoints.check_steps(run)),
        (checkpoints.topic, lambda: checkpoints.check_disk(run)),
        (checkpoints.topic, lambda: checkpoints.check_resume(run)),
        (sandbox.topic, lambda: sandbox.check_reachable(run)),
    ]
    reachable = sound = True
    for topic, check in quick:
        if here is None and topic in (machine.topic, memory.topic):
            continue
        for finding in _guarded(topic, check, quiet=not sound):
            reachable &= not (topic is sandbox.topic and finding.level == Level.FAIL)
            sound &= not (topic in (config.topic, values.topic) and finding.level == Level.FAIL)
            yield finding
    if args.quick:
        return
    yield from _guarded(config.topic, lambda: config.check_reward(run))
    yield from _thorough(run)
    if reachable:
        yield from _guarded(sandbox.topic, lambda: sandbox.check_load(run, seconds=args.load_seconds))


def _thorough(run: Run) -> Iterator[Finding]:
    """What needs the tokenizer."""
    from verl_ext.doctor import template

    try:
        tokenizer = template.load_tokenizer(run)
    except (OSError, ValueError, TypeError, KeyError) as error:
        yield template.topic.fail(
            f"no tokenizer at {run.model_path}: {(str(error) or type(error).__name__).splitlines()[0]}",
            "Set MODEL_PATH of the launcher to a model folder; tokenizer, template and data were not checked.",
        )
        return
    for topic, check in (
        (template.topic, template.check_tokenizer),
        (template.topic, template.check_agreement),
        (data.topic, data.check_rows),
    ):
        failed = False
        for finding in _guarded(topic, lambda check=check: check(run, tokenizer)):
            failed |= finding.level == Level.FAIL
            yield finding
        if failed and check is template.check_tokenizer:  # the others build on it
            return


def _guarded(topic: Topic, check: Check, *, quiet: bool = False) -> Iterator[Finding]:
    """The findings of a check; one that breaks is a finding, too, and stops no run.

    Args:
        quiet: a setting is a FAIL already, such as a text for a number: a check that breaks on it says nothing.
    """
    try:
        for finding in check():
            quiet |= finding.level == Level.FAIL
            yield finding
    except Exception as error:
        if not quiet:
            yield _broken(topic, error)


def _broken(topic: Topic, error: Exception) -> Finding:
    return topic.warn(f"a check broke: {type(error).__name__}: {error}", "Report it: this is a bug of verl_ext.doctor.")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.doctor",
        description="Check a run before it starts. Exit status 1 where something would stop it or spoil it (FAIL).",
    )
    parser.add_argument("--config-name", required=True, help="a YAML of configs/, without suffix: qwen2-32b_dapo")
    parser.add_argument("--config-dir", type=Path, default=CONFIGS)
    parser.add_argument("--quick", action="store_true", help="settings and files only; prints WARN and FAIL")
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON object")
    parser.add_argument("--nnodes", type=int, help="of an SFT run, as for torchrun; RL has it in its YAML")
    parser.add_argument("--nproc-per-node", type=int, help="GPUs of a node of an SFT run, as for torchrun")
    parser.add_argument("--gpu-gib", type=float, help="estimate for GPUs of so much memory, not for this machine's")
    parser.add_argument("--load-seconds", type=float, default=5.0, help="of the sandbox's load test; default: 5")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for the launcher")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
