"""Old names of modules go on working: a user's YAML, a tool, a pickle or the saved config of a run may name them.

Comes in: the import of `verl_ext.replay_buffer`. Goes out: the module `verl_ext.trainer.sampler` itself, so that a
class has one identity under both names, and one warning per process that says the new name. `python -m` takes them too.
`verl_ext.checkpoints`, `verl_ext.report` and `verl_ext.sandbox.server` were modules and are packages: their commands
are the same.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

MODULES = {  # below verl_ext
    "agent_loop": "rollout",
    "agent_loop.call_json": "protocols.call_json",
    "agent_loop.protocol": "protocols.base",
    "agent_loop.code_protocol": "protocols.code",
    "agent_loop.hermes_protocol": "protocols.hermes",
    "agent_loop.protocols": "protocols.by_name",
    "sft_trace": "protocols.trace",
    "sft_dataset": "datasets.sft",
    "agent_loop.log_probs": "rollout.log_probs",
    "agent_loop.manager": "rollout.workers",
    "agent_loop.seeds": "rollout.seeds",
    "agent_loop.tool_loop": "rollout.loop",
    "agent_loop.tool_use": "rollout.tool_use",
    "agent_loop.tool_errors": "environments.tool_errors",
    "agent_loop.toolbox": "environments.toolbox",
    "sandbox.tool": "environments.python",
    "agent_loop.trajectory_log": "records.trajectories",
    "exclusions": "trainer.exclusions",
    "run_folder": "records.run_folder",
    "run_record": "records.run_record",
    "durable": "records.durable",
    "trainer.journal": "records.journal",
    "rollout_view": "report.rollouts",
    "charts": "report.charts",
    "verdict": "report.verdict",
    "report_comparison": "report.comparison",
    "estimators": "evaluation.estimators",
    "evaluate": "evaluation.__main__",
    "checkpoint_patches": "checkpoints.hooks",
    "manifest": "checkpoints.manifest",
    "disk": "quickstart.disk",
    "supervise": "quickstart.supervise",
    "pipeline": "quickstart.pipeline",
    "quickstart_options": "quickstart.options",
    "quickstart_source": "quickstart.source",
    "replay_buffer": "trainer.sampler",
    "trainer.settings": "settings",
    "data.problems": "datasets.problems",
    "data.rows": "datasets.rows",
    "data.text": "datasets.text",
    "data.traces": "datasets.traces",
    "data": "datasets",
    "data.pass_rates": "evaluation.pass_rates",
    "data.past_samples": "evaluation.past_samples",
    "reward.extraction": "reward.maths.extraction",
    "reward.intervals": "reward.maths.intervals",
    "reward.normalisation": "reward.maths.normalisation",
    "reward.rationals": "reward.maths.rationals",
    "reward.structure": "reward.maths.structure",
    "reward.symbolic": "reward.maths.symbolic",
    "reward.symbolic_worker": "reward.maths.symbolic_worker",
    "reward.unicode_signs": "reward.maths.unicode_signs",
    "reward.shaping": "objectives.shaping",
    "sandbox.api": "sandbox.server.api",
    "sandbox.connection": "sandbox.server.connection",
    "sandbox.disk": "sandbox.server.disk",
    "sandbox.folders": "sandbox.server.folders",
    "sandbox.isolation": "sandbox.server.isolation",
    "sandbox.landlock": "sandbox.server.landlock",
    "sandbox.metrics": "sandbox.server.metrics",
    "sandbox.namespaces": "sandbox.server.namespaces",
    "sandbox.pool": "sandbox.server.pool",
    "sandbox.preload": "sandbox.server.preload",
    "sandbox.processes": "sandbox.server.processes",
    "sandbox.program": "sandbox.server.program",
    "sandbox.seccomp": "sandbox.server.seccomp",
    "sandbox.sessions": "sandbox.server.sessions",
    "sandbox.visible": "sandbox.server.visible",
    "sandbox.worker": "sandbox.server.worker",
    "sandbox.zygote": "sandbox.server.zygote",
}
PACKAGES = ("agent_loop", "data")  # imported on the way to an old name: the name behind them is the one to warn of
COMMANDS = {"evaluate": "evaluation.__main__", "pipeline": "quickstart.__main__"}  # `python -m`; the first stays a name
AGENT_LOOPS = {"verl_ext/agent_loop/agent_loops.yaml": "verl_ext/rollout/agent_loops.yaml"}  # a file, named in YAMLs


def new_name(module: str) -> str:
    """`verl_ext.trainer.sampler` for `verl_ext.replay_buffer`; a name that did not move stays as it is."""
    package, _, name = module.partition(".")
    return f"verl_ext.{MODULES[name]}" if package == "verl_ext" and name in MODULES else module


def rename_files(config: object) -> None:
    """Put the new path of the agent loops' YAML into a run's config, in place, where the old one stands.

    Args:
        config: `DictConfig` of a run; one of SFT, or without an agent loop, is left as it is.
    """
    from omegaconf import OmegaConf, open_dict

    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    path = OmegaConf.select(config, key)
    for old, new in AGENT_LOOPS.items():
        if path is not None and (path == old or path.endswith(f"/{old}")):
            _warn(f"{key}={old}", new)
            with open_dict(config):
                OmegaConf.update(config, key, path.removesuffix(old) + new)


def install() -> None:
    """Let Python find old names; again is harmless."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # first: `verl_ext.agent_loop.seeds` must not be a second rollout/seeds.py


class _Finder(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}  # of modules at their new place, by old name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        if new == fullname:
            return None
        found = importlib.util.find_spec(new)
        return ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name.removeprefix("verl_ext.") not in PACKAGES:
            _warn(spec.name, new_name(spec.name))
        module = importlib.import_module(new_name(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run already. importlib has given it the spec of the old name: it gets its own back."""
        module.__spec__ = self._specs.pop(module.__spec__.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`, which runs the code and imports nothing."""
        name = fullname.removeprefix("verl_ext.")
        if name != "evaluate":
            _warn(fullname, new_name(fullname))
        spec = importlib.util.find_spec(f"verl_ext.{COMMANDS.get(name, MODULES[name])}")
        return spec.loader.get_code(spec.name)


def _warn(old: str, new: str) -> None:
    """A FutureWarning, because Python shows it by default."""
    warnings.warn(f"{old} is now {new}. Write the new name.", FutureWarning, stacklevel=2)
