"""The launchers in recipe/retool: what they start, and whether verl accepts it.

The nightly test prints each run by its launcher and lets verl accept it.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from tests.unit.test_configs import PUBLISHED, ROOT, RUNS
from verl_ext.settings import compose_run as composed


def launcher(run: str) -> Path:
    return ROOT / "recipe" / "retool" / f"run_{run}.sh"


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """Stands in for Python: prints the folder, the variable and the arguments that a launcher passes on."""
    path = tmp_path / "python"
    path.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$VERL_USE_EXTERNAL_MODULES" "$@"\n')
    path.chmod(0o755)
    return path


def launch(run: str, *args: str, cwd: Path, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(launcher(run)), *args],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", ""), "DOCTOR": "0", **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_every_run_has_a_launcher_and_every_launcher_a_run():
    launchers = (ROOT / "recipe" / "retool").glob("run_*.sh")
    assert sorted(path.stem.removeprefix("run_") for path in launchers) == RUNS


PRINT = ("--cfg", "job", "trainer.save_freq=7")


@pytest.mark.parametrize(("run", "args"), [*((run, PRINT) for run in RUNS), ("tiny_dapo", (PRINT[2], *PRINT[:2]))])
def test_launcher_runs_its_config_from_any_folder_with_overrides_last(
    run: str, args: tuple[str, ...], tmp_path: Path, fake_python: Path
):
    result = launch(run, *args, cwd=tmp_path, PYTHON=str(fake_python), OUTPUT_DIR=str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    folder, external_modules, *argv = result.stdout.splitlines()
    assert (folder, external_modules) == (str(ROOT), "verl_ext")
    assert argv[0] == "-m" and argv[1].startswith("verl.trainer."), "printing a run needs one process"
    hydra_args = get_args_parser().parse_args(argv[2:])  # exits if Hydra would refuse the order
    assert (ROOT / hydra_args.config_dir, hydra_args.config_name, hydra_args.cfg) == (ROOT / "configs", run, "job")
    assert hydra_args.overrides[-1] == "trainer.save_freq=7"
    assert not (tmp_path / "out").exists(), "printing a run must leave nothing behind"


@pytest.mark.parametrize(
    ("run", "variable", "key"),
    [
        ("qwen2-32b_sft", "TRAIN_FILE", "data.train_files"),
        ("qwen2-32b_dapo", "MODEL_PATH", "actor_rollout_ref.model.path"),
        ("qwen2-32b_dapo", "TRAIN_FILE", "data.train_files"),
        ("qwen2-32b_dapo", "VAL_FILE", "data.val_files"),
    ],
)
def test_launcher_names_the_missing_input(run: str, variable: str, key: str, tmp_path: Path, fake_python: Path):
    present = dict.fromkeys(("MODEL_PATH", "TRAIN_FILE", "VAL_FILE"), str(tmp_path))
    env = {**present, "PYTHON": str(fake_python), "OUTPUT_DIR": str(tmp_path / "out"), "NNODES": "1"}
    assert launch(run, cwd=tmp_path, **env).returncode == 0
    missing = launch(run, cwd=tmp_path, **{**env, variable: "/nowhere"})
    assert missing.returncode == 1 and f"{variable}=/nowhere does not exist." in missing.stderr
    overridden = launch(run, f"{key}=/elsewhere", cwd=tmp_path, **{**env, variable: "/nowhere"})
    assert overridden.stdout.splitlines()[-1] == f"{key}=/elsewhere"
    by_task = launch(run, "+task=mixed", cwd=tmp_path, **{**env, variable: "/nowhere"})
    assert (by_task.returncode == 0) == key.startswith("data."), "a task may name its files"


@pytest.mark.parametrize("run", ["smollm2_sft", "smollm2_dapo"])
def test_the_small_run_takes_a_gpu_or_a_cpu_and_a_model_of_the_hub(run: str, tmp_path: Path):
    """One command does: without a GPU the launcher adds what a CPU needs, before the user's own overrides."""
    shows = tmp_path / "python"
    names = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "ONEDNN_DEFAULT_FPMATH_MODE")
    shown_first = " ".join(f'"${{{name}-}}"' for name in names)
    shows.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" {shown_first} "$@"\n')
    shows.chmod(0o755)
    flags = Path("/proc/cpuinfo").read_text().split()
    rounds = "BF16" if {"amx_bf16", "avx512_bf16"} & {*flags} else ""
    env = {"PYTHON": str(shows), "OUTPUT_DIR": str(tmp_path / "out"), "DATA_DIR": str(tmp_path)}

    def shown(**more: str) -> list[str]:
        done = launch(run, "trainer.save_freq=7", cwd=tmp_path, **(env | more))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    offline, threads, spin, mode, *argv = shown(RETOOL_HARDWARE="cpu", MODEL_PATH="owner/name")
    group = "+hardware=cpu_small" + ("_sft" if run.endswith("sft") else "")
    assert (offline, threads) == ("0", str(len(os.sched_getaffinity(0)))) and group in argv
    assert (spin, mode) == ("300000", rounds)
    strict = shown(RETOOL_HARDWARE="cpu", MODEL_PATH="owner/name", ONEDNN_DEFAULT_FPMATH_MODE="STRICT")
    assert strict[3] == "STRICT"  # the user's stays
    assert any(argument.endswith("model.path='owner/name'") for argument in argv)
    composed(run, [group])  # the group exists
    on_gpu = shown(RETOOL_HARDWARE="gpu", MODEL_PATH=str(tmp_path))
    assert on_gpu[:4] == [""] * 4 and not [argument for argument in on_gpu if "hardware" in argument]
    missing = launch(run, cwd=tmp_path, **(env | {"MODEL_PATH": "/nowhere"}))
    assert missing.returncode == 1 and "MODEL_PATH=/nowhere does not exist." in missing.stderr


