"""Evaluate a model with tools, through the agent loop and the reward manager of training.

    # a Hugging Face folder, by vLLM in this process
    python -m verl_ext.evaluation --model outputs/qwen2-32b_dapo/merged_step_400 --out outputs/evaluation/dapo
    # the model of an OpenAI-compatible server
    python -m verl_ext.evaluation --server http://127.0.0.1:8000/v1 --out outputs/evaluation/served
    # a checkpoint of an SFT or RL run, merged first
    python -m verl_ext.evaluation --checkpoint outputs/qwen2-32b_dapo --compare outputs/evaluation/sft
    # only the figures of samples that exist: those of an evaluation, or of a run's last validation
    python -m verl_ext.evaluation --samples outputs/run --compare outputs/other_run

The settings come from a run's YAML: protocol and limits from `retool`, lengths from `data`, sampling from `val_kwargs`,
vLLM's from `rollout`. Without --config, this is the run that the model's folder belongs to. For a model without a run
it is {BASE}, fitted to the GPUs of this machine, and you must give --protocol unless the model's chat template shows a
call.

The folder --out gets records/ (each sample when it ends), settings.json, result.json and result.md. The same command
continues an interrupted evaluation. A sample with an infrastructure failure (sandbox, server, verifier) is in
no figure, and the same command tries it again. The exit status is 0 if all samples are judged.
"""

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.rows import DataError
from verl_ext.evaluation.checkpoint import Checkpoint, CheckpointError, find_checkpoint, merge, settings_of
from verl_ext.evaluation.defaults import BASE, Chosen, choose, for_this_machine
from verl_ext.evaluation.problems import NAMES, read_sets
from verl_ext.evaluation.result import make_result, write_result
from verl_ext.evaluation.samples import NoSamples, find_samples
from verl_ext.evaluation.settings import ConfigError, load_config, model_fingerprint, sample_settings
from verl_ext.evaluation.store import OtherSettings, Store
from verl_ext.runs.lock import lock_folder
from verl_ext.runs.machine import environment
from verl_ext.runs.parquet import Unreadable
from verl_ext.sandbox.launch import SandboxNotReady, running_server
from verl_ext.settings.domains import read_domains

if TYPE_CHECKING:
    from omegaconf import DictConfig

