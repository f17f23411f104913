"""Helpers for tests of weights: versions of a tiny model or a run, an actor that sends them, recomputed log-probs."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from verl_ext.cpu.warm_python import ENVIRONMENT

SAME = 1e-4  # log-probs of one version, by vLLM and by transformers


def build_versions(folder: Path) -> list[torch.nn.Module]:
    """Build versions 0, 1, 2 of random weights; `folder` gets version 0 as a model, and the weights of all."""
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data" / "tiny_tools"))
    import build_model
    from transformers import GenerationConfig

    sys.path.pop(0)
    tokenizer = build_model.build_tokenizer()
    versions = [build_model.build_model(tokenizer, seed).eval() for seed in range(3)]
    for number, model in enumerate(versions):
        model.config._attn_implementation = "eager"
        model.config.max_position_embeddings = 4096  # for requests that run for seconds
        torch.save(model.state_dict(), folder / f"{number}.pt")
    tokenizer.save_pretrained(folder / "model")
    versions[0].save_pretrained(folder / "model")
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / "model")
    return versions


@contextmanager
def cluster(
    python: str, config: DictConfig, *, num_gpus: int, environment: Mapping[str, str] = ENVIRONMENT
) -> Iterator[None]:
    """Start Ray with the servers of a run of `config`; `python` starts its processes, by default for a CPU."""
    import ray
    import verl  # noqa: F401
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_ext.fleet import weight_update

    ray.init(
        num_cpus=16,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": dict(environment), "py_executable": python},
    )
    verls = RolloutReplicaRegistry._registry["vllm"]
    try:
        weight_update.install(config)
        yield
    finally:
        RolloutReplicaRegistry._registry["vllm"] = verls
        ray.shutdown()


class Actor:
    """The actor's worker group, as far as verl's CheckpointEngineManager knows it: rank 0, which publishes a file."""

    world_size = 1

    def __init__(self, folder: Path):
        import ray

        @ray.remote
        class Rank:
            def __init__(self) -> None:
                import verl  # noqa: F401  verl_ext's platform, which it activates

                from verl_ext.cpu.checkpoint_engine import SharedFileCheckpointEngine

                self.engine = SharedFileCheckpointEngine(bucket_size=0, is_master=True)

            def call(self, method: str, **arguments: Any) -> Any:
                return getattr(self.engine, method)(**arguments)

            async def send(self, path: str) -> dict:
                await self.engine.send_weights(iter(torch.load(path).items()))
                return {}

        self.rank, self.folder = Rank.remote(), folder

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        return [self.rank.call.remote(method[0], **{name: values[0] for name, values in arguments.items()})]

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        return [self.rank.send.remote(str(self.folder / f"{global_steps}.pt"))]


@torch.no_grad()
def redone(
    models: list[torch.nn.Module], prompt: list[int], ids: list[int], runs: list[tuple[int, int]]
) -> list[float]:
    """Recompute log-probs of `ids`: each position by the weights that sampled the next token, over the cache so far."""
    from transformers import DynamicCache

    sequence, cache, result, start = torch.tensor([prompt + ids]), DynamicCache(), [], 0
    done = 0
    for tokens, version in runs:
        end = len(prompt) - 1 + done + tokens
        logits = models[version](input_ids=sequence[:, start:end], past_key_values=cache, use_cache=True).logits[0]
        log_probs = logits[-tokens:].float().log_softmax(-1)
        result += log_probs.gather(-1, sequence[0, end - tokens + 1 : end + 1, None])[:, 0].tolist()
        start, done = end, done + tokens
    return result


def difference(models: list[torch.nn.Module], prompt: list[int], output: Any, runs: list[tuple[int, int]]) -> float:
    found = redone(models, prompt, list(output.token_ids), runs)
    return max(abs(a - b) for a, b in zip(found, output.log_probs, strict=True))


def moved(runs: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    """Move the first boundary by so many tokens."""
    (first, old), (second, new), *rest = runs
    return [(first + by, old), (second - by, new), *rest]


def load_version(run: Path, model: Path, version: int) -> torch.nn.Module:
    """Load the weights after step `version` in fp32; 0 means those before the first step."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    if version:
        shard = run / f"global_step_{version}" / "actor" / "model_world_size_1_rank_0.pt"
        weights = torch.load(shard, weights_only=False)
        loaded.load_state_dict({name: getattr(value, "_local_tensor", value) for name, value in weights.items()})
    return loaded


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, rows: list[dict]) -> list[torch.Tensor]:
    """Return float[tokens] of each response at its temperature, by default 1; one forward pass over all of it."""
    result = []
    for row in rows:
        ids = torch.cat([row["prompt"], row["response"]]).long()[None]
        logits = model(input_ids=ids).logits[0, len(row["prompt"]) - 1 : -1].float() / row.get("temperature", 1.0)
        result.append(logits.log_softmax(-1).gather(-1, row["response"].long()[:, None])[:, 0])
    return result


LOG_PROBS = ("rollout_log_prob", "old_log_prob", "log_prob")  # of vLLM, of the trainer before the step, of its update


def recorded_responses(run: Path, model: Path, step: int) -> list[dict]:
    """Return the rows for `log_probs_of` of the responses that a step trained on and whose tokens are recorded."""
    from transformers import AutoTokenizer

    from verl_ext.records import store

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = {row["uid"]: row for row in store.rows(run, columns=("uid", "prompt", "sampling"))}
    responses: dict[tuple[str, int], list[dict]] = {}
    for token in store.rows(run, "tokens"):
        if token["step"] == step:
            responses.setdefault((token["uid"], token["session"]), []).append(token)
    return [
        {
            "prompt": torch.tensor(tokenizer.encode(asked[uid]["prompt"], add_special_tokens=False)),
            "temperature": json.loads(asked[uid]["sampling"])["temperature"],
            "response": torch.tensor([token["id"] for token in tokens]),
            "mask": torch.tensor([token["mask"] for token in tokens]),
            "version": [token["version"] for token in tokens],  # None: a tool's token
            **{name: torch.tensor([token[name] or 0.0 for token in tokens]) for name in LOG_PROBS},
        }
        for (uid, _), tokens in responses.items()
    ]


def differences(model: torch.nn.Module, rows: list[dict], column: str = "rollout_log_prob") -> torch.Tensor:
    """Return |log-prob by `model` - recorded log-prob|, float[sampled tokens]."""
    redone = log_probs_of(model, rows)
    return torch.cat([(each - row[column]).abs()[row["mask"]] for each, row in zip(redone, rows, strict=True)])
