"""GPUs, limits, Ray and packages, on machines that the tests make up."""

import dataclasses
import functools
import socket
from importlib import metadata
from pathlib import Path

import pytest

from verl_ext.doctor.finding import Level
from verl_ext.doctor.machine import STORAGE_UNITS, check_gpus, check_limits, check_ray
from verl_ext.doctor.memory import check_memory
from verl_ext.doctor.versions import check_external_modules, check_versions
from verl_ext.runs.machine import Gpu


def test_a_machine_that_fits(make_run, make_machine, only_ok):
    run, machine = make_run(), make_machine()
    only_ok([*check_gpus(run, machine), *check_limits(run, machine)])


@pytest.mark.parametrize(
    ("gpus", "changes", "level", "message"),
    [
        (0, {}, Level.FAIL, "0 GPU(s) here, but the run needs 8 on each of 2 node(s)"),
        (4, {}, Level.FAIL, "4 GPU(s) here"),
        (8, {"driver": "550.54"}, Level.FAIL, "driver is 550.54, but CUDA 13 of requirements/gpu.txt needs 580"),
        (8, {"used_gib": 40.0}, Level.WARN, "memory is in use on GPU 0 (40.0 GiB), 1 (40.0 GiB)"),
        (8, {"capability": 7.5}, Level.FAIL, "NVIDIA H200 (7.5) has a compute capability below 8: it has neither bf16"),
        (8, {"environment": {"CUDA_HOME": "/nowhere"}}, Level.WARN, "CUDA_HOME=/nowhere has no bin/nvcc"),
    ],
)
def test_gpus_that_do_not_fit(gpus, changes, level, message, make_run, make_machine, told):
    assert message in told(check_gpus(make_run(), make_machine(gpus, **changes)), level)[0]


def test_a_ray_of_its_own_is_no_reason_to_look_at_no_gpu(make_run, make_machine, told):
    machine = make_machine(4, environment={"RAY_ADDRESS": "local"})
    assert "4 GPU(s) here" in told(check_gpus(make_run(), machine), Level.FAIL)[0]


def test_gpus_of_different_kinds(make_run, make_machine, told):
    gpus = (*make_machine(4).gpus, *make_machine(4, gpu_gib=79.6).gpus)
    machine = dataclasses.replace(make_machine(), gpus=gpus)
    assert "GPUs differ" in told(check_gpus(make_run(), machine), Level.WARN)[0]


def test_memory_that_nvidia_smi_does_not_tell(make_run, make_machine, told):
    gpus = (Gpu("NVIDIA GB10", None, None, "580.65"),)
    run = make_run("qwen2-32b_dapo", "trainer.n_gpus_per_node=1")
    machine = dataclasses.replace(make_machine(), gpus=gpus)
    assert "does not report the memory of GPU 0" in told(check_gpus(run, machine), Level.WARN)[0]
    assert "1 x NVIDIA GB10, memory unknown, driver 580.65" in told(check_gpus(run, machine), Level.OK)[0]
    assert any("the GPUs' memory is unknown" in text for text in told(check_memory(run, machine), Level.OK))