def test_sft_launcher_joins_nodes_by_variables(tmp_path: Path, fake_python: Path):
    env = {"PYTHON": str(fake_python), "OUTPUT_DIR": str(tmp_path / "out"), "TRAIN_FILE": str(tmp_path)}
    refused = launch("qwen2-32b_sft", cwd=tmp_path, NNODES="2", **env)
    assert refused.returncode != 0 and "MASTER_ADDR" in refused.stderr
    joined = launch("qwen2-32b_sft", cwd=tmp_path, NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", **env)
    argv = joined.stdout.splitlines()[2:]
    assert argv[:2] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=8"} < set(argv)


@pytest.mark.parametrize("run", ["qwen2-32b_sft", "tiny_sft"])
def test_sft_outlives_its_terminal_under_nohup(run: str, tmp_path: Path, fake_python: Path):
    """torchrun handles SIGHUP even if it is ignored, unless an option says which signals to handle."""
    (tmp_path / "model").mkdir()
    env = {"PYTHON": str(fake_python), "OUTPUT_DIR": str(tmp_path / "out"), "TRAIN_FILE": str(tmp_path), "NNODES": "1"}
    env |= {"DATA_DIR": str(tmp_path), "MODEL_PATH": str(tmp_path / "model"), "DOCTOR": "0", "PATH": os.environ["PATH"]}
    for action in (signal.SIG_IGN, signal.SIG_DFL):
        done = subprocess.run(
            ["bash", launcher(run)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20,
            preexec_fn=lambda action=action: signal.signal(signal.SIGHUP, action),
        )  # fmt: skip
        is_told = "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT" in done.stdout
        assert is_told == (action == signal.SIG_IGN), done.stderr


def test_rl_launcher_takes_several_sandboxes(tmp_path: Path, fake_python: Path):
    urls = "http://10.0.0.1:8080,http://10.0.0.2:8080"
    result = launch("qwen2-32b_dapo", "--cfg", "job", cwd=tmp_path, PYTHON=str(fake_python), SANDBOX_URL=urls)
    override = next(line for line in result.stdout.splitlines() if line.startswith("retool.sandbox.urls="))
    assert list(composed("qwen2-32b_dapo", [override]).retool.sandbox.urls) == urls.split(",")


ODD = "it's [1] a?b#c, d=e"


@pytest.mark.parametrize(("run", "keys"), [
    ("qwen2-32b_dapo", {"TRAIN_FILE": "data.train_files", "VAL_FILE": "data.val_files"}),
    ("qwen2-32b_dapo", {"MODEL_PATH": "actor_rollout_ref.model.path", "OUTPUT_DIR": "trainer.default_local_dir"}),
    ("qwen2-32b_sft", {"TRAIN_FILE": "data.train_files", "OUTPUT_DIR": "trainer.default_local_dir"}),
    ("tiny_sft", {"MODEL_PATH": "model.path", "DATA_DIR": "data.train_files"}),
    ("tiny_dapo", {"OUTPUT_DIR": "trainer.default_local_dir", "DATA_DIR": "data.val_files"}),
])  # fmt: skip
def test_paths_may_have_quotes_brackets_and_other_signs(run: str, keys: dict, tmp_path: Path, fake_python: Path):
    path = tmp_path / ODD
    path.mkdir()
    env = dict.fromkeys(("MODEL_PATH", "TRAIN_FILE", "VAL_FILE", "DATA_DIR"), str(tmp_path))
    env |= {"PYTHON": str(fake_python), "OUTPUT_DIR": str(tmp_path / "out"), "NNODES": "1"}
    result = launch(run, cwd=tmp_path, **(env | dict.fromkeys(keys, str(path))))
    overrides = [line for line in result.stdout.splitlines() if "=" in line and not line.startswith("-")]
    config = composed(run, overrides)
    for key in keys.values():
        assert str(OmegaConf.select(config, key)).startswith(str(path)), result.stderr


def test_a_sandbox_may_have_an_address_of_ipv6(tmp_path: Path, fake_python: Path):
    urls = "http://[::1]:8080,http://10.0.0.2:8080"
    for run in ("qwen2-32b_dapo", "tiny_dapo"):
        result = launch(run, "--cfg", "job", cwd=tmp_path, PYTHON=str(fake_python), SANDBOX_URL=urls)
        override = next(line for line in result.stdout.splitlines() if line.startswith("retool.sandbox.urls="))
        assert list(composed(run, [override]).retool.sandbox.urls) == urls.split(",")


def test_loggers_write_into_the_runs_folder_unless_a_variable_says_otherwise(tmp_path: Path, fake_python: Path):
    for given, folder in (({}, f"{tmp_path}/run/tensorboard"), ({"TENSORBOARD_DIR": "/logs"}, "/logs")):
        env = {"PYTHON": str(fake_python), "OUTPUT_DIR": f"{tmp_path}/run"} | given
        result = launch("qwen2-32b_dapo", "--cfg", "job", cwd=tmp_path, **env)
        for name, value in (("TENSORBOARD_DIR", folder), ("WANDB_DIR", f"{tmp_path}/run")):
            assert f"++ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("run", "size"), [("qwen2-32b_dapo", []), ("qwen2-32b_sft", ["--nnodes=1", "--nproc-per-node=8"])]
)
def test_launcher_asks_the_doctor_about_the_very_run_that_it_starts(run: str, size: list[str], tmp_path: Path):
    answer = tmp_path / "python"
    answer.write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >> "$CALLS"\necho >> "$CALLS"\n[[ $2 != *doctor ]] || exit $STATUS\n'
    )
    answer.chmod(0o755)
    inputs = {name: str(tmp_path) for name in ("MODEL_PATH", "TRAIN_FILE", "VAL_FILE", "OUTPUT_DIR")}

    def calls(status: str, **env: str) -> tuple[int, list[list[str]]]:
        log = tmp_path / "calls"
        log.write_text("")
        env = inputs | {"PYTHON": str(answer), "CALLS": str(log), "STATUS": status, "NNODES": "1", "DOCTOR": "1"} | env
        done = launch(run, "trainer.save_freq=7", cwd=tmp_path, **env)
        return done.returncode, [call.split("\n") for call in log.read_text().strip().split("\n\n")]

    status, (doctor, start) = calls("0")
    assert status == 0 and doctor[:5] == ["-m", "verl_ext.doctor", "--quick", "--config-name", run]
    overrides = doctor[5:]
    assert overrides[: len(size)] == size and overrides[len(size) :] == start[-len(overrides) + len(size) :]
    assert overrides[-1] == "trainer.save_freq=7"
    status, stopped = calls("1")
    assert status == 1 and len(stopped) == 1, "what the doctor refuses is not started"
    status, skipped = calls("1", DOCTOR="0")
    assert status == 0 and len(skipped) == 1 and "verl_ext.doctor" not in skipped[0]


