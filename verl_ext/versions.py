"""verl_ext replaces internals of other packages, each place for one version, and refuses any other."""

import importlib.metadata
from collections.abc import Mapping

VERL = {"verl": "0.9.1"}


def require_versions(versions: Mapping[str, str], where: str) -> None:
    """Checks that these versions are installed, a local label such as "+cpu" aside.

    Args:
        versions: package -> version.
        where: the file of this repository that replaces their internals.
    Raises:
        RuntimeError: other ones are.
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
            "(bash scripts/setup_env.sh), or check what it replaces against the new version."
        )