def test_a_run_on_the_cpu_wants_no_gpu(make_run, make_machine, only_ok, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    only_ok(check_gpus(make_run("tiny_dapo"), make_machine(0)))


def test_a_run_on_the_cpu_is_refused_where_torch_would_take_a_gpu(make_run, make_machine, told, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    text = told(check_gpus(make_run("tiny_dapo"), make_machine(1)), Level.FAIL)[0]
    assert "the installed torch is for GPUs" in text and "RETOOL_HARDWARE=cpu bash scripts/setup_env.sh" in text


def test_servers_of_their_own_want_gpus_beside_the_actors(cluster, listener, make_run, make_machine, told, only_ok):
    rollout = "actor_rollout_ref.rollout"
    sizes = ("trainer.nnodes=1", "trainer.n_gpus_per_node=4", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=4")
    run = make_run("qwen2-32b_dapo", "trainer.v1.trainer_mode=separate_async", *sizes)
    only_ok(check_gpus(run, make_machine(8)))
    text = told(check_gpus(run, make_machine(4)), Level.FAIL)[0]
    assert "4 GPU(s) here and no Ray cluster, but the run needs 4 for the actor and 4 for separate servers" in text
    cluster(listener)  # with the other four
    only_ok(check_gpus(run, make_machine(4)))


def test_a_head_without_gpus_looks_for_none(cluster, listener, make_run, make_machine, only_ok):
    """The file of the last `ray start` names a cluster, as RAY_ADDRESS would."""
    cluster(listener)
    only_ok(check_gpus(make_run(), make_machine(0)))


def test_small_shared_memory_and_few_open_files(make_run, make_machine, told):
    machine = make_machine(shm_bytes=64 << 20, open_files=(1024, 4096))
    texts = told(check_limits(make_run(), machine), Level.WARN)
    assert "/dev/shm has 0.06 GiB" in texts[0] and "--shm-size=8g" in texts[0]
    # 4,096 and 8 agent-loop workers x 16 calls
    assert "ulimit -n is 1024 (at most 4096); a step may hold 4224" in texts[1] and "Run ulimit -n 4096 in" in texts[1]


def test_few_addresses(make_run, make_machine, told, only_ok):
    machine = make_machine(address_space=64 << 30)
    assert "ulimit -v is 67108864, but CUDA reserves more" in told(check_limits(make_run(), machine), Level.WARN)[0]
    assert not list(check_limits(make_run("tiny_dapo"), machine))


@pytest.fixture
def cluster(tmp_path):
    """Writes what `ray start` writes."""

    def note(address):
        (tmp_path / "ray").mkdir(exist_ok=True)
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)

    return note


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_no_cluster_is_fine_on_one_node_only(make_run, make_machine, told, only_ok, monkeypatch):
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: 33)
    only_ok(check_ray(make_run("qwen2-32b_dapo", "trainer.nnodes=1"), make_machine()))
    assert (
        "this machine knows no Ray cluster -> Start one: bash"
        in told(check_ray(make_run(), make_machine()), Level.WARN)[0]
    )


SEPARATE = ("trainer.n_gpus_per_node=4", "trainer.v1.trainer_mode=separate_async")
SEPARATE += ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4")
CPUS = [  # by hand: 3 a GPU, TransferQueue's storage units, 1 for its controller
    (("qwen2-32b_dapo", "trainer.nnodes=1"), 8 * 3 + 8 + 1),
    (("qwen2-7b_dapo", f"{STORAGE_UNITS}=2"), 8 * 3 + 2 + 1),
    (("qwen3-0.6b_dapo",), 1 * 3 + 2 + 1),  # verl's 8 storage units would make it 12
    (("qwen2-7b_dapo", *SEPARATE), 4 * 3 + 4 * 2 + 8 + 1),  # 2 for each GPU of a separate server
]


@pytest.mark.parametrize(("run", "need"), CPUS)
def test_more_cpus_than_ray_has_are_refused(make_run, make_machine, told, only_ok, monkeypatch, run, need):
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: need)
    only_ok(check_ray(make_run(*run), make_machine()))
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: need - 1)
    text = told(check_ray(make_run(*run), make_machine()), Level.FAIL)[0]
    assert f"the run reserves {need} CPUs of Ray, which has {need - 1}, and would wait forever: 3 for each of" in text
    assert f"Set ray_kwargs.ray_init.num_cpus={need}, which Ray only counts, or {STORAGE_UNITS}=1." in text
    only_ok(check_ray(make_run(*run, f"ray_kwargs.ray_init.num_cpus={need}"), make_machine()))


def test_cpus_that_are_reserved_are_those_of_verl_and_transfer_queue():
    import inspect
    from importlib.util import find_spec

    import verl  # noqa: F401
    from verl.single_controller.ray.base import ResourcePoolManager
    from verl.workers.rollout.replica import RolloutReplica

    assert ResourcePoolManager.max_colocate_count == 3
    assert "max_colocate_count=2" in inspect.getsource(RolloutReplica.init_standalone)
    queue = Path(find_spec("transfer_queue").origin).parent
    for name in ("controller.py", "storage/simple_storage.py"):
        assert "@ray.remote(num_cpus=1)\nclass " in (queue / name).read_text()


def test_a_cluster_that_is_gone_is_noticed_by_the_file_it_left(cluster, make_run, make_machine, told, tmp_path):
    cluster(closed_port())
    text = told(check_ray(make_run(), make_machine()), Level.FAIL)[0]
    assert "does not answer" in text and f"Remove {tmp_path}/ray/ray_current_cluster." in text


