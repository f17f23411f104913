"""The run that is looked at: its composed configuration, and the few numbers that most checks need."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.doctor.shape import ModelShape, read_shape
from verl_ext.settings import Problem, Retool, SftData, SftRetool, problems

GIB = 2**30


def size(number: float) -> str:
    """Bytes in words: `61.0 GiB`, `4.5 MiB`."""
    return f"{number / GIB:,.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:,.1f} MiB"


def count(number: int) -> str:
    """`32.76 billion`, `390,400`."""
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number:,}"


@dataclass
class Run:
    """A composed run.

    Args:
        name: of its YAML.
        config: as verl would get it.
        required: keys that the YAML leaves to the launcher (`???`), see `schema.required_keys`.
        nnodes: nodes of an SFT run, which torchrun is told and the configuration is not; RL has them there.
        nproc_per_node: the same for its ranks (GPUs) on a node.
    """

    name: str
    config: DictConfig
    required: frozenset[str] = frozenset()
    nnodes: int | None = None
    nproc_per_node: int | None = None
    folder: Path = field(default_factory=Path.cwd)  # that relative paths of the configuration count from

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key, resolved; `default` where it is absent, null or `???`."""
        value = OmegaConf.select(self.config, key)
        if value is None:
            return default
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    @property
    def is_rl(self) -> bool:
        return "actor_rollout_ref" in self.config

    @property
    def entry(self) -> str:
        """verl's YAML that the run begins with."""
        return "ppo_trainer" if self.is_rl else "sft_trainer_engine"

    def own_problems(self) -> Iterator[Problem]:
        """What is wrong with the sections that are verl_ext's own; the start of a run refuses the same."""
        own = {"retool": Retool} if self.is_rl else {"retool": SftRetool, "data.retool": SftData}
        for name, section in own.items():
            yield from problems(self.get(name, {}), section, name)

    @property
    def is_on_cpu(self) -> bool:
        return self.get("trainer.device") == "cpu"

    @property
    def nodes(self) -> int:
        return self.nnodes or self.get("trainer.nnodes", 1)

    @property
    def gpus_per_node(self) -> int:
        """Ranks of a node."""
        return self.nproc_per_node or self.get("trainer.n_gpus_per_node", 1)

    @property
    def gpus(self) -> int:
        """Ranks of the whole run."""
        return self.nodes * self.gpus_per_node

    @property
    def is_separate(self) -> bool:
        """In verl's mode `separate_async`, whose rollouts come from servers on GPUs of their own."""
        return self.is_rl and self.get("trainer.v1.trainer_mode") == "separate_async"

    @property
    def has_hybrid_servers(self) -> bool:
        """Whether vLLM is on the actor's GPUs, too; in `separate_async` for validation (or as hybrid_rollout says)."""
        return self.is_rl and not (self.is_separate and not self.get("actor_rollout_ref.hybrid_engine", True))

    @property
    def rollout_gpus(self) -> int:
        """GPUs of the servers that rollouts of the training come from."""
        if not self.is_separate:
            return self.gpus
        rollout = "actor_rollout_ref.rollout"
        return self.get(f"{rollout}.nnodes", 0) * self.get(f"{rollout}.n_gpus_per_node", 0)

    @property
    def ulysses(self) -> int:
        """GPUs that share a sequence."""
        section = "actor_rollout_ref.actor.fsdp_config" if self.is_rl else "engine"
        return self.get(f"{section}.ulysses_sequence_parallel_size", 1)

    @property
    def data_parallel(self) -> int:
        return max(1, self.gpus // self.ulysses)

    @property
    def model_path(self) -> str | None:
        return self.get("actor_rollout_ref.model.path" if self.is_rl else "model.path")

    @property
    def protocol(self) -> str | None:
        """Of tool calls: code or hermes."""
        return self.get("retool.protocol" if self.is_rl else "data.retool.protocol")

    @property
    def output_folder(self) -> Path:
        return self.folder / str(self.get("trainer.default_local_dir", "checkpoints"))

    @cached_property
    def shape(self) -> ModelShape | None:
        """Of the model, where it can be told without a network."""
        return read_shape(self.model_path) if self.model_path else None

    def files(self, split: str) -> list[Path]:
        """Of `data.train_files` (split "train") or `data.val_files` ("val"), user folders expanded."""
        value = self.get(f"data.{split}_files") or []
        return [self.folder / Path(str(path)).expanduser() for path in (value if isinstance(value, list) else [value])]
