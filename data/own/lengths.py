"""Measure problems and traces with a model's tokenizer, and write the settings that they need, for SFT and RL.

    python data/own/lengths.py --data outputs/mine/data --model outputs/mine/model \\
        --rl tiny_dapo --sft tiny_sft [KEY=VALUE ...]

The overrides of the RL run follow: its protocol and its tools make a prompt longer. The result is overrides.json in the
folder of the data, {"sft": [...], "rl": [...]}, which the quickstart adds to its commands.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from verl_ext.datasets.rows import DataError
from verl_ext.datasets.sft import tokens_of
from verl_ext.environments.base import selected
from verl_ext.environments.toolbox import load_tools
from verl_ext.evaluation.settings import load_config
from verl_ext.protocols.base import SegmentEncoder, render
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.trace import ANY_NUMBER, rendered_trace
from verl_ext.rollout.standalone import load_tokenizer
from verl_ext.rollout.ways import Way, Ways
from verl_ext.runs import durable
from verl_ext.settings import CONFIGS, REPO

STEP = 32  # tokens; lengths are rounded up to it
RESERVE = 1.5  # of a response that is longer than most (USUAL) in the traces: RL may find longer ones
USUAL = 0.95
MOST_STEPS = 500  # of SFT; each trace is seen once, if that takes no more
MOST = 4096  # tokens of a prompt, and of a response: what a CPU can still train on


class Measure:
    """Counts the tokens of rows as a run would render them."""

    def __init__(self, config: Any, model: str):
        self.tokenizer = load_tokenizer(model)
        self._kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
        self._encoder = SegmentEncoder(self.tokenizer)
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        of_model = {"tokenizer": self.tokenizer, "template_kwargs": self._kwargs}
        make = partial(make_protocol, max_parallel_calls=ANY_NUMBER, **of_model)
        self._ways = Ways(config, None, make, self.tokenizer, load_tools(multi_turn, REPO))

    def prompt(self, row: dict[str, Any]) -> int:
        way = self._ways.of(row)
        tools = way.protocol.schemas(selected(way.environments.schemas, row))
        text = render(self.tokenizer, way.protocol.prompt(row["prompt"]), self._kwargs, tools=tools)
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def trace(self, row: dict[str, Any]) -> tuple[int, int, int]:
        """Return the tokens of prompt and response, and of the longest output of a tool."""
        way: Way = self._ways.of({})
        try:
            prompt, *rest = rendered_trace(row["messages"], row["tools"], way.protocol, self.tokenizer, self._kwargs)
        except ValueError as error:
            raise DataError(f"The trace {row['id']} is none for this run: {error}") from error
        outputs = [len(tokens_of([segment], self._encoder)[0]) for segment in rest if not segment.own]
        whole = [len(tokens_of(part, self._encoder)[0]) for part in ([prompt], rest)]
        return *whole, max(outputs, default=0)


def overrides(data: Path, config: Any, sft: dict[str, Any], measure: Measure) -> dict[str, list[str]]:
    """Return the settings of both stages.

    Args:
        config: the RL run's.
        sft: the YAML of the SFT run.
    Raises:
        DataError: a prompt or a trace is longer than MOST.
    """
    rows = [row for name in ("rl_train", "eval") for row in pq.read_table(data / f"{name}.parquet").to_pylist()]
    prompts = [measure.prompt(row) for row in rows]
    longest = max(range(len(rows)), key=prompts.__getitem__)
    if prompts[longest] > MOST:
        told = rows[longest]["prompt"][-1]["content"][:80]
        raise DataError(f"A prompt has {prompts[longest]} tokens, more than {MOST}. Remove it: {told!r}")
    prompt, response, settings = _up(prompts[longest]), config.data.max_response_length, {"sft": [], "rl": []}
    file = data / "sft_train.parquet"
    if file.is_file() and "tools" in pq.read_schema(file).names:  # own traces
        parts = [measure.trace(row) for row in pq.read_table(file).to_pylist()]
        responses = sorted(part[1] for part in parts)
        usual = math.ceil(RESERVE * responses[int(USUAL * (len(responses) - 1))])
        response = _up(max(response, usual, responses[-1]))
        if response > MOST:
            raise DataError(f"A trace has {responses[-1]} tokens, more than {MOST}: check it with --max-tokens.")
        whole = _up(max(sum(part[:2]) for part in parts))
        micro_batch = max(sft["data"]["max_token_len_per_gpu"], whole)
        settings["sft"] += [f"data.max_length={whole}", f"data.max_token_len_per_gpu={micro_batch}"]
        batch = min(sft["data"]["train_batch_size"], 2 ** int(math.log2(len(parts))))
        if batch < sft["data"]["train_batch_size"]:
            settings["sft"] += [f"data.train_batch_size={batch}"]
        once = math.ceil(len(parts) / batch)
        steps = max(sft["trainer"]["total_training_steps"], min(once, MOST_STEPS))
        every = max(sft["trainer"]["save_freq"], math.ceil(steps / 4))  # a checkpoint of the 135M model is large
        settings["sft"] += [f"trainer.total_training_steps={steps}"]
        settings["sft"] += [f"trainer.{name}={every}" for name in ("save_freq", "test_freq")]
        if not pq.read_metadata(data / "sft_val.parquet").num_rows:
            settings["sft"] += ["trainer.test_freq=-1", "data.val_files=[]"]
        settings["sft"] += [f"trainer.total_epochs={steps}"]  # an epoch has at least one step, so these are enough
        output = max(config.retool.max_tool_response_tokens, *(part[2] for part in parts))
        settings["rl"] += [f"retool.max_tool_response_tokens={output}"]
    settings["rl"] += [f"data.max_prompt_length={prompt}", f"data.max_response_length={response}"]
    micro_batch = max(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, prompt + response)
    settings["rl"] += [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={micro_batch}"]
    return settings


def _up(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that data/own/prepare.py wrote")
    parser.add_argument("--model", required=True, help="folder or hub name of the model")
    parser.add_argument("--rl", required=True, help="the RL run's YAML, such as tiny_dapo")
    parser.add_argument("--sft", required=True, help="the SFT run's, such as tiny_sft")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of the RL run")
    args = parser.parse_intermixed_args()
    config, sft = load_config(args.rl, args.overrides), yaml.safe_load((CONFIGS / f"{args.sft}.yaml").read_text())
    settings = overrides(args.data, config, sft, Measure(config, args.model))
    durable.write_text(args.data / "overrides.json", json.dumps(settings, indent=1) + "\n")
    for stage, lines in settings.items():
        print(f"{stage}: {' '.join(lines) or 'as in its YAML'}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(str(error)) from None
