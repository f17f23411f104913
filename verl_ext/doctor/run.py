"""The run under examination: its composed configuration, and the few numbers that most checks need."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from verl_ext.datasets.peek import Sample, sample
from verl_ext.datasets.rows import DataError
from verl_ext.memory.shape import ModelShape, read_positions, read_shape
from verl_ext.settings import Retool, SftData, SftRetool
from verl_ext.settings.checks import Problem, problems
from verl_ext.settings.domains import use_files

ULYSSES = "ulysses_sequence_parallel_size"
ATTENTION, FLASH_ATTN = "model.override_config.attn_implementation", "flash_attention_2"  # verl's default
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Setting:
    """A key of a run's configuration, read on access; an SFT run reads the key `sft` if that is given."""

    def __init__(self, key: str, default: Any = None, *, sft: str = ""):
        self.key, self.default, self.sft = key, default, sft or key

    def __get__(self, run: "Run", _: type) -> Any:
        return run.get(self.key if run.is_rl else self.sft, self.default)


@dataclass
class Run:
    """A composed run."""

    name: str  # of its YAML
    config: DictConfig  # as verl would get it
    required: frozenset[str] = frozenset()  # keys that the YAML leaves to the launcher (`???`), see `required_keys`
    nnodes: int | None = None  # of an SFT run, which passes it to torchrun; RL has it in the configuration
    nproc_per_node: int | None = None  # the same for its ranks (GPUs) on a node
    folder: Path = field(default_factory=Path.cwd)  # that relative paths of the configuration count from
    _samples: dict[Path, Sample] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.is_rl = "actor_rollout_ref" in self.config
        self.entry = "ppo_trainer" if self.is_rl else "sft_trainer_engine"  # verl's YAML that the run begins with
        self.model = "actor_rollout_ref.model" if self.is_rl else "model"  # sections of the model, what shards it,
        self.engine = f"{ACTOR}.fsdp_config" if self.is_rl else "engine"
        self.optim = f"{ACTOR}.optim" if self.is_rl else "optim"  # and its optimizer
        if self.is_rl:
            with suppress(ValueError):  # a wrong table of domains, which check_config reports
                use_files(self.config)

    batch = Setting("data.train_batch_size")  # prompts of an RL step, traces of an SFT step
    n = Setting(f"{ROLLOUT}.n")  # responses to a prompt
    tensor_parallel = Setting(f"{ROLLOUT}.tensor_model_parallel_size", 1)  # GPUs of a vLLM server that share each layer
    ulysses = Setting(f"{ACTOR}.fsdp_config.{ULYSSES}", 1, sft=f"engine.{ULYSSES}")  # GPUs that share a sequence
    # Size of a micro-batch on a GPU: in tokens if batches are dynamic, else in sequences.
    is_dynamic = Setting(f"{ACTOR}.use_dynamic_bsz", sft="data.use_dynamic_bsz")
    tokens_per_gpu = Setting(f"{ACTOR}.ppo_max_token_len_per_gpu", sft="data.max_token_len_per_gpu")
    micro_batch = Setting(f"{ACTOR}.ppo_micro_batch_size_per_gpu", sft="data.micro_batch_size_per_gpu")
    model_path = Setting("actor_rollout_ref.model.path", sft="model.path")
    lora_rank = Setting("actor_rollout_ref.model.lora_rank", 0, sft="model.lora_rank")  # 0: no adapters
    attention = Setting(f"actor_rollout_ref.{ATTENTION}", FLASH_ATTN, sft=ATTENTION)
    is_packed = Setting("actor_rollout_ref.model.use_remove_padding", True, sft="model.use_remove_padding")
    protocol = Setting("retool.protocol", sft="data.retool.protocol")  # of tool calls: code or hermes
    device = Setting("trainer.device")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the resolved value of a dotted key; `default` if it is absent, null or `???`."""
        value = OmegaConf.select(self.config, key)
        if value is None:
            return default
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def tree(self, *, resolve: bool) -> dict[str, Any]:
        """Return the whole configuration as plain containers."""
        return cast(dict[str, Any], OmegaConf.to_container(self.config, resolve=resolve))

    def listed(self, key: str) -> list:
        """Return as a list a value that may be a list or one of its items; empty if it is absent."""
        value = self.get(key) or []
        return value if isinstance(value, list) else [value]

    @property
    def text_column(self) -> str:
        """Return the column of the data with prompts of RL or traces of SFT."""
        return self.get("data.prompt_key", "prompt") if self.is_rl else self.get("data.messages_key", "messages")

    def sample(self, path: Path) -> Sample:
        """Return some rows of a file, which is read once. Raises DataError if it cannot be."""
        if path not in self._samples:
            columns = [self.text_column, "data_source", "ability", "reward_model", "agent_name", "extra_info"]
            columns.append("tools_kwargs")
            if not self.is_rl:
                columns = [self.text_column, self.get("data.tools_key", "tools")]
            self._samples[path] = sample(path, self.text_column, columns)
        return self._samples[path]

    def own_problems(self, *kinds: str) -> Iterator[Problem]:
        """Yield what is wrong with verl_ext's own sections; the start of a run refuses the same."""
        own = {"retool": Retool} if self.is_rl else {"retool": SftRetool, "data.retool": SftData}
        for name, section in own.items():
            yield from (each for each in problems(self.get(name, {}), section, name) if each.kind in kinds)

    def files(self, split: str) -> list[Path]:
        """Return `data.train_files` (split "train") or `data.val_files` ("val"), user folders expanded."""
        return [self.folder / Path(str(path)).expanduser() for path in self.listed(f"data.{split}_files")]

    def rows(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (where, row) of the samples of a split; none of a file that `check_files` cannot read."""
        for path in self.files(split):
            with suppress(DataError, OSError):
                yield from self.sample(path).rows

    def all_files(self) -> list[tuple[str, Path]]:
        """Return (split, file) of all data files."""
        return [(split, path) for split in ("train", "val") for path in self.files(split)]

    @property
    def has_own_reward(self) -> bool:
        """Whether verl_ext's reward manager scores the responses."""
        return self.is_rl and "verl_ext" in str(self.get("reward.reward_manager.module.path", ""))

    @property
    def nodes(self) -> int:
        return self.nnodes or self.get("trainer.nnodes", 1)

    @property
    def gpus_per_node(self) -> int:
        """Number of ranks on a node."""
        return self.nproc_per_node or self.get("trainer.n_gpus_per_node", 1)

    @property
    def gpus(self) -> int:
        """Number of ranks of the whole run."""
        return self.nodes * self.gpus_per_node

    @property
    def is_separate(self) -> bool:
        """Whether the mode is verl's `separate_async`, whose rollouts come from servers on separate GPUs."""
        return self.is_rl and self.get("trainer.v1.trainer_mode") == "separate_async"

    @property
    def has_hybrid_servers(self) -> bool:
        """Whether vLLM is also on the actor's GPUs; in `separate_async` for validation (or as hybrid_rollout says)."""
        return self.is_rl and not (self.is_separate and not self.get("actor_rollout_ref.hybrid_engine", True))

    @property
    def sends_adapters(self) -> bool:
        """Whether vLLM gets LoRA's adapters rather than the weights with the adapters added to them."""
        return self.is_rl and self.lora_rank > 0 and not self.get("actor_rollout_ref.model.lora.merge")

    @property
    def rollout_gpus(self) -> int:
        """Number of GPUs of the servers from which training rollouts come."""
        if not self.is_separate:
            return self.gpus
        return self.get(f"{ROLLOUT}.nnodes", 0) * self.get(f"{ROLLOUT}.n_gpus_per_node", 0)

    @property
    def data_parallel(self) -> int:
        return max(1, self.gpus // self.ulysses)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        if not self.is_rl:
            return self.get("data.max_length")
        return self.get("data.max_prompt_length") + self.get("data.max_response_length")

    @cached_property
    def positions(self) -> int | None:
        """The model's `max_position_embeddings`, as verl reads it (and overrides it); None if that is not known."""
        overrides = self.get(f"{self.model}.override_config") or {}
        overrides = overrides.get("model_config", overrides)
        try:
            return overrides.get("max_position_embeddings") or read_positions(self.model_path or "")
        except ValueError:  # not JSON: `shape_or_why` reports it
            return None

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence that vLLM has room for; verl replaces null by the model's positions."""
        return self.get(f"{ROLLOUT}.max_model_len") or self.positions

    @property
    def output_folder(self) -> Path:
        return self.folder / str(self.get("trainer.default_local_dir", "checkpoints"))

    @cached_property
    def shape_or_why(self) -> tuple[ModelShape | None, str]:
        """Return sizes of the model, or why they cannot be determined without a network, and what to do."""
        try:
            shape = read_shape(self.model_path) if self.model_path else None
        except (ValueError, KeyError) as error:
            return None, f"{self.model_path}/config.json: {error} -> Watch the first steps' memory."
        return shape, f"{self.model_path} is not a folder with a config.json -> Set its path, or download the model."

    @property
    def shape(self) -> ModelShape | None:
        return self.shape_or_why[0]