@pytest.mark.parametrize("run", RUNS)
def test_launcher_help_is_its_header(run: str, tmp_path: Path):
    result = launch(run, "--help", cwd=tmp_path)
    assert result.returncode == 0 and f"configs/{run}.yaml" in result.stdout and "#!" not in result.stdout


# verl itself ---------------------------------------------------------------------------------------------------------

ACCEPT = """
import json, sys, traceback
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import resolve_reward_manager_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import load_extern_object

def accept(config):
    if "actor_rollout_ref" in config:
        validate_config(config, use_reference_policy=False, use_critic=False)
        for section in ("actor_rollout_ref.rollout", "algorithm"):
            omega_conf_to_dataclass(OmegaConf.select(config, section))
        resolve_reward_manager_cls(config)
        named = config.trainer.v1.sampler.custom_sampler
    else:
        for section in ("engine", "optim", "checkpoint", "profiler"):
            omega_conf_to_dataclass(config[section])
        named = config.data.custom_cls
    load_extern_object(named.path, named.name)

refused = {}
for path in sys.argv[2:]:
    try:
        accept(OmegaConf.load(path))
    except Exception:
        refused[path] = traceback.format_exc()
with open(sys.argv[1], "w") as file:
    json.dump(refused, file)
"""


# No test starts these; the other launchers make steps in tests/e2e.
ON_A_CPU = ("qwen2-7b_dapo", "qwen2-7b_sft", "qwen3-4b_dapo")
Printed = dict[str, subprocess.CompletedProcess]  # by run


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Return what each run's launcher prints. Most of the time is verl's import, on one core: two run at a time."""
    folder = tmp_path_factory.mktemp("printed")
    arguments = ("--cfg", "job", "--resolve", "trainer.save_freq=7")
    with ThreadPoolExecutor(2) as pool:
        starts = {run: pool.submit(launch, run, *arguments, cwd=folder, timeout_s=120) for run in RUNS}
        return {run: start.result() for run, start in starts.items()}


@pytest.fixture(scope="module")
def refused(printed: Printed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return run -> traceback if verl refuses what was printed; one process checks them all."""
    folder = tmp_path_factory.mktemp("refused")
    for run, result in printed.items():
        (folder / f"{run}.yaml").write_text(result.stdout)
    for run in ON_A_CPU:
        composed_run = composed(run, ["+hardware=cpu_tiny" + "_sft" * run.endswith("_sft")])
        OmegaConf.save(composed_run, folder / f"{run}+cpu_tiny.yaml", resolve=True)
    done = subprocess.run(
        [sys.executable, "-c", ACCEPT, str(folder / "answer.json"), *map(str, sorted(folder.glob("*.yaml")))],
        cwd=ROOT,
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "verl_ext"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {Path(path).stem: text for path, text in json.loads((folder / "answer.json").read_text()).items()}


@pytest.mark.nightly
@pytest.mark.timeout(600)  # the first one waits for all launchers
@pytest.mark.parametrize("run", RUNS)
def test_verl_accepts_what_the_launcher_prints(run: str, printed: Printed, refused: dict[str, str]):
    assert printed[run].returncode == 0, printed[run].stderr
    config = OmegaConf.create(printed[run].stdout)
    assert config.trainer.save_freq == 7 and config.trainer.experiment_name == run
    published = {key: value for key, value in PUBLISHED.get(run, {}).items() if key != "trainer.save_freq"}
    assert {key: OmegaConf.select(config, key) for key in published} == published
    assert run not in refused, refused[run]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", ON_A_CPU)
def test_verl_accepts_on_a_cpu_what_no_test_starts_there(run: str, refused: dict[str, str]):
    assert f"{run}+cpu_tiny" not in refused, refused[f"{run}+cpu_tiny"]
