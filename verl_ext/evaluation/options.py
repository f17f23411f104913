"""The options of a command that takes samples: an evaluation, and `verl_ext.traces sample`."""

import argparse
import os
from pathlib import Path
from typing import Any

from verl_ext.evaluation.problems import NAMES

SHORTHANDS = {  # flag -> (key of the config, type)
    "n": ("actor_rollout_ref.rollout.val_kwargs.n", int),
    "temperature": ("actor_rollout_ref.rollout.val_kwargs.temperature", float),
    "top-p": ("actor_rollout_ref.rollout.val_kwargs.top_p", float),
    "top-k": ("actor_rollout_ref.rollout.val_kwargs.top_k", int),
    "max-tokens": ("data.max_response_length", int),
    "max-calls": ("retool.max_tool_calls", int),
    "protocol": ("retool.protocol", str),
}
STYLES = ("continue", "tools", "turns")  # of rollout/chat.py


def add_sampling(parser: argparse.ArgumentParser) -> Any:
    """Add the options; return the group of those that say which model samples, of which one is needed."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder")
    source.add_argument("--server", metavar="URL", help="OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    source.add_argument("--chat", metavar="URL", help="chat endpoint of any model, such as https://api.example.org/v1")
    of_run = "checkpoint of an SFT or RL run: the run's folder, its global_step_N, or global_step_N/actor"
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help=of_run)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of the config")
    add("--config", help="YAML of configs/, or a run's hydra/config.yaml (default: that of the model's run)")
    sets = f"{', '.join(NAMES)}, or a file; may be repeated (an evaluation takes both years by default)"
    add("--data", action="append", metavar="SET", help=sets)
    add("--limit", type=int, metavar="N", help="only the first N problems of each set")
    add("--seed", type=int, default=0, help="seed of sampling and bootstrap (default: 0)")
    for flag, (key, kind) in SHORTHANDS.items():
        add(f"--{flag}", type=kind, metavar="X", help=f"short for {key}=X")
    add("--sandbox-url", help="separate several by commas (default: $SANDBOX_URL, or a sandbox of this command)")
    add("--concurrency", type=int, default=256, metavar="N", help="samples at a time (default: 256)")
    add = parser.add_argument_group("with --server or --chat").add_argument
    add("--tokenizer", type=Path, metavar="DIR", help="default: the folder that the server names, or the run's model")
    add("--served-model", default="", metavar="NAME", help="default: the first model that it serves")
    add("--api-key-env", default="", metavar="VARIABLE", help="environment variable that holds a key")
    add("--request-timeout", type=float, default=3600.0, metavar="S", help="default: 3600 s")
    add("--no-seeds", action="store_true", help="send no seeds: in long batches they crash vLLM on a CPU")
    what = "how --chat shows a conversation (default: the first that the endpoint can do; see verl_ext/rollout/chat.py)"
    add("--style", choices=STYLES, default="", help=what)
    return source


def check_sampling(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command if an option makes no sense."""
    check_endpoint(parser, args, "server", "chat")
    if wrong := [each for each in args.overrides if "=" not in each and not each.startswith("~")]:
        parser.error(f"{wrong[0]!r} is not an override of the form KEY=VALUE")
    for name in ("limit", "concurrency", "n"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}: expected at least 1")
    if args.chat and not (args.tokenizer or args.config):
        parser.error("--chat needs --tokenizer DIR, the model that is to learn: it counts the tokens of a response")


def check_endpoint(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End the command if an address, given by an option of one of the names, or the key cannot be."""
    for name in names:
        url = getattr(args, name)
        if url and not url.startswith(("http://", "https://")):
            parser.error(f"--{name} is {url!r}: expected a URL such as http://127.0.0.1:8000/v1")
    if args.api_key_env and args.api_key_env not in os.environ:
        parser.error(f"--api-key-env {args.api_key_env}: there is no such environment variable")
