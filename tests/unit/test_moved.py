"""Old names of modules, as users' YAMLs, tools, pickles and saved configs contain them."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext import moved

ROOT = Path(__file__).parents[2]
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


@pytest.fixture
def fresh():
    """Forget which old names this process has imported."""
    old = {f"verl_ext.{name}" for name in moved.MODULES}

    def forget():
        for name in old & sys.modules.keys():
            del sys.modules[name]

    forget()
    yield
    forget()


@pytest.mark.parametrize("old", moved.MODULES)
def test_every_old_name_leads_to_a_module_that_is_there(old):
    new = moved.new_name(f"verl_ext.{old}")
    assert not (ROOT / "verl_ext" / f"{old.replace('.', '/')}.py").exists(), "the module is there: it did not move"
    assert importlib.util.find_spec(new) is not None
    assert importlib.util.find_spec(f"verl_ext.{old}").name in (f"verl_ext.{old}", new)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("agent_loop.tool_errors", "environments.tool_errors", "ToolError"),
        ("run_folder", "runs.folder", None),
        ("data.rows", "datasets.rows", "DataError"),
        ("reward.shaping", "objectives.shaping", None),
        ("sandbox.tool", "environments.python", "CodeInterpreter"),
        ("replay_buffer", "trainer.sampler", "DapoReplayBuffer"),
    ],
)
def test_an_old_name_is_the_module_at_its_new_place(old, new, name, fresh):
    with pytest.warns(FutureWarning) as told:
        module = importlib.import_module(f"verl_ext.{old}")
    there = importlib.import_module(f"verl_ext.{new}")
    assert module is there and there.__name__ == there.__spec__.name == f"verl_ext.{new}"
    assert there.__spec__.origin == there.__file__
    own = [str(each.message) for each in told if "is now" in str(each.message)]
    assert own == [f"verl_ext.{old} is now verl_ext.{new}. Use the new name."], "one warning a name"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(f"verl_ext.{old}") is there, "and none the second time"
    if name:
        assert getattr(there, name).__module__ == there.__name__


def test_what_was_pickled_under_an_old_name_is_read(fresh):
    from verl_ext.environments.tool_errors import ToolError

    with pytest.warns(FutureWarning, match="verl_ext.agent_loop.tool_errors is now verl_ext.environments.tool_errors"):
        assert pickle.loads(b"cverl_ext.agent_loop.tool_errors\nToolError\n.") is ToolError


def test_verl_and_hydra_load_what_an_old_yaml_names(fresh):
    from hydra.utils import get_class
    from verl.utils.import_utils import load_class_from_fqn, load_extern_object

    from verl_ext.rollout.loop import RetoolAgentLoop
    from verl_ext.rollout.workers import LeanAgentLoopManager
    from verl_ext.trainer.sampler import DapoReplayBuffer

    with pytest.warns(FutureWarning):
        assert load_extern_object("pkg://verl_ext.replay_buffer", "DapoReplayBuffer") is DapoReplayBuffer
        assert load_class_from_fqn("verl_ext.agent_loop.manager.LeanAgentLoopManager") is LeanAgentLoopManager
        assert get_class("verl_ext.agent_loop.tool_loop.RetoolAgentLoop") is RetoolAgentLoop


def test_a_new_module_in_the_room_of_an_old_package_is_not_loaded_twice(fresh):
    """`verl_ext.agent_loop` stands for rollout/, where Python would find seeds.py a second time."""
    with pytest.warns(FutureWarning):
        assert importlib.import_module("verl_ext.agent_loop.seeds").__name__ == "verl_ext.rollout.seeds"


def test_a_name_that_never_was_is_an_import_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl_ext.replay_bufer")


@pytest.mark.parametrize(
    ("command", "usage", "warns"),
    [
        ("verl_ext.evaluate", "usage: python -m verl_ext.evaluate", False),  # still the command's name
        ("verl_ext.pipeline", "usage: quickstart.sh", True),
        ("verl_ext.sandbox.server", "usage: python -m verl_ext.sandbox.server", False),  # a package now
        ("verl_ext.checkpoints", "usage: python -m verl_ext.checkpoints", False),
        ("verl_ext.report", "usage: python -m verl_ext.report", False),
    ],
)
def test_commands_have_their_old_names(command, usage, warns):
    done = subprocess.run([sys.executable, "-m", command, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(usage), done.stderr
    assert ("FutureWarning: verl_ext.pipeline is now verl_ext.quickstart.pipeline" in done.stderr) is warns


# The file that is named by its path ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "/home/me/verl-retool/"])
def test_the_agent_loops_yaml_has_its_new_path_where_a_run_starts(folder):
    config = OmegaConf.create({})
    OmegaConf.update(config, LOOPS, f"{folder}verl_ext/agent_loop/agent_loops.yaml", force_add=True)
    OmegaConf.set_struct(config, True)
    with pytest.warns(FutureWarning, match=f"{LOOPS}=.* is now verl_ext/rollout/agent_loops.yaml"):
        moved.rename_files(config)
    path = OmegaConf.select(config, LOOPS)
    assert path == f"{folder}verl_ext/rollout/agent_loops.yaml" and (ROOT / path.removeprefix(folder)).is_file()
    assert OmegaConf.is_struct(config)


def test_other_paths_and_runs_without_an_agent_loop_stay():
    for config in (
        {"actor_rollout_ref": {"rollout": {"agent": {"agent_loop_config_path": "mine.yaml"}}}},
        {"data": {}},
    ):
        before = OmegaConf.create(config)
        moved.rename_files(before)
        assert OmegaConf.to_container(before) == config


@pytest.mark.parametrize(
    ("old", "key", "expected"),
    [
        ("enable=false", "enable", False),
        ("max_mb=512", "max_gb", 2.0),  # MB of a file x 4 files x the one worker of this run
        ("max_files=8", "max_gb", 2.0),
        ("folder=elsewhere", "enable", True),
    ],
)
def test_the_trajectory_log_of_before_is_the_recorder_with_a_warning(old, key, expected):
    from verl_ext.settings import compose_run

    told = "trainer.default_local_dir/records" if "folder" in old else f"retool.recorder.{key}"
    with pytest.warns(FutureWarning, match=f"retool.trajectory_log.{old.partition('=')[0]} is now .*{told}"):
        config = compose_run("tiny_dapo", [f"retool.trajectory_log.{old}"])
    assert config.retool.recorder[key] == expected and "trajectory_log" not in config.retool


def test_a_saved_config_of_before_is_mapped_and_one_of_now_is_not_warned_of(tmp_path):
    old = {"retool": {"trajectory_log": {"enable": True, "folder": "x", "max_mb": 64, "max_files": 4}, "recorder": {}}}
    config = OmegaConf.create(old)
    with pytest.warns(FutureWarning):
        moved.rename_keys(config)
    assert OmegaConf.to_container(config) == {"retool": {"recorder": {"enable": True, "max_gb": 0.25}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.rename_keys(OmegaConf.create({"retool": {"trajectory_log": {"enable": None}}, "data": {}}))
        moved.rename_keys(OmegaConf.create({"data": {}}))


def test_composing_a_run_renames_it():
    from verl_ext.evaluation.settings import load_config
    from verl_ext.settings import compose_run

    old = [f"{LOOPS}=verl_ext/agent_loop/agent_loops.yaml"]
    with pytest.warns(FutureWarning):
        for config in (compose_run("tiny_dapo", old), load_config("tiny_dapo", old)):
            assert OmegaConf.select(config, LOOPS) == "verl_ext/rollout/agent_loops.yaml"
