"""The reports for verl: each patch applies to the installed verl, and where no GPU is needed, it removes the bug.

Modules are executed from copies, because verl_ext changes the installed ones when they are imported.
"""

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "docs" / "upstream"
SITE = Path(importlib.util.find_spec("verl").submodule_search_locations[0]).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.patch"))


def copy_touched(name: str, folder: Path) -> list[Path]:
    """Copy the files that a patch changes to `folder`, below the paths that it names."""
    files = re.findall(r"^\+\+\+ b/(\S+)$", (FOLDER / f"{name}.patch").read_text(encoding="utf-8"), re.MULTILINE)
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SITE / file, folder / file)
    return [folder / file for file in files]


def apply(name: str, folder: Path) -> None:
    command = ["patch", "-p1", "--fuzz=0", "-i"] if shutil.which("patch") else ["git", "apply"]
    done = subprocess.run([*command, FOLDER / f"{name}.patch"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout + done.stderr


@pytest.fixture
def before_and_after(tmp_path: Path) -> Callable[[str], list[ModuleType]]:
    """Return the module that a patch changes, as installed and as patched."""

    def modules(name: str) -> list[ModuleType]:
        import verl  # noqa: F401  with what verl_ext needs on a CPU

        [path] = copy_touched(name, tmp_path)
        dotted = ".".join(path.relative_to(tmp_path).with_suffix("").parts)  # for relative imports
        found = []
        for state in ("before", "after"):
            if state == "after":
                apply(name, tmp_path)
            spec = importlib.util.spec_from_file_location(f"{dotted}_{state}", path)
            found.append(importlib.util.module_from_spec(spec))
            spec.loader.exec_module(found[-1])
        return found

    return modules


def test_every_report_has_a_patch_a_row_and_at_most_200_words():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\[([\w-]+)\]\(\1\.md\) \|.*`(verl_ext/[\w/]+\.py)` \|$", readme, re.MULTILINE)
    reports = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md") if path.stem != "README"}
    assert sorted(name for name, _ in rows) == sorted(reports) == NAMES and len(NAMES) == 5
    assert [file for _, file in rows if not (REPO / file).exists()] == []
    assert [name for name, text in reports.items() if len(text.split()) > 200] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_applies_to_the_installed_verl(name: str, tmp_path: Path):
    files = copy_touched(name, tmp_path)
    before = [file.read_bytes() for file in files]
    apply(name, tmp_path)
    for file, old in zip(files, before, strict=True):
        new = file.read_bytes()
        assert new != old
        compile(new, file, "exec")


def test_the_merged_weights_have_the_adapter(before_and_after, tmp_path: Path):
    """B A = [[1, 2, 3], [-1, -2, -3]], and alpha / r = 2, so the weights of 1 and 2 become 1 + 2 BA and 2 + 2 BA."""
    import torch

    layer = "base_model.model.model.layers.0.self_attn.q_proj"

    def merge(module: ModuleType) -> tuple[list, bool]:
        state = {
            f"{layer}.base_layer.weight": torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], dtype=torch.bfloat16),
            f"{layer}.lora_A.default.weight": torch.tensor([[1.0, 2.0, 3.0]]),
            f"{layer}.lora_B.default.weight": torch.tensor([[1.0], [-1.0]]),
            "base_model.model.model.norm.weight": torch.tensor([5.0]),
        }

        class Merger(module.BaseModelMerger):
            def __init__(self):  # reads no model
                self.config = SimpleNamespace(local_dir=str(tmp_path), target_dir=str(tmp_path / module.__name__))

            def merge_and_save(self): ...

            def cleanup(self): ...

        folder = Merger().save_lora_adapter(state)
        assert state.keys() == {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"}
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.float32}
        return state["model.layers.0.self_attn.q_proj.weight"].tolist(), folder is not None

    before, after = before_and_after("lora-merge")
    untrained = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    with pytest.warns(UserWarning, match="alpha metadata is missing"):
        assert merge(after) == (untrained, True), "without alpha the adapter is saved, as before"
    (tmp_path / "lora_train_meta.json").write_text(json.dumps({"r": 1, "lora_alpha": 2, "task_type": "CAUSAL_LM"}))
    assert merge(before) == (untrained, True)
    shutil.rmtree(tmp_path / after.__name__)
    assert merge(after) == ([[3.0, 5.0, 7.0], [0.0, -2.0, -4.0]], False)
    assert not (tmp_path / after.__name__).exists()


def test_weights_that_are_all_0_have_an_effective_sample_size_of_0(before_and_after):
    import torch

    def metrics(module: ModuleType, log_ratio: float) -> dict[str, float]:
        old = torch.full((2, 3), -1.0)
        correct = module.compute_rollout_correction_and_rejection_mask
        return correct(old, old - log_ratio, torch.ones(2, 3), rollout_is="token", rollout_is_threshold="0.5_2.0")[2]

    before, after = before_and_after("zero-weights")
    with pytest.raises(ZeroDivisionError):
        metrics(before, 5.0)
    assert metrics(after, 5.0)["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics(after, 0.5) == metrics(before, 0.5)


def test_the_actor_makes_its_process_group_with_the_time_out_of_the_run(before_and_after):
    from omegaconf import OmegaConf

    def asked(module: ModuleType) -> list[int]:
        seconds = []
        module.initialize_global_process_group_ray = lambda timeout_second: seconds.append(timeout_second)
        module.omega_conf_to_dataclass = module.aggressive_empty_cache = lambda *args, **kwargs: None
        worker = SimpleNamespace(config=OmegaConf.create({"model": {}, "nccl_timeout": 3600}), role="")
        module.ActorRolloutRefWorker.init_model(worker)  # of a role that builds no model
        return seconds

    before, after = before_and_after("nccl-timeout")
    assert (asked(before), asked(after)) == ([], [3600])


@pytest.mark.timeout(30)
def test_sender_and_receiver_do_not_wait_forever(before_and_after, cpu_platform, tmp_path: Path):
    import torch
    import zmq

    def pair(module: ModuleType) -> tuple:
        handle = f"ipc://{tmp_path}/weights.sock"
        sender = module.BucketedWeightSender(handle, use_shm=True)
        sender._init_buffer = lambda: None  # no shared memory
        return sender, module.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)

    before, after = before_and_after("weight-transfer-timeout")
    for end in pair(before):
        end._init_socket()
        assert end.socket.getsockopt(zmq.RCVTIMEO) == -1, "it waits without a limit"
        end.socket.close(linger=0)
    assert after.WEIGHT_TRANSFER_TIMEOUT_S == 600
    after.WEIGHT_TRANSFER_TIMEOUT_S = 0.2
    sender, receiver = pair(after)
    with pytest.raises(TimeoutError, match="No receiver answered on ipc:.*weights.sock"):
        asyncio.run(sender.async_send_weights(iter(())))
    with pytest.raises(TimeoutError, match="No weights arrived on ipc:.*weights.sock"):
        receiver.receive_weights(lambda weights, is_last: None)
