"""Sizes of a decoder from its `config.json`: parameters, and bytes of its KV cache."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DENSE = ("qwen2", "qwen3", "llama")  # model types that `parameters` counts correctly
_QKV_BIAS = {"qwen2": True, "qwen3": False, "llama": False}

# The recipes' models, for estimates on a machine that does not have them (config.json of the hub): sizes, positions.
_KNOWN = {
    "Qwen2.5-32B-Instruct": (("qwen2", 64, 5120, 27648, 40, 8, 128, 152064, False), 32_768),
    "Qwen2.5-7B-Instruct": (("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False), 32_768),
    "Qwen3-0.6B": (("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True), 40_960),
    "Qwen3-4B-Instruct-2507": (("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True), 262_144),
}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int  # rows of the embedding, padded ones included
    tied: bool  # embedding and output head share their weights

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelShape":
        """Read `config.json`; raise ValueError for a model type that is not in DENSE, KeyError for a missing size."""
        if config.get("model_type") not in DENSE:
            raise ValueError(f"model type {config.get('model_type')!r}, expected one of {', '.join(DENSE)}")
        heads = config["num_attention_heads"]
        return cls(
            model_type=config["model_type"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", config["model_type"] != "llama"),
        )

    def config(self) -> dict[str, Any]:
        """Return the keys that `from_config` reads and that transformers' `AutoConfig.for_model` takes."""
        return {
            "model_type": self.model_type,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }

    @property
    def layer_parameters(self) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (query + 2 * key) + query * self.hidden
        if _QKV_BIAS[self.model_type]:
            attention += query + 2 * key
        if self.model_type == "qwen3":  # norms of queries and keys
            attention += 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Count the parameters of embedding, output head and last norm, which FSDP's root unit holds."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters

    def adapter_parameters(self, rank: int, targets: str | list[str] = "all-linear", excluded: Any = None) -> int:
        """Count the parameters of LoRA on the linear layers that peft adapts, rank x (inputs + outputs) each.

        Args:
            targets: `target_modules` of the model: the last parts of names, a pattern of whole names, or "all-linear",
                which leaves out the output head.
            excluded: `exclude_modules`, likewise, or None.
        """
        hidden, query, key = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"q_proj": hidden + query, "k_proj": hidden + key, "v_proj": hidden + key, "o_proj": query + hidden}
        linear = {f"self_attn.{name}": size for name, size in sizes.items()}
        linear |= {f"mlp.{name}": hidden + self.intermediate for name in ("gate_proj", "up_proj", "down_proj")}
        names = {f"model.layers.{i}.{name}": size for i in range(self.layers) for name, size in linear.items()}
        if targets != "all-linear":
            names |= dict.fromkeys(("lm_head", "model.embed_tokens"), hidden + self.vocabulary)
        return rank * sum(
            size
            for name, size in names.items()
            if (targets == "all-linear" or _is_among(name, targets)) and not (excluded and _is_among(name, excluded))
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers, 2 bytes each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


def _is_among(name: str, modules: str | list[str]) -> bool:
    """Match as peft does (tuners/tuners_utils.py, `check_target_module_exists`): a string is a regular expression."""
    if isinstance(modules, str):
        return re.fullmatch(modules, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in modules)


def read_shape(model: str) -> ModelShape | None:
    """Return the shape of a model folder, or of a recipe's model by its name on the hub; else None.

    Raises:
        ValueError: its config.json exists but is not of a dense decoder (json.JSONDecodeError is a ValueError).
        KeyError: config.json lacks a size.
    """
    if config := _read_config(model):
        return ModelShape.from_config(config)
    sizes, _ = _known(model)
    return ModelShape(*sizes) if sizes else None


def read_positions(model: str) -> int | None:
    """Return the tokens that a sequence of the model may have, its `max_position_embeddings`; None if it is unknown.

    The rule is verl 0.9.1's (workers/rollout/utils.py:31): the text model's value if the whole model has none, not
    raised by rope scaling. Works for any kind of model; raises json.JSONDecodeError.
    """
    if config := _read_config(model):
        text = config.get("text_config") or {}
        return config.get("max_position_embeddings") or text.get("max_position_embeddings")
    return _known(model)[1]


def _known(model: str) -> tuple[Any, int | None]:
    owner, _, name = model.partition("/")
    return _KNOWN.get(name if owner else "", (None, None))


def read_model_type(model: str) -> str | None:
    """Return a model folder's `model_type`; None without a config.json. Raises json.JSONDecodeError."""
    return (_read_config(model) or {}).get("model_type")


def has_images(model: str) -> bool:
    """Return whether a folder's model also reads images and comes with their processor.

    Raises:
        json.JSONDecodeError: its config.json is not JSON.
    """
    names = ("preprocessor_config.json", "processor_config.json")
    has_processor = any((Path(model).expanduser() / name).is_file() for name in names)
    return has_processor and "vision_config" in (_read_config(model) or {})


def _read_config(model: str) -> dict[str, Any] | None:
    path = Path(model).expanduser() / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
