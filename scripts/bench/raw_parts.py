"""Compare an RL step with its raw parts: only vLLM on the step's tokens, and only plain PyTorch on its batch.

    python -m scripts.bench.raw_parts [--run outputs/small] [--step N]

Needs a finished run of `quickstart.sh --model small`: its metrics, records and SFT model (weights do not matter
to the times). Nothing else may run. Prints seconds of the step, of the parts, and their ratio.

Generation: offline vLLM with the engine settings of the run's config, and one request per model turn with the recorded
number of tokens; a turn starts when the one before it has ended. Update: a forward and a backward pass of transformers'
model, with a prompt and its group's responses in one row, in which each response sees the prompt and itself; one or two
groups in a row, whichever is faster; cross-entropy of the responses' rows in chunks. The reward, tool calls, sending
weights to vLLM, and the optimizer's clip and step are left out.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.studies.shared import command_line, markdown, metrics_of, whole_cpu
from verl_ext.cpu.patches import round_products
from verl_ext.cpu.warm_python import ENVIRONMENT
from verl_ext.records import store
from verl_ext.settings import compose_run

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor

CONFIG = "smollm2_dapo", ["+hardware=cpu_small"]
CHUNK = 256  # rows of the cross-entropy, each over the whole vocabulary


class Response(NamedTuple):
    """Token ids; `turns`: (start among `ids`, tokens) of each turn of the model."""

    group: str
    right: bool
    prompt: list[int]
    ids: list[int]
    turns: list[tuple[int, int]]


def read_response(record: Mapping[str, Any], encode: Callable[[str], list[int]]) -> Response:
    """Read the response of a trajectory. Texts are encoded anew, and cut or padded to the recorded number of tokens."""
    ids: list[int] = []
    turns = []
    for turn in record["turns"]:
        own = encode(turn["text"])[: turn["tokens"]]
        own += own[-1:] * (turn["tokens"] - len(own))
        if turn["role"] == "model":
            turns.append((len(ids), len(own)))
        ids += own
    return Response(record["uid"], bool(record["acc"]), encode(record["prompt"]), ids, turns)


def trained_groups(responses: Sequence[Response], number: int) -> list[list[Response]]:
    """Choose the groups of the update as dynamic sampling does: those with right and wrong answers come first."""
    groups: dict[str, list[Response]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response)
    order = sorted(groups.values(), key=lambda group: len({response.right for response in group}), reverse=True)
    return order[:number]


class Row(NamedTuple):
    """Groups as one row of T tokens: a prompt, then each of its responses. M rows of logits are asked for."""

    ids: "Tensor"  # int64[1, T]
    positions: "Tensor"  # int64[1, T]
    mask: "Tensor"  # bool[1, 1, T, T], what each token sees: its group's prompt and its own response up to itself
    places: "Tensor"  # int64[M], positions whose next token the model wrote
    labels: "Tensor"  # int64[M], that token


def as_row(groups: Sequence[Sequence[Response]]) -> Row:
    import torch

    ids, positions, places, labels = [], [], [], []
    owner: list[tuple[int, int]] = []  # of each token: its group, and its response, 0 for the prompt
    for group_number, group in enumerate(groups):
        prompt, start_of_group = group[0].prompt, len(ids)
        ids += prompt
        positions += range(len(prompt))
        owner += [(group_number, 0)] * len(prompt)
        for number, response in enumerate(group, 1):
            start = len(ids)
            for turn_start, length in response.turns:
                for place in range(turn_start, turn_start + length):
                    places.append(start + place - 1 if place else start_of_group + len(prompt) - 1)
                    labels.append(response.ids[place])
            ids += response.ids
            positions += range(len(prompt), len(prompt) + len(response.ids))
            owner += [(group_number, number)] * len(response.ids)
    of_group, of_response = torch.tensor(owner).unbind(1)
    sees = (of_response[None] == of_response[:, None]) | (of_response[None] == 0)
    sees &= of_group[None] == of_group[:, None]
    mask = sees & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    return Row(
        torch.tensor([ids]), torch.tensor([positions]), mask[None, None], torch.tensor(places), torch.tensor(labels)
    )


def forward_backward(model: Any, row: Row) -> float:
    """Add the gradients of the summed cross-entropy, and return that sum. Logits exist for one chunk at a time."""
    import torch

    hidden = model.model(row.ids, attention_mask=row.mask, position_ids=row.positions, use_cache=False)[0][
        0, row.places
    ]
    leaf, total = hidden.detach().requires_grad_(), 0.0
    for states, labels in zip(leaf.split(CHUNK), row.labels.split(CHUNK), strict=True):
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), labels, reduction="sum")
        loss.backward()
        total += loss.item()
    hidden.backward(leaf.grad)
    return total


def time_update(model_path: str, groups: Sequence[Sequence[Response]]) -> float:
    """Time a forward and backward pass over the groups, in rows of one or two groups, whichever is faster (seconds)."""
    import torch
    from transformers import AutoModelForCausalLM

    round_products()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    taken_s = {}
    for together in (1, 2):
        rows = [as_row(groups[start : start + together]) for start in range(0, len(groups), together)]
        forward_backward(model, rows[0])
        started = time.perf_counter()
        for row in rows:
            forward_backward(model, row)
        taken_s[together] = time.perf_counter() - started
    print("Raw update:", *(f"{each:.1f} s with {together} in a row;" for together, each in taken_s.items()))
    return min(taken_s.values())


def time_generation(model_path: str, responses: Sequence[Response], config: "DictConfig") -> float:
    """Time offline vLLM on the responses' turns, in seconds, after one short request as warm-up."""
    from verl_ext.cpu.patches import alias_vllm_distribution

    alias_vllm_distribution()
    from omegaconf import OmegaConf
    from vllm import LLM, SamplingParams

    same = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill")
    same += ("enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "logprobs_mode")
    options = {key: config[key] for key in same} | OmegaConf.to_container(config.engine_kwargs.vllm, resolve=True)
    # verl's and ours, with another sampler; it would be in this process, which verl's binds to its parent's life.
    options.pop("worker_extension_cls", None)
    engine = LLM(model_path, **options).llm_engine

    def ask(name: str, ids: list[int], tokens: int) -> None:
        # A log-prob of each sampled token, as the run asks for.
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=config.temperature, logprobs=0)
        engine.add_request(name, {"prompt_token_ids": ids}, params)

    ask("warm-up", responses[0].prompt[:8], 4)
    while engine.has_unfinished_requests():
        engine.step()
    started = time.perf_counter()
    for number, response in enumerate(responses):
        ask(f"{number}-0", response.prompt, response.turns[0][1])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                number, turn = (int(part) + at for at, part in enumerate(output.request_id.split("-")[:2]))
                response = responses[number]
                if turn < len(response.turns):
                    start, tokens = response.turns[turn]
                    ask(f"{number}-{turn}", response.prompt + response.ids[:start], tokens)
    return time.perf_counter() - started


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--run", type=Path, default=Path("outputs/small"), help="a quickstart's folder")
    parser.add_argument("--rl", type=Path, help="folder of the RL run (default: rl in that folder)")
    parser.add_argument("--step", type=int, help="step to compare (default: the one with the median time)")
    args = parser.parse_args()
    # As recipe/retool/run_smollm2_dapo.sh sets them. MALLOC_* have no effect, because malloc has already read its own.
    os.environ.update(ENVIRONMENT | whole_cpu())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from transformers import AutoTokenizer

    rl = args.rl or args.run / "rl"
    metrics = metrics_of(rl)
    step_of = dict(zip(*metrics.curve("timing_s/step"), strict=True))
    step = args.step or min(step_of, key=lambda each: abs(step_of[each] - statistics.median(step_of.values())))
    taken = {}
    for key in ("timing_s/gen", "timing_s/update_actor", "global_seqlen/mean"):
        taken[key] = dict(zip(*metrics.curve(key), strict=True))[step]

    model_path, config = str(args.run / "sft" / "merged"), compose_run(*CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    records = store.rows(rl, columns=("uid", "step", "validate", "acc", "prompt", "turns"))
    responses = [
        read_response(record, lambda text: tokenizer.encode(text, add_special_tokens=False))
        for record in records
        if record["step"] == step and not record["validate"]
    ]
    if not responses:
        raise SystemExit(f"{rl}/records has no response of step {step}. Choose a step of a finished run with --step.")
    groups = trained_groups(responses, config.data.train_batch_size)
    trained = sum(len(response.prompt) + len(response.ids) for group in groups for response in group)
    written = sum(tokens for response in responses for _, tokens in response.turns)

    update_s = time_update(model_path, groups)
    generation_s = time_generation(model_path, responses, config.actor_rollout_ref.rollout)
    print(
        f"\nStep {step}: {len(responses)} responses with {written} tokens of the model; the update has {trained} "
        "tokens of prompts\nand responses, each prompt counted once per response "
        f"(in the run: {taken['global_seqlen/mean']:.0f}).\n"
    )
    parts = {
        "generation": (taken["timing_s/gen"], generation_s),
        "update": (taken["timing_s/update_actor"], update_s),
        "step": (step_of[step], generation_s + update_s),
    }
    rows = [[name, f"{run:.1f}", f"{raw:.1f}", f"{run / raw:.2f}"] for name, (run, raw) in parts.items()]
    print(markdown(["", "run, s", "raw, s", "run / raw"], rows))


if __name__ == "__main__":
    main()
