"""What this machine has, where nvidia-smi is made up."""

import subprocess

import pytest

from verl_ext.records.machine import query_gpus


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Two GPUs, the memory of the second unknown, with CUDA_VISIBLE_DEVICES as given."""
    lines = "0, GPU-aaaa0-1, NVIDIA H200, 143771, 1024, 580.65\n1, GPU-bbbb0-1, NVIDIA GB10, [N/A], [N/A], 580.65\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, lines, ""))
    return lambda visible: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_memory_that_nvidia_smi_does_not_tell(nvidia_smi, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(gpu.total_gib, gpu.used_gib) for gpu in query_gpus()] == [(143771 / 1024, 1.0), (None, None)]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0, 1", ["NVIDIA H200", "NVIDIA GB10"]),
        (" GPU-bbbb0 ", ["NVIDIA GB10"]),
        ("MIG-cccc0, MIG-dddd0", ["MIG part", "MIG part"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_gpus_by_number_and_by_the_start_of_an_id(visible, names, nvidia_smi):
    nvidia_smi(visible)
    assert [gpu.name for gpu in query_gpus()] == names
