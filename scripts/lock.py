#!/usr/bin/env python3
"""Write requirements/cpu.txt or gpu.txt, which scripts/setup_env.sh installs: every package, its version and hashes.

    .venv/bin/python scripts/lock.py cpu
    .venv/bin/python scripts/lock.py gpu --upgrade-package vllm

`uv` resolves pyproject.toml for Linux x86-64 and all Pythons, from metadata only; it keeps the versions that the file
has, unless you name some to upgrade. Afterwards run `bash scripts/setup_env.sh` and the tests. torch's CPU build is not
on PyPI: UV_TORCH_BACKEND=cpu reads PyTorch's own index, UV_FIND_LINKS a folder with the wheel.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What all lines share, by the environments of pyproject.toml.
HERE = " ; python_full_version < '3.14' and platform_machine == 'x86_64' and sys_platform == 'linux' \\\n"
EXTRAS = {"cpu": ("cpu", "test", "docs"), "gpu": ("gpu", "test")}  # the site is built where CI runs
HEADERS = {
    "cpu": """\
# Every package of the CPU stack. scripts/lock.py writes this file, and scripts/setup_env.sh installs it. By hand:
#   pip install --no-deps torch=={torch} --index-url https://download.pytorch.org/whl/cpu
#   grep -v '^torch==' requirements/cpu.txt | pip install --no-deps -r /dev/stdin
# --no-deps matters: resolving would replace torch's CPU build by gigabytes of CUDA packages. torch has no hash here,
# because builds of the same name differ between indexes. What is left out on purpose: cpu_excludes.txt.
""",
    "gpu": """\
# Every package of the GPU stack: verl 0.9.1's own matrix (torch, vllm, transformers, flash-attn), and what it needs.
# scripts/lock.py writes this file, and scripts/setup_env.sh installs it. flash-attn has no wheel on PyPI: it is
# compiled, which needs nvcc of CUDA 13. GPU runs: docs/evidence/gpu.md
""",
}


def resolve(hardware: str, out: Path, arguments: list[str]) -> None:
    """Let uv write its lock to `out`, which may have versions to keep.

    Raises:
        subprocess.CalledProcessError: uv found no consistent set; its message is on the console.
    """
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    command = [uv, "pip", "compile", "pyproject.toml", "--output-file", out, "--quiet"]
    command += [f"--extra={extra}" for extra in EXTRAS[hardware]]
    command += ["--universal", "--python-version=3.11", "--generate-hashes", "--annotation-style=line", "--no-header"]
    if hardware == "cpu":
        command.append("--excludes=requirements/cpu_excludes.txt")
    subprocess.run([*command, *arguments], cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", choices=["cpu", "gpu"])
    parser.add_argument("--upgrade-package", action="append", default=[], metavar="NAME", help="may be repeated")
    args = parser.parse_args()
    path = ROOT / "requirements" / f"{args.hardware}.txt"
    resolve(args.hardware, path, [f"--upgrade-package={name}" for name in args.upgrade_package])
    text = path.read_text().replace(HERE, " \\\n")
    torch = re.search(r"^torch==(\S+)", text, re.MULTILINE)[1]
    if args.hardware == "cpu":
        text = re.sub(r"^(torch==\S+)( \\\n +--hash=\S+)+", r"\1", text, flags=re.MULTILINE)
    path.write_text(HEADERS[args.hardware].format(torch=torch) + text)
    print(f"{path.relative_to(ROOT)}: {len(re.findall(r'^[a-zA-Z]', text, re.MULTILINE))} packages")


if __name__ == "__main__":
    main()
