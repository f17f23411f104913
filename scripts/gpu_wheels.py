#!/usr/bin/env python3
"""Carry the packages of requirements/gpu.txt as files to a machine that reaches no package index.

    python scripts/gpu_wheels.py make --out wheels [--python 3.12] [--only 'verl' 'ray'] [--skip 'torch' 'nvidia-*']
    python scripts/gpu_wheels.py check wheels         list what of the lock is neither installed nor in the folder
    python scripts/gpu_wheels.py install wheels SITE  install what is missing here into the folder SITE (pip --target)

`make` needs an index and no GPU. It writes parts of at most 60 MiB, `wheels/part-01` and so on, small packages first,
each with the checksums of all: a larger wheel is cut into pieces, which `install` joins and checks. The parts can
therefore be sent one by one. They appear when all are whole; the same command continues an interrupted `make`.

flash-attn has no wheel: its source archive is sent, which takes half an hour to build. Build a wheel from it once, and
put it into the folder as `flash_attn-*.whl`: the stage `flash_attn` of scripts/gpu_acceptance.sh installs that. The
setup.py of flash-attn imports torch, both when pip fetches the archive and when it is built: `make` without torch needs
`--skip flash-attn`.
`check` and `install` need only pip and the standard library, and the Python version given to `make`.
Their exit status is 0 if nothing is missing, 3 if something is, and 1 if they could not do their work.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "gpu.txt"
PART_MIB = 60
MANIFEST = "wheels.json"
MISSING = 3  # exit status
WHOLE, UNFINISHED = "whole", "unfinished"  # folders of `make`: what was fetched, and its parts until all are there
SOURCE_ONLY = "flash-attn"
# The numbers that the lock's wheels carry, because pip matches them exactly
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)), "manylinux2014_x86_64"]
PLATFORMS += ["manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def running_python() -> str:
    return "{}.{}".format(*sys.version_info)


def read_pins(python: str) -> dict[str, str]:
    """Read canonical name -> version from the lock, for a Python such as "3.12" on Linux."""
    pins = {}
    for line in LOCK.read_text().splitlines():
        if found := re.match(r"([\w.-]+)==([^\s;]+)(?: ; python_version == \"([\d.]+)\")?", line):
            name, version, only = found.groups()
            if only in (None, python):
                pins[canonical(name)] = version
    return pins


def identity(file: str) -> tuple[str, str]:
    """Return (canonical name, public version) from the file name of a wheel or source archive."""
    name, version = re.match(r"(.+?)-([^-]+)(?:-.*\.whl|\.tar\.gz)$", file).groups()
    return canonical(name), version.split("+")[0]


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# make -----------------------------------------------------------------------------------------------------------------


def fetch(name: str, version: str, python: str, folder: Path) -> str:
    """Fetch one package into the folder; return "", or pip's last message if there is neither wheel nor archive."""
    pip = [sys.executable, "-m", "pip"]
    common = ["--quiet", "--no-deps", "--disable-pip-version-check", f"{name}=={version}"]
    wheel = ["download", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", f"--dest={folder}"]
    ways = [[*pip, *wheel, *(f"--platform={each}" for each in PLATFORMS), *common]]
    if name == SOURCE_ONLY:  # its setup.py asks for nvcc otherwise
        ways = [[*pip, "download", "--no-binary=:all:", "--no-build-isolation", f"--dest={folder}", *common]]
    else:
        ways.append([*pip, "wheel", f"--wheel-dir={folder}", *common])
    before, said = {*folder.iterdir()}, ""
    for command in ways:
        environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            built = next(iter({*folder.iterdir()} - before), None)
            if command[3] != "wheel" or built is None or built.name.endswith("-none-any.whl"):
                return ""
            built.unlink()
            return f"it depends on the version of Python and was built for this one ({built.name})"
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip failed")
    return said


def make(out: Path, python: str, only: list[str], skip: list[str], part_mib: float) -> int:
    pins = {
        name: version
        for name, version in read_pins(python).items()
        if any(fnmatch(name, pattern) for pattern in only or ["*"])
        and not any(fnmatch(name, pattern) for pattern in skip)
    }
    whole, failed = out / WHOLE, {}
    whole.mkdir(parents=True, exist_ok=True)
    there = {identity(path.name) for path in whole.iterdir()}
    for number, (name, version) in enumerate(sorted(pins.items()), 1):
        if (name, version) not in there and (why := fetch(name, version, python, whole)):
            failed[name] = why
        print(f"\r{number}/{len(pins)} {name:40.40}", end="" if sys.stdout.isatty() else "\n", flush=True)
    print()
    for name, why in failed.items():
        print(f"{name}=={pins[name]}: {why}")
    if failed:
        print(f"{len(failed)} of {len(pins)} failed. Run the same command again, or leave them out with --skip.")
        return 1
    parts = split(whole, out, int(part_mib * 2**20), python)
    print(f"{len(pins)} packages in {parts} parts of at most {part_mib:g} MiB")
    return 0


def split(whole: Path, out: Path, part_bytes: int, python: str) -> int:
    """Make `out/part-*` from the files in `whole`, small ones first, delete `whole`, and return the number of parts.

    Parts are written elsewhere and then renamed, and `whole` is deleted last: an interrupted split can be repeated.
    """
    room = part_bytes - 2**16  # what the checksums leave
    unfinished, files, number, free = out / UNFINISHED, {}, 0, 0
    for old in (unfinished, *out.glob("part-*")):  # of an interrupted call
        shutil.rmtree(old, ignore_errors=True)
    for path in sorted(whole.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        size = path.stat().st_size
        count = -(-size // room) if size > room else 0  # pieces
        pieces = [f"{path.name}.{each + 1:03}" for each in range(count)]
        files[path.name] = {"bytes": size, "sha256": sha256(path), "pieces": pieces}
        with open(path, "rb") as source:
            for name in pieces or [path.name]:
                content = source.read(room)
                if len(content) > free or not number:
                    number, free = number + 1, room
                    (unfinished / f"part-{number:02}").mkdir(parents=True)
                (unfinished / f"part-{number:02}" / name).write_bytes(content)
                free -= len(content)
    manifest = json.dumps({"python": python, "files": files}, indent=0)
    if len(manifest) > 2**16:
        raise SystemExit(f"gpu_wheels: the checksums take {len(manifest)} bytes; expected at most {2**16}")
    for part in sorted(unfinished.glob("part-*")):
        (part / MANIFEST).write_text(manifest)
        os.replace(part, out / part.name)
    shutil.rmtree(unfinished, ignore_errors=True)
    os.replace(whole, unfinished)  # while `whole` is there, it has all
    shutil.rmtree(unfinished)
    return number


# check, install -------------------------------------------------------------------------------------------------------


def available(folder: Path, joined: Path) -> Iterator[tuple[Path | None, str]]:
    """Yield (file, "") for each wheel or archive that is whole, and (None, what is wrong) for each that is not.

    Pieces are joined into the folder `joined`. A folder without checksums is taken as it is.

    Raises:
        SystemExit: the parts are for another Python, or of two calls of `make`.
    """
    there = {path.name: path for path in sorted(folder.rglob("*")) if path.is_file()}
    manifests = {path.read_text() for path in folder.rglob(MANIFEST)}
    if not manifests:
        yield from ((path, "") for name, path in there.items() if name.endswith((".whl", ".tar.gz")))
        return
    if len(manifests) > 1:
        raise SystemExit(f"gpu_wheels: {folder} has parts of {len(manifests)} calls of make; expected those of one")
    manifest, here = json.loads(manifests.pop()), running_python()
    if manifest["python"] != here:
        raise SystemExit(
            f"gpu_wheels: {folder} is for Python {manifest['python']}, but this is Python {here} ({sys.executable}). "
            f"Run it with python{manifest['python']}, or make the parts with --python {here}."
        )
    for name, entry in manifest["files"].items():
        lacking = [each for each in entry["pieces"] or [name] if each not in there]
        if lacking:
            yield None, f"{name}: {', '.join(lacking)} is not in {folder}"
            continue
        path = there.get(name)
        if entry["pieces"]:
            path = joined / name
            with open(path, "wb") as whole:
                for piece in entry["pieces"]:
                    whole.write(there[piece].read_bytes())
        if sha256(path) != entry["sha256"]:
            yield None, f"{name}: its checksum differs from that in {MANIFEST}; send its parts again"
        else:
            yield path, ""


def installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def install(folder: Path, site: Path | None) -> int:
    """Install what is not here in the lock's version; without `site` only say what is missing. Return 0 or MISSING.

    Raises:
        SystemExit: pip failed, as it says above.
    """
    pins = read_pins(running_python())
    wanted = {name for name, version in pins.items() if installed_version(name) != version.split("+")[0]}
    with tempfile.TemporaryDirectory(dir=site and site.parent) as joined:
        wheels, archives = {}, set()
        for path, problem in available(folder, Path(joined)):
            if path is None:
                print(f"wheels: {problem}")
            elif path.suffix == ".whl":
                wheels[identity(path.name)[0]] = path
            else:
                archives.add(identity(path.name)[0])
        chosen = sorted(wanted & wheels.keys())
        if site and chosen:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            command += ["--disable-pip-version-check", "--root-user-action=ignore", "--upgrade", f"--target={site}"]
            if status := subprocess.run([*command, *(str(wheels[name]) for name in chosen)]).returncode:
                raise SystemExit(f"gpu_wheels: pip install ended with exit status {status}; {site} may lack packages")
    missing = sorted(wanted - wheels.keys() - archives)
    here = f"{len(pins) - len(wanted)} of {len(pins)} packages of the lock are installed"
    print(f"wheels: {here}, {len(chosen)} are in {folder}, {len(missing)} are missing: {', '.join(missing) or 'none'}")
    if archives & wanted:
        print(f"wheels: source archives, to be built: {', '.join(sorted(archives & wanted))}")
    return MISSING if missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument(
        "--python", choices=["3.11", "3.12"], default="3.12", help="version on that machine (default: %(default)s)"
    )
    making.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="packages to fetch, * for any letters (default: all)"
    )
    making.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="packages to leave out")
    making.add_argument("--part-mib", type=float, default=PART_MIB, help="size of a part (default: %(default)s)")
    for name in ("check", "install"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "install":
            command.add_argument("site", type=Path)
    args = parser.parse_args()
    if args.command == "make":
        if [*args.out.glob("part-*")] and not (args.out / WHOLE).is_dir():
            raise SystemExit(f"gpu_wheels: {args.out} already has parts. Name another folder")
        return make(args.out, args.python, args.only, args.skip, args.part_mib)
    if not args.folder.is_dir():
        raise SystemExit(f"gpu_wheels: {args.folder} is not a folder")
    return install(args.folder, args.site if args.command == "install" else None)


if __name__ == "__main__":
    sys.exit(main())
