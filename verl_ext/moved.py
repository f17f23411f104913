"""Keep old names of modules working: a user's YAML, a tool, a pickle or the saved config of a run may name them.

In: an import of `verl_ext.replay_buffer`. Out: the module `verl_ext.trainer.sampler` itself, so that a class has one
identity under both names, and one warning per process with the new name. `python -m` also takes old names.
`verl_ext.checkpoints`, `verl_ext.report` and `verl_ext.sandbox.server` were modules and are packages with the same
commands.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

_KEPT_THEIR_NAME = {  # (old folder, new folder) below verl_ext -> modules
    ("", "checkpoints"): "manifest",
    ("", "evaluation"): "estimators",
    ("", "quickstart"): "disk pipeline supervise",
    ("", "runs"): "durable",
    ("records", "runs"): "batch_file durable journal jsonl lock machine",
    ("", "plots"): "charts",
    ("", "report"): "verdict",
    ("report", "plots"): "charts",
    ("", "trainer"): "exclusions",
    ("agent_loop", "environments"): "tool_errors toolbox",
    ("agent_loop", "protocols"): "call_json",
    ("agent_loop", "rollout"): "log_probs seeds tool_use",
    ("data", "datasets"): "problems rows text traces",
    ("data", "evaluation"): "pass_rates past_samples",
    ("reward", "objectives"): "shaping",
    ("reward", "reward.maths"): "extraction intervals normalisation rationals structure symbolic symbolic_worker "
    "unicode_signs",
    ("sandbox", "sandbox.server"): "api connection disk folders isolation landlock metrics namespaces pool preload "
    "processes program seccomp sessions visible worker zygote",
    ("trainer", "runs"): "journal",
}
MODULES = {  # old name -> new name, below verl_ext
    f"{old}.{name}".removeprefix("."): f"{new}.{name}"
    for (old, new), names in _KEPT_THEIR_NAME.items()
    for name in names.split()
} | {
    "agent_loop": "rollout",
    "agent_loop.protocol": "protocols.base",
    "agent_loop.code_protocol": "protocols.code",
    "agent_loop.hermes_protocol": "protocols.hermes",
    "agent_loop.protocols": "protocols.by_name",
    "agent_loop.manager": "rollout.workers",
    "agent_loop.tool_loop": "rollout.loop",
    "agent_loop.trajectory_log": "records.trajectories",
    "checkpoint_patches": "checkpoints.hooks",
    "data": "datasets",
    "evaluate": "evaluation.__main__",
    "quickstart_options": "quickstart.options",
    "quickstart_source": "quickstart.source",
    "records.run_folder": "runs.folder",
    "records.run_record": "runs.metrics",
    "replay_buffer": "trainer.sampler",
    "report_comparison": "report.comparison",
    "rollout_view": "report.rollouts",
    "run_folder": "runs.folder",
    "run_record": "runs.metrics",
    "sandbox.tool": "environments.python",
    "sft_dataset": "datasets.sft",
    "sft_trace": "protocols.trace",
    "trainer.settings": "settings",
}
PACKAGES = ("agent_loop", "data")  # imported on the way to an old name, which is the one to warn about
COMMANDS = {"pipeline": "quickstart.__main__"}  # of `python -m`
_OLD_LOG = "retool.trajectory_log"
OLD_LOOPS, LOOPS = "verl_ext/agent_loop/agent_loops.yaml", "verl_ext/rollout/agent_loops.yaml"  # a file, named in YAMLs


def new_name(module: str) -> str:
    """Return `verl_ext.trainer.sampler` for `verl_ext.replay_buffer`; a name that did not move is unchanged."""
    package, _, name = module.partition(".")
    return f"verl_ext.{MODULES[name]}" if package == "verl_ext" and name in MODULES else module


def rename_files(config: object) -> None:
    """Replace the old path of the agent loops' YAML in a run's config, in place.

    Args:
        config: `DictConfig` of a run; one of SFT or without an agent loop does not change.
    """
    from omegaconf import OmegaConf, open_dict

    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    path = OmegaConf.select(config, key)
    if path is not None and f"/{path}".endswith(f"/{OLD_LOOPS}"):
        _warn(f"{key}={OLD_LOOPS}", LOOPS)
        with open_dict(config):
            OmegaConf.update(config, key, path.removesuffix(OLD_LOOPS) + LOOPS)


def rename_keys(config: object) -> None:
    """Move what a user's YAML sets in `retool.trajectory_log`, the old log of JSON lines, to `retool.recorder`.

    Args:
        config: `DictConfig` of a run; one without the section does not change.
    """
    from omegaconf import OmegaConf, open_dict

    old = {key: value for key, value in (OmegaConf.select(config, _OLD_LOG) or {}).items() if value is not None}
    with open_dict(config):
        if "trajectory_log" in (config.get("retool") or {}):
            del config.retool.trajectory_log
        if not old:
            return
        told = []
        if "enable" in old:
            OmegaConf.update(config, "retool.recorder.enable", old["enable"])
            told.append("retool.recorder.enable")
        if "max_mb" in old or "max_files" in old:
            workers = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.num_workers") or 1
            OmegaConf.update(
                config, "retool.recorder.max_gb", old.get("max_mb", 256) * old.get("max_files", 4) * workers / 1024
            )
            told.append("retool.recorder.max_gb, which is the limit of all workers together")
    if "folder" in old:
        told.append("no longer set: the records are in trainer.default_local_dir/records")
    _warn(", ".join(f"{_OLD_LOG}.{key}" for key in old), "; ".join(told))


def install() -> None:
    """Let Python find old names; calling it again is harmless."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # first: `verl_ext.agent_loop.seeds` must not load rollout/seeds.py twice


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        if new == fullname:
            return None
        found = importlib.util.find_spec(new)
        return ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that importlib has made for the old name with the real one."""
        old, new = module.__name__, new_name(module.__name__)
        if old.removeprefix("verl_ext.") not in PACKAGES:
            _warn(old, new)
        sys.modules[old] = importlib.import_module(new)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for `python -m`, which runs it and imports nothing."""
        name = fullname.removeprefix("verl_ext.")
        if name != "evaluate":  # still the command's name
            _warn(fullname, new_name(fullname))
        spec = importlib.util.find_spec(f"verl_ext.{COMMANDS.get(name, MODULES[name])}")
        return spec.loader.get_code(spec.name)


def _warn(old: str, new: str) -> None:
    """Issue a FutureWarning, because Python shows it by default."""
    warnings.warn(f"{old} is now {new}. Use the new name.", FutureWarning, stacklevel=2)
