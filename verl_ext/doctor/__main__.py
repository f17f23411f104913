"""The command line of the doctor."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl_ext.doctor import batch, checkpoints, config, data, machine, memory, names, sandbox, values, versions
from verl_ext.doctor.finding import Finding, Level, fail, warn
from verl_ext.doctor.run import Run
from verl_ext.doctor.schema import required_keys
from verl_ext.runs.machine import Machine
from verl_ext.settings import CONFIGS, REPO, compose_run

Check = Callable[[], Iterable[Finding]]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where a finding is a FAIL."""
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
    """All findings, as they come."""
    folder = args.config_dir.resolve()
    try:
        composed = compose_run(args.config_name, args.overrides, folder=folder)
        required = required_keys(args.config_name, folder)
    except (HydraException, OmegaConfBaseException, OSError, KeyError) as error:
        yield replace(config.explain(error, args.config_name, folder), topic="config")
        return
    run = Run(args.config_name, composed, required, args.nnodes, args.nproc_per_node, REPO)
    failed: set[str] = set()  # topics

    def look(topic: str, check: Check) -> Iterator[Finding]:
        """The findings of a check; one that breaks is a finding, too, and stops no run.

        Where a setting is a FAIL already, such as a text for a number, a check that breaks on it says nothing.
        """
        is_told = bool(failed & {"config", "values"})
        try:
            for finding in check():
                if finding.level == Level.FAIL:
                    is_told = True
                    failed.add(topic)
                yield replace(finding, topic=topic)
        except Exception as error:
            if not is_told:
                text = f"a check broke: {type(error).__name__}: {error} -> Report it: this is a bug of verl_ext.doctor."
                yield replace(warn(text), topic=topic)

    here: list[Machine] = []
    yield from look("machine", lambda: here.append(Machine.here()) or ())
    quick: list[tuple[str, Check]] = [
        ("versions", lambda: versions.check_versions(run)),
        ("versions", lambda: versions.check_external_modules(dict(os.environ))),
        ("config", lambda: config.check_config(run)),
        ("names", lambda: names.check_names(run)),
        ("values", lambda: values.check_values(run)),
        ("batch", lambda: batch.check_batch(run)),
        ("time-outs", lambda: sandbox.check_timeouts(run)),
        ("machine", lambda: machine.check_gpus(run, here[0])),
        ("machine", lambda: machine.check_limits(run, here[0])),
        ("machine", lambda: machine.check_ray(run, here[0])),
        ("data", lambda: data.check_files(run)),
        ("data", lambda: data.check_agent_names(run)),
        ("data", lambda: data.check_protocol(run)),
        ("memory", lambda: memory.check_memory(run, here[0], args.gpu_gib)),
        ("checkpoints", lambda: checkpoints.check_steps(run)),
        ("checkpoints", lambda: checkpoints.check_disk(run)),
        ("checkpoints", lambda: checkpoints.check_resume(run)),
        ("sandbox", lambda: sandbox.check_reachable(run)),
    ]
    for topic, check in quick:
        if here or topic not in ("machine", "memory"):
            yield from look(topic, check)
    if args.simulate:
        yield from look("memory", lambda: memory.check_simulation(run))
    if args.quick:
        return
    yield from look("config", lambda: config.check_reward(run))
    from verl_ext.doctor import template  # imports verl

    try:
        tokenizer = template.load_tokenizer(run)
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        text = f"""no tokenizer at {run.model_path}: {why}
            -> Set MODEL_PATH of the launcher to a model folder; tokenizer, template and data were not checked."""
        yield replace(fail(text), topic="template")
    else:
        yield from look("template", lambda: template.check_tokenizer(run, tokenizer))
        if "template" not in failed:  # the others build on it
            yield from look("template", lambda: template.check_agreement(run, tokenizer))
            yield from look("data", lambda: data.check_rows(run, tokenizer))
    if "sandbox" not in failed:
        yield from look("sandbox", lambda: sandbox.check_load(run, seconds=args.load_seconds))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.doctor",
        description="Check a run before it starts. Exit status 1 where something would stop it or spoil it (FAIL).",
    )
    parser.add_argument("--config-name", required=True, help="a YAML of configs/, without suffix: qwen2-32b_dapo")
    parser.add_argument("--config-dir", type=Path, default=CONFIGS)
    parser.add_argument("--quick", action="store_true", help="settings, files and machine; prints WARN and FAIL")
    parser.add_argument("--json", action="store_true", help="print all findings as one JSON object")
    parser.add_argument("--nnodes", type=int, help="of an SFT run, as for torchrun; RL has it in its YAML")
    parser.add_argument("--nproc-per-node", type=int, help="GPUs of a node of an SFT run, as for torchrun")
    parser.add_argument("--gpu-gib", type=float, help="estimate for GPUs of so much memory, not for this machine's")
    parser.add_argument("--simulate", action="store_true", help="count a training step's memory, beside the estimate")
    parser.add_argument("--load-seconds", type=float, default=5.0, help="of the sandbox's load test; default: 5")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for the launcher")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
