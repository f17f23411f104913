"""The machine: GPUs, shared memory, open files, and a Ray cluster that verl would join."""

import os
import runpy
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.memory.words import GIB
from verl_ext.runs.machine import CUDA_13_DRIVER, SHM_RL, Machine

SHM_SFT = 1 * GIB  # NCCL and the data loader's workers
OF_A_NEW_CLUSTER = ("num_cpus", "num_gpus", "object_store_memory")
OPEN_FILES = 4096  # sockets of Ray's workers, vLLM's servers and the calls in flight
STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"


def check_gpus(run: Run, machine: Machine) -> Iterator[Finding]:
    gpus, servers = machine.gpus, run.rollout_gpus if run.is_separate else 0
    joined = run.get("ray_kwargs.ray_init.address") or machine.environment.get("RAY_ADDRESS") or _noted_cluster(machine)
    joined = "" if joined == "local" else joined  # its own Ray
    if run.device == "cpu" and _torch_drives_a_gpu():
        yield fail("""the run is for a CPU, but the installed torch is for GPUs, which verl would use
            -> Use a separate clone, set up with RETOOL_HARDWARE=cpu bash scripts/setup_env.sh, or a run that is made
            for GPUs (docs/reference/recipes.md).""")
        return
    if run.device != "cuda":
        yield ok(f"the run is on {run.device}, so GPUs are not checked")
        return
    if run.is_rl and joined and (not gpus or machine.environment.get("RAY_ADDRESS")):
        yield ok(f"the run joins the Ray cluster at {joined}, whose GPUs are not checked here")
        return
    if run.nodes == 1 and servers and not joined and len(gpus) < run.gpus + servers:
        yield fail(f"""there are {len(gpus)} GPU(s) here and no Ray cluster, but the run needs {run.gpus} for the actor
            and {servers} for separate servers
            -> Set trainer.n_gpus_per_node and {ROLLOUT}.n_gpus_per_node, or start scripts/ray_cluster.sh.""")
    elif len(gpus) < run.gpus_per_node:
        key = "trainer.n_gpus_per_node, or add +hardware=cpu_tiny to run on a CPU" if run.is_rl else "NPROC_PER_NODE"
        yield fail(f"""there are {len(gpus)} GPU(s) here, but the run needs {run.gpus_per_node} on each of {run.nodes}
            node(s) -> Set {key}.""")
    if not gpus:
        return
    if len({(gpu.name, gpu.total_gib and round(gpu.total_gib)) for gpu in gpus}) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield warn(f"the GPUs differ: {kinds} -> List only equal ones in CUDA_VISIBLE_DEVICES.")
    if unknown := [str(i) for i, gpu in enumerate(gpus) if gpu.total_gib is None or gpu.used_gib is None]:
        yield warn(f"""nvidia-smi does not report the memory of GPU {", ".join(unknown)}
            -> Pass it for the estimate: retool doctor --gpu-gib.""")
    known = [(i, gpu.used_gib, gpu.total_gib) for i, gpu in enumerate(gpus)]
    if used := [f"{i} ({used:.1f} GiB)" for i, used, total in known if used and total and used > 0.05 * total]:
        yield warn(f"memory is in use on GPU {', '.join(used)} -> Find out what uses it with nvidia-smi.")
    driver = gpus[0].driver
    if int(driver.partition(".")[0]) < CUDA_13_DRIVER:
        yield fail(f"""the NVIDIA driver is {driver}, but CUDA 13 of requirements/gpu.txt needs {CUDA_13_DRIVER} or
            newer -> Update the driver, or install a stack of your own for an older CUDA.""")
    if old := {f"{gpu.name} ({gpu.capability})" for gpu in gpus if (gpu.capability or 8) < 8}:
        yield fail(f"""{", ".join(sorted(old))} has a compute capability below 8: it has neither bf16, in which actor
            and vLLM compute, nor flash-attn 2 -> Use GPUs of the Ampere generation or later: A100, L4, RTX 30.""")
    if (home := machine.environment.get("CUDA_HOME")) and not Path(home, "bin/nvcc").is_file():
        yield warn(f"CUDA_HOME={home} has no bin/nvcc, which compiles some packages' kernels -> Unset or correct it.")
    memory = "memory unknown" if gpus[0].total_gib is None else f"{gpus[0].total_gib:.0f} GiB"
    yield ok(f"{len(gpus)} x {gpus[0].name}, {memory}, driver {driver}")


def _torch_drives_a_gpu() -> bool:
    """Answer like `is_cpu_only` of verl_ext/cpu, without its import of torch."""
    if wanted := os.environ.get("VERL_PLATFORM", "").strip().lower():
        return wanted != "cpu"
    torch = find_spec("torch")
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py"))) if torch and torch.origin else {}
    return any(build.get(name) for name in ("cuda", "hip", "xpu")) or find_spec("torch_npu") is not None


def _noted_cluster(machine: Machine) -> str:
    """Return the cluster of the last `ray start` here if it answers, else ""."""
    address = machine.ray_address_file.read_text().strip() if machine.ray_address_file.is_file() else ""
    return address if address and _answers(address) else ""


