"""What this machine has, with a fake nvidia-smi."""

import json
import subprocess

import pytest

from verl_ext.runs.machine import environment, memory_bytes, query_gpus


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Two GPUs, the memory of the second unknown, with CUDA_VISIBLE_DEVICES as given."""
    lines = "0, GPU-aaaa0-1, NVIDIA H200, 143771, 1024, 580.65, 9.0\n"
    lines += "1, GPU-bbbb0-1, NVIDIA GB10, [N/A], [N/A], 580.65, [N/A]\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, lines, ""))
    return lambda visible: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_memory_that_nvidia_smi_does_not_tell(nvidia_smi, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    known, unknown = query_gpus()
    assert (known.total_gib, known.used_gib, known.capability) == (143771 / 1024, 1.0, 9.0)
    assert (unknown.total_gib, unknown.used_gib, unknown.capability) == (None, None, None)


def test_a_driver_that_does_not_know_compute_cap_tells_the_rest(monkeypatch):
    def run(command, **_):
        if "compute_cap" in command[1]:
            return subprocess.CompletedProcess(command, 2, 'Field "compute_cap" is not a valid field to query.\n', "")
        return subprocess.CompletedProcess(command, 0, "0, GPU-aaaa0-1, Tesla T4, 15360, 0, 470.57\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(gpu.name, gpu.driver, gpu.capability) for gpu in query_gpus()] == [("Tesla T4", "470.57", None)]


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/", "memory.max", "1073741824\n"),
        ("0::/job/step", "job/memory.max", "1073741824\n"),  # the job's, because its step has no limit
        ("4:cpu:/\n5:memory:/docker/a", "memory/docker/a/memory.limit_in_bytes", "1073741824\n"),
        ("5:memory:/docker/a", "memory/memory.limit_in_bytes", "1073741824\n"),  # as a container sees its own
    ],
)
def test_the_memory_is_that_of_the_smallest_control_group(group, file, text, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    limit = tmp_path / "sys/fs/cgroup" / file
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert memory_bytes(tmp_path) == memory_bytes(tmp_path / "nothing") > 2**30
    limit.write_text(text)
    assert memory_bytes(tmp_path) == 2**30


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


def test_environment_names_versions_and_machine():
    facts = environment()
    assert facts["versions"]["python"].startswith("3.")
    assert facts["platform"]["cores"] >= 1
    assert 0.5 < facts["platform"]["memory_gib"] < 100_000
    json.dumps(facts)
