"""Runs and machines for the doctor to look at."""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext.doctor.finding import Finding, Level
from verl_ext.doctor.run import Run
from verl_ext.doctor.schema import required_keys
from verl_ext.memory.words import GIB
from verl_ext.runs.machine import Gpu, Machine
from verl_ext.settings import compose_run

SHAPES = {"32b": "Qwen/Qwen2.5-32B-Instruct", "7b": "Qwen/Qwen2.5-7B-Instruct", "4b": "Qwen/Qwen3-4B-Instruct-2507"}
SHAPES["0.6b"] = "Qwen/Qwen3-0.6B"


@functools.cache
def composed(name: str, overrides: tuple[str, ...]) -> bytes:
    """Compose a run, which takes half a second; a copy by pickle takes half the time of one by `copy`."""
    return pickle.dumps(compose_run(name, overrides))


def with_overrides(name: str, overrides: tuple[str, ...]) -> DictConfig:
    """Compose a run as `compose_run` does; overrides that only set a key are set without Hydra."""
    simple = tuple(override for override in overrides if override[0].isalpha() and "{" not in override)
    config = pickle.loads(composed(name, tuple(override for override in overrides if override not in simple)))
    for override in simple:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=False)
    return config


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """A run of configs/ with overrides, its model by name, its folder empty."""

    def make(name: str = "qwen2-32b_dapo", *overrides: str, **options: Any) -> Run:
        is_rl = "_dapo" in name
        key = "actor_rollout_ref.model.path" if is_rl else "model.path"
        shape = next((path for size, path in SHAPES.items() if size in name), str(tmp_path / "model"))
        given = [f"{key}={shape}", f"trainer.default_local_dir={tmp_path}/out", *overrides]
        return Run(name, with_overrides(name, tuple(given)), required_keys(name), folder=tmp_path, **options)

    return make


@pytest.fixture
def make_machine(tmp_path: Path) -> Callable[..., Machine]:
    """A machine of 8 H200 that lacks nothing except what the arguments say."""

    def make(
        gpus: int = 8,
        *,
        gpu_gib: float = 139.8,
        used_gib: float = 0.0,
        driver: str = "580.65",
        capability: float = 9.0,
        **changes: Any,
    ) -> Machine:
        settings = {
            "gpus": tuple(Gpu("NVIDIA H200", gpu_gib, used_gib, driver, capability) for _ in range(gpus)),
            "memory_bytes": 2000 * GIB,
            "shm_bytes": 64 * GIB,
            "open_files": (65536, 65536),
            "environment": {"RAY_TMPDIR": str(tmp_path)},
        }
        return Machine(**settings | changes)

    return make


@pytest.fixture
def told() -> Callable[..., list[str]]:
    """Messages and advice of the findings of a level, of which one at least is there."""

    def tell(findings: Any, level: Level) -> list[str]:
        found: list[Finding] = list(findings)
        texts = [f"{finding.message} -> {finding.advice}" for finding in found if finding.level == level]
        assert texts, f"no {level} among {[str(finding) for finding in found]}"
        return texts

    return tell


@pytest.fixture
def only_ok() -> Callable[[Any], None]:
    """Check that there is at least one finding and that all are OK."""

    def check(findings: Any) -> None:
        found = list(findings)
        assert found and {finding.level for finding in found} == {Level.OK}, [str(finding) for finding in found]

    return check