def test_a_running_cluster_is_joined_and_refuses_resources(cluster, listener, make_run, make_machine, told, only_ok):
    cluster(listener)
    only_ok(check_ray(make_run(), make_machine()))
    one_node = make_run("qwen2-32b_dapo", "trainer.nnodes=1")
    assert "the run would join it" in told(check_ray(one_node, make_machine()), Level.WARN)[0]
    on_cpu = told(check_ray(make_run("tiny_dapo"), make_machine()), Level.FAIL)[0]
    assert "there it refuses num_cpus, num_gpus, object_store_memory" in on_cpu


@pytest.mark.parametrize(("run", "need"), CPUS)
def test_a_cluster_that_is_joined_is_told_the_cpus(listener, make_run, make_machine, told, run, need):
    machine = make_machine(environment={"RAY_ADDRESS": listener})
    text = told(check_ray(make_run(*run), machine), Level.WARN)[0]
    gpus = make_run(*run).gpus_per_node
    assert f"The run reserves {need} of its CPUs (3 for each of {gpus} GPU(s), " in text
    assert f"), of these {3 * gpus} on each of 1 node(s) for the GPUs. With fewer it waits forever" in text
    # 3 x 16 GPUs, 8 storage units, 1 for the controller
    two_nodes = told(check_ray(make_run("qwen2-32b_dapo"), machine), Level.OK)[0]
    assert "reserves 57 of its CPUs" in two_nodes and "of these 24 on each of 2 node(s) for the GPUs" in two_nodes


def test_an_address_that_is_set_by_hand_is_not_second_guessed(cluster, make_run, make_machine):
    cluster(closed_port())
    assert list(check_ray(make_run("tiny_dapo", "+ray_kwargs.ray_init.address=local"), make_machine())) == []


def test_the_address_in_the_environment_comes_first(cluster, listener, make_run, make_machine, told, only_ok):
    cluster(closed_port())
    only_ok(check_ray(make_run(), make_machine(environment={"RAY_ADDRESS": listener})))
    gone = make_machine(environment={"RAY_ADDRESS": closed_port()})
    assert "-> Unset it." in told(check_ray(make_run(), gone), Level.FAIL)[0]


def test_versions_against_a_lock(tmp_path, make_run, told, only_ok):
    check = functools.partial(check_versions, make_run())
    lock = tmp_path / "cpu.txt"
    verl, psutil = metadata.version("verl"), metadata.version("psutil")
    lock.write_text(f"verl=={verl}\npsutil=={psutil}\n")
    only_ok(check(lock))
    lock.write_text(f"verl=={verl}\npsutil==0.1\nno-such-package==2.0\n")
    text = told(check(lock), Level.WARN)[0]
    assert f"psutil: installed {psutil}, locked 0.1; no-such-package: not installed" in text and "setup_env.sh" in text
    lock.write_text("verl==0.6.0\n")
    assert f"verl: installed {verl}, locked 0.6.0; verl_ext is written" in told(check(lock), Level.FAIL)[0]


@pytest.mark.parametrize(
    ("run", "hardware"), [("qwen2-32b_dapo", "no_flash_attn"), ("qwen2-32b_sft", "no_flash_attn_sft")]
)
def test_flash_attn_is_missed_where_the_run_calls_it(run, hardware, tmp_path, make_run, told, only_ok):
    lock = tmp_path / "gpu.txt"
    lock.write_text(f"verl=={metadata.version('verl')}\nflash-attn==2.8.3\n")
    text = told(check_versions(make_run(run), lock), Level.FAIL)[0]
    assert "flash-attn is not installed, but the run's attention is flash_attention_2" in text
    assert f"Add +hardware={hardware}, which is slower" in text
    only_ok(check_versions(make_run(run, f"+hardware={hardware}"), lock))
    only_ok(check_versions(make_run("tiny_dapo"), lock))  # on a CPU, where attention is our own


def test_external_modules(told):
    assert "does not name verl_ext" in told(check_external_modules({}), Level.WARN)[0]
    assert list(check_external_modules({"VERL_USE_EXTERNAL_MODULES": "other,verl_ext"})) == []
