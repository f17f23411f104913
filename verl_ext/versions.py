"""Check versions of other packages: verl_ext replaces internals, each of one version, and refuses any other version.

The installed packages are also compared with the locks in requirements/.
"""

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VERL = {"verl": "0.9.1"}
PYTHON_VERSIONS = ("3.11", "3.12", "3.13")


class Library(Protocol):
    """A module, or a class, of another package, in which this package replaces names."""

    def __getattr__(self, name: str, /) -> Any: ...
    def __setattr__(self, name: str, value: Any, /) -> None: ...


def require_versions(versions: Mapping[str, str], where: str) -> None:
    """Check that these versions are installed, ignoring local labels such as "+cpu".

    Args:
        versions: package -> version.
        where: the file of this repository that replaces their internals.
    Raises:
        RuntimeError: other versions are installed.
    """
    wrong = {}
    for name, expected in versions.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found.split("+")[0] != expected:
            wrong[name] = found
    if wrong:
        raise RuntimeError(
            f"{where} replaces internals of {dict(versions)}, but found {wrong}. Install requirements/*.txt "
            "(bash scripts/setup_env.sh), or adapt the code that `python -m verl_ext.patches --check` lists."
        )


def read_lock(path: Path) -> "list[Requirement]":
    """Return the pins of a lock file, `name==version[; marker]` each, without their hashes.

    Raises:
        ValueError: a line is not an exact pin.
    """
    from packaging.requirements import Requirement  # not installed with the sandbox only

    pins = []
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip(" \\")
        if text and not text.startswith("--hash="):
            pin = Requirement(text)
            if len(pin.specifier) != 1 or not str(pin.specifier).startswith("==") or "*" in str(pin.specifier):
                raise ValueError(f"{path.name}: {text!r} is not a pin; expected name==version")
            pins.append(pin)
    return pins


def pinned_version(pin: "Requirement") -> str:
    """Return the version of a pin: `2.13.0+cpu` for `torch==2.13.0+cpu`."""
    return next(iter(pin.specifier)).version


def compare_installed(pins: "Iterable[Requirement]") -> list[str]:
    """Return `name: installed X, locked Y` for each pin that applies to this Python and is not met."""
    wrong = []
    for pin in pins:
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            installed = f"installed {importlib.metadata.version(pin.name)}"
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != f"installed {pinned_version(pin)}":
            wrong.append(f"{pin.name}: {installed}, locked {pinned_version(pin)}")
    return wrong


def detect_hardware() -> str:
    """Return `gpu` if NVIDIA's driver answers, else `cpu`; RETOOL_HARDWARE overrides it, as in scripts/setup_env.sh."""
    if chosen := os.environ.get("RETOOL_HARDWARE"):
        return chosen
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0:
        return "gpu"
    return "cpu"