KNOWN = (CheckpointError, ConfigError, DataError, NoSamples, OtherSettings, SandboxNotReady, Unreadable)
SHORTHANDS = {  # flag -> (key of the config, type)
    "n": ("actor_rollout_ref.rollout.val_kwargs.n", int),
    "temperature": ("actor_rollout_ref.rollout.val_kwargs.temperature", float),
    "top-p": ("actor_rollout_ref.rollout.val_kwargs.top_p", float),
    "top-k": ("actor_rollout_ref.rollout.val_kwargs.top_k", int),
    "max-tokens": ("data.max_response_length", int),
    "max-calls": ("retool.max_tool_calls", int),
    "protocol": ("retool.protocol", str),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        if args.compare:
            find_samples(args.compare)  # if there are none, fail at once and not after hours
        folder = args.samples or take_samples(args)
        result, text = make_result(folder, compared_with=args.compare, draws=args.draws, seed=args.seed)
        out = args.out or (None if args.samples else folder)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            write_result(out, result, text)
    except KNOWN as error:
        raise SystemExit(f"evaluate: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("evaluate: interrupted; the same command continues from here") from None
    print(text)
    if out:
        print(f"{out / 'result.md'}, result.json")
    if not args.samples and result["samples"]["judged"] < result["samples"]["wanted"]:
        raise SystemExit("evaluate: some samples are not judged; the same command tries them again")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.evaluation",
        description=__doc__.replace("{BASE}", BASE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder")
    source.add_argument("--server", metavar="URL", help="OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    of_run = "checkpoint of an SFT or RL run: the run's folder, its global_step_N, or global_step_N/actor"
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help=of_run)
    source.add_argument("--samples", type=Path, metavar="PATH", help="existing samples; nothing is generated")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of the config")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default with --checkpoint: RUN/evaluation/global_step_N)",
    )
    add("--compare", type=Path, metavar="OTHER", help="result or samples to compare with")
    add("--config", help="YAML of configs/, or a run's hydra/config.yaml (default: see above)")
    sets = f"{', '.join(NAMES)}, or a file; may be repeated (default: both years)"
    add("--data", action="append", metavar="SET", help=sets)
    add("--limit", type=int, metavar="N", help="only the first N problems of each set")
    add("--seed", type=int, default=0, help="seed of sampling and bootstrap (default: 0)")
    for flag, (key, kind) in SHORTHANDS.items():
        add(f"--{flag}", type=kind, metavar="X", help=f"short for {key}=X")
    add("--sandbox-url", help="separate several by commas (default: $SANDBOX_URL, or a sandbox of this command)")
    add("--concurrency", type=int, default=256, metavar="N", help="samples at a time (default: 256)")
    add("--draws", type=int, default=10_000, metavar="N", help="bootstrap resamples (default: 10000)")
    add = parser.add_argument_group("with --server").add_argument
    add("--tokenizer", type=Path, metavar="DIR", help="default: the folder that the server names")
    add("--served-model", default="", metavar="NAME", help="default: the first model that it serves")
    add("--api-key-env", default="", metavar="VARIABLE", help="environment variable that holds a key")
    add("--request-timeout", type=float, default=3600.0, metavar="S", help="default: 3600 s")
    add("--no-seeds", action="store_true", help="send no seeds: in long batches they crash vLLM on a CPU")
    args = parser.parse_intermixed_args(argv)
    args.data = args.data or list(NAMES)
    if not (args.out or args.checkpoint or args.samples):
        parser.error("give --out, the folder for samples and result")
    if args.server and not args.server.startswith(("http://", "https://")):
        parser.error(f"--server is {args.server!r}: expected a URL such as http://127.0.0.1:8000/v1")
    if args.overrides and args.samples:
        parser.error(f"{args.overrides[0]}: nothing is generated with --samples")
    if wrong := [each for each in args.overrides if "=" not in each and not each.startswith("~")]:
        parser.error(f"{wrong[0]!r} is not an override of the form KEY=VALUE")
    if args.api_key_env and args.api_key_env not in os.environ:
        parser.error(f"--api-key-env {args.api_key_env}: there is no such environment variable")
    for name in ("limit", "concurrency", "n", "draws"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}: expected at least 1")
    return args


def take_samples(args: argparse.Namespace) -> Path:
    """Take the samples that are missing; return their folder."""
    checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
    if args.model and not (args.model / "config.json").is_file():
        raise ConfigError(_no_model(args.model))
    config, chosen = chosen_settings(args, checkpoint)
    protocols = {name: domain.protocol for name, domain in read_domains(config).items()}
    protocol = config.retool.protocol
    rows = read_sets(args.data, protocol=protocol, of_domains=protocols, limit=args.limit)  # before a merge's minutes
    if protocols and (others := {row["data_source"] for row in rows} - protocols.keys()):
        named = ", ".join(sorted(others))
        print(f"retool.domains does not name {named}: the run's own environment and limits apply.", flush=True)
    if checkpoint:
        args.model = merge(checkpoint)
        args.out = args.out or checkpoint.run / "evaluation" / f"global_step_{checkpoint.step}"
    set_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    urls = args.sandbox_url or os.environ.get("SANDBOX_URL")
    sandbox = config.retool.sandbox
    sandbox.max_concurrency *= config.actor_rollout_ref.rollout.agent.num_workers  # one worker replaces all of them
    workers = min(os.cpu_count(), sandbox.max_concurrency)
    with lock_folder(args.out), nullcontext(urls) if urls else running_server(workers=workers) as urls:
        sandbox.urls = urls.split(",")
        config.trainer.default_local_dir = str(args.out)
        config.actor_rollout_ref.model.path = str(args.model or args.tokenizer or "")
        about = {"config": chosen.config, "overrides": chosen.overrides, "sandbox": urls, "environment": environment()}
        asyncio.run(_take_samples(args, config, about, rows, checkpoint.step if checkpoint else 0))
    return args.out


def chosen_settings(args: argparse.Namespace, checkpoint: Checkpoint | None) -> tuple["DictConfig", Chosen]:
    """Return the composed config and what it is made of; print where settings that nobody named come from."""
    given = [
        f"{key}={value}"
        for flag, (key, _) in SHORTHANDS.items()
        if (value := getattr(args, flag.replace("-", "_"))) is not None
    ]
    given += args.overrides
    if args.config:
        return load_config(args.config, given), Chosen(args.config, given, "")
    if checkpoint:
        chosen = Chosen(*settings_of(checkpoint.run), f"settings of the checkpoint's run, {checkpoint.run}")
    else:
        chosen = choose(args.model or args.tokenizer or _served(args), given, in_process=args.model is not None)
    overrides = [*chosen.overrides, *given]
    if args.server:
        config = load_config(chosen.config, overrides)
    else:
        config, overrides = for_this_machine(chosen.config, overrides)
    made = " ".join(each for each in overrides if each not in given)
    print(f"evaluate: {chosen.why}{f' ({made})' if made else ''}", flush=True)
    return config, chosen._replace(overrides=overrides)


def _served(args: argparse.Namespace) -> Path | None:
    """Return the folder of the model that a server serves, if it is on this machine."""
    set_environment()
    from verl_ext.rollout.servers import OpenAiServer, ServerFailure, ServerRefused

    key = os.environ.get(args.api_key_env, "")

    async def ask() -> str | None:
        server = OpenAiServer(args.server, model=args.served_model, api_key=key, timeout_s=args.request_timeout)
        try:
            await server.find_model()
        finally:
            await server.aclose()
        return server.root

    try:
        root = asyncio.run(ask())
    except ServerRefused as error:
        raise ConfigError(str(error)) from error
    except ServerFailure as error:
        raise SystemExit(f"evaluate: {error}") from None
    return Path(root) if root and Path(root).is_dir() else None


def _no_model(path: Path) -> str:
    if path.is_dir():
        return f"{path} is not a Hugging Face folder: it has no config.json. Merge a checkpoint first."
    download = (
        f" For a model on the hub, give the folder that `hf download {path}` prints." if not path.is_absolute() else ""
    )
    return f"{path} is not a folder. Expected a Hugging Face folder, such as RUN/merged_step_N.{download}"


async def _take_samples(
    args: argparse.Namespace, config: "DictConfig", about: dict[str, Any], rows: list[dict[str, Any]], step: int
) -> None:
    from verl_ext.evaluation.sampling import InfrastructureDown, Sampler, make_tasks, pending
    from verl_ext.rollout.servers import OpenAiServer, ServerFailure, ServerRefused, TooFewGpus, VllmServer
    from verl_ext.rollout.standalone import load_tokenizer

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    try:
        async with AsyncExitStack() as stack:
            if args.server:
                key = os.environ.get(args.api_key_env, "")
                options = {"model": args.served_model, "api_key": key, "timeout_s": args.request_timeout}
                server = OpenAiServer(args.server, seeded=not args.no_seeds, **options)
            else:
                server = VllmServer(args.model, rollout, trust_remote_code=model.trust_remote_code)
            stack.push_async_callback(server.aclose)
            folder = args.model
            if args.server:
                await server.find_model()
                folder = args.tokenizer or Path(server.root or "")
                if not (folder / "tokenizer_config.json").is_file():
                    raise ConfigError(
                        f"The server names {server.root!r}, which is not a folder here. Give --tokenizer DIR."
                    )
            tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
            if args.server:
                await server.connect(tokenizer)
                identity = {"served": server.model, "root": server.root or args.server}
                named = {"model": server.model, "server": args.server}
            else:
                identity, named = {"sha256": model_fingerprint(folder)}, {"model": str(folder)}
            if model.get("custom_chat_template"):
                tokenizer.chat_template = model.custom_chat_template
            sampler = Sampler(config, tokenizer, server, _model_type(folder))
            stack.push_async_callback(sampler.aclose)
            await sampler.check_prompts(rows)
            of_server = {"model": identity, "interface": server.interface, "seeded": server.seeded}
            template = str(tokenizer.chat_template or "")
            settings = sample_settings(config, rows, seed=args.seed, chat_template=template, **of_server)
            tasks = make_tasks(rows, settings["n"], args.seed)
            about = {"title": f"Evaluation of {named['model']}", **named, "samples": len(tasks), **about}
            store = Store(args.out, settings, about, step)
            stack.callback(store.join)
            if pending(tasks, store.rows):
                if args.model:
                    server.start()
                await sampler.run(tasks, store, concurrency=args.concurrency)
    except (ServerRefused, TooFewGpus) as error:
        raise ConfigError(str(error)) from error
    except (ServerFailure, InfrastructureDown) as error:
        raise SystemExit(
            f"evaluate: {error}\nFinished samples are kept; the same command continues from here."
        ) from None


def set_environment() -> None:
    """Set what verl and vLLM read when they are imported, as the launchers do."""
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_ext")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from verl_ext.cpu import is_cpu_only

    if is_cpu_only():
        from verl_ext.cpu.warm_python import ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def _model_type(folder: Path) -> str | None:
    """Return `model_type` of a model's config.json; None for a folder that only has a tokenizer."""
    file = folder / "config.json"
    return json.loads(file.read_text()).get("model_type") if file.is_file() else None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what this process started, like Ctrl-C
    main()