def check_limits(run: Run, machine: Machine) -> Iterator[Finding]:
    wanted = SHM_RL if run.is_rl else SHM_SFT
    if machine.shm_bytes < (GIB if run.device == "cpu" else wanted):
        gib = wanted // GIB
        yield warn(f"""/dev/shm has {machine.shm_bytes / GIB:.2f} GiB, but Ray, NCCL and the transfer of weights to vLLM
            need it -> Give the container {gib} GiB or more: docker run --shm-size={gib}g, or --ipc=host.""")
    soft, hard = machine.open_files
    calls = run.get(f"{ROLLOUT}.agent.num_workers", 1) * run.get("retool.sandbox.max_concurrency", 0)
    files = OPEN_FILES + calls if run.is_rl else 1024
    if 0 <= soft < files:
        yield warn(f"""ulimit -n is {soft} (at most {hard}); a step may hold {files} files and sockets open
            -> Run ulimit -n {files if hard < 0 else min(hard, max(files, 65536))} in the shell that starts the run.""")
    if run.device == "cuda" and machine.address_space >= 0:
        yield warn(f"""ulimit -v is {machine.address_space // 1024}, but CUDA reserves more addresses than the machine
            has memory -> Run ulimit -v unlimited in the shell that starts the run.""")


def check_ray(run: Run, machine: Machine) -> Iterator[Finding]:
    """Check what `ray.init` joins without an address: RAY_ADDRESS, else the cluster of the last `ray start` here."""
    if not run.is_rl or run.get("ray_kwargs.ray_init.address"):  # named explicitly
        return
    source, remove, address = "RAY_ADDRESS", "Unset it.", machine.environment.get("RAY_ADDRESS")
    if address and not address.rpartition(":")[2].isdecimal():
        return
    if not address and machine.ray_address_file.is_file():
        source, address = machine.ray_address_file, machine.ray_address_file.read_text().strip()
        remove = f"Remove {source}."
    if not address and run.nodes > 1:
        yield warn(f"""the run needs {run.nodes} nodes, but this machine knows no Ray cluster -> Start one: bash
            scripts/ray_cluster.sh head, then worker on the other nodes (docs/tutorials/train-32b.md).""")
    elif not address:
        yield _own_cluster(run)
    elif not _answers(address):
        yield fail(f"""{source} names a Ray cluster at {address}, which does not answer; verl would wait for it
            -> {remove}""")
    elif given := [key for key in OF_A_NEW_CLUSTER if run.get(f"ray_kwargs.ray_init.{key}")]:
        yield fail(f"""{source} names a running Ray cluster at {address}; ray.init would join it, and there it
            refuses {", ".join(given)} -> Stop that cluster (ray stop), give this run a separate one
            (RAY_TMPDIR=another folder), or remove the key (~ray_kwargs.ray_init.{given[0]}).""")
    elif run.nodes == 1:
        yield warn(f"""{source} names a running Ray cluster at {address}; the run would join it. {_of_a_joined(run)}
            -> If you do not want this, run ray stop, or set RAY_TMPDIR to another folder.""")
    else:
        yield ok(f"a Ray cluster answers at {address}. {_of_a_joined(run)}")


def _reserved(run: Run) -> tuple[int, str]:
    """Return the CPUs that verl 0.9.1 and TransferQueue 0.1.11 reserve from Ray, and their sum in words.

    They are 3 per GPU (single_controller/ray/base.py:146, 192), 2 per GPU of a separate server
    (workers/rollout/replica.py:205), 1 per storage unit (storage/simple_storage.py:722) and 1 for the controller
    (controller.py:943) of TransferQueue.
    """
    units, servers = run.get(STORAGE_UNITS, 8), run.rollout_gpus if run.is_separate else 0
    parts = f"3 for each of {run.gpus} GPU(s), {f'2 for each of {servers} GPU(s) of servers, ' * bool(servers)}"
    parts += f"{units} for TransferQueue's storage, 1 for its controller"
    return 3 * run.gpus + 2 * servers + units + 1, parts


def _of_a_joined(run: Run) -> str:
    """Say what is not compared here, because the doctor does not query the cluster's CPUs."""
    need, parts = _reserved(run)
    return f"""The run reserves {need} of its CPUs ({parts}), of these {3 * run.gpus_per_node} on each of {run.nodes}
        node(s) for the GPUs. With fewer it waits forever (see ray status)"""


def _own_cluster(run: Run) -> Finding:
    """Check that Ray has the CPUs that are reserved; verl and TransferQueue wait for them without a time-out."""
    need, parts = _reserved(run)
    if not (have := run.get("ray_kwargs.ray_init.num_cpus")):
        from verl_ext.rollout.standalone import cpus_of_ray  # imports Ray

        have = cpus_of_ray()
    if have >= need:
        return ok(f"no Ray cluster runs here, so the run starts its own and reserves {need} of its {have} CPUs")
    return fail(f"""the run reserves {need} CPUs of Ray, which has {have}, and would wait forever: {parts}
        -> Set ray_kwargs.ray_init.num_cpus={need}, which Ray only counts, or {STORAGE_UNITS}=1.""")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False
