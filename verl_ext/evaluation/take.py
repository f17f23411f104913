"""Take samples as the options say: find settings, model and sandbox, and let the agent loop run.

Nothing heavy is imported before the settings are known to be right.
"""

import argparse
import asyncio
import os
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.rows import DataError
from verl_ext.evaluation.checkpoint import Checkpoint, CheckpointError, find_checkpoint, merge, settings_of
from verl_ext.evaluation.defaults import Chosen, choose, for_this_machine
from verl_ext.evaluation.meter import Meter
from verl_ext.evaluation.options import SHORTHANDS
from verl_ext.evaluation.problems import read_sets
from verl_ext.evaluation.settings import ConfigError, load_config, model_fingerprint, sample_settings
from verl_ext.evaluation.store import OtherSettings, Store
from verl_ext.memory.shape import read_model_type
from verl_ext.runs.lock import lock_folder
from verl_ext.runs.machine import environment
from verl_ext.runs.parquet import Unreadable
from verl_ext.sandbox.launch import SandboxNotReady, running_server
from verl_ext.settings.domains import read_domains

if TYPE_CHECKING:
    from omegaconf import DictConfig

KNOWN = (CheckpointError, ConfigError, DataError, OtherSettings, SandboxNotReady, Unreadable)  # the message is enough


def take_samples(args: argparse.Namespace, meter: Meter | None = None) -> Path:
    """Take the samples that are missing; return their folder.

    Args:
        args: the options of `add_sampling`, with `out` (None with a checkpoint: a folder of its run).
        meter: counts what they use; by default without a limit.
    Raises:
        KNOWN: the message is for a user.
        SystemExit: the server or the sandbox is down.
    """
    checkpoint = find_checkpoint(args.checkpoint) if args.checkpoint else None
    if args.model and not (args.model / "config.json").is_file():
        raise ConfigError(_no_model(args.model))
    config, chosen = chosen_settings(args, checkpoint)
    protocol = config.retool.protocol
    protocols = {name: domain.protocol or protocol for name, domain in read_domains(config).items()}
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
        asyncio.run(_take_samples(args, config, about, rows, checkpoint.step if checkpoint else 0, meter or Meter()))
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
        folder = args.model or args.tokenizer or _served(args)
        chosen = choose(folder, given, in_process=args.model is not None)
    overrides = [*chosen.overrides, *given]
    if args.server or args.chat:
        config = load_config(chosen.config, overrides)
    else:
        config, overrides = for_this_machine(chosen.config, overrides)
    made = " ".join(each for each in overrides if each not in given)
    print(f"{chosen.why[0].upper()}{chosen.why[1:]}{f' ({made})' if made else ''}", flush=True)
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
        raise SystemExit(str(error)) from None
    return Path(root) if root and Path(root).is_dir() else None


def _no_model(path: Path) -> str:
    if path.is_dir():
        return f"{path} is not a Hugging Face folder: it has no config.json. Merge a checkpoint first."
    download = (
        f" For a model on the hub, give the folder that `hf download {path}` prints." if not path.is_absolute() else ""
    )
    return f"{path} is not a folder. Expected a Hugging Face folder, such as RUN/merged_step_N.{download}"


async def _take_samples(
    args: argparse.Namespace,
    config: "DictConfig",
    about: dict[str, Any],
    rows: list[dict[str, Any]],
    step: int,
    meter: Meter,
) -> None:
    from verl_ext.evaluation.sampling import InfrastructureDown, Sampler, make_tasks, pending
    from verl_ext.rollout.servers import ServerFailure, ServerRefused, TooFewGpus
    from verl_ext.rollout.standalone import load_tokenizer

    model = config.actor_rollout_ref.model
    try:
        async with AsyncExitStack() as stack:
            server = _make_server(args, config)
            stack.push_async_callback(server.aclose)
            folder = await _tokenizer_folder(args, server, config)
            tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code)
            identity, named = await _connected(args, server, tokenizer, folder)
            if model.get("custom_chat_template"):
                tokenizer.chat_template = model.custom_chat_template
            sampler = Sampler(config, tokenizer, server, read_model_type(str(folder)))
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
                await sampler.run(tasks, store, concurrency=args.concurrency, meter=meter)
    except (ServerRefused, TooFewGpus) as error:
        raise ConfigError(str(error)) from error
    except (ServerFailure, InfrastructureDown) as error:
        raise SystemExit(f"{error}\nFinished samples are kept; the same command continues from here.") from None


def _make_server(args: argparse.Namespace, config: "DictConfig") -> Any:
    from verl_ext.rollout.chat import ChatServer
    from verl_ext.rollout.servers import OpenAiServer, VllmServer

    key = os.environ.get(args.api_key_env, "")
    options = {"model": args.served_model, "api_key": key, "timeout_s": args.request_timeout}
    if args.chat:
        return ChatServer(args.chat, style=args.style, **options)
    if args.server:
        return OpenAiServer(args.server, seeded=not args.no_seeds, **options)
    model = config.actor_rollout_ref.model
    return VllmServer(args.model, config.actor_rollout_ref.rollout, trust_remote_code=model.trust_remote_code)


async def _tokenizer_folder(args: argparse.Namespace, server: Any, config: "DictConfig") -> Path:
    if args.model:
        return args.model
    if args.chat:
        folder = args.tokenizer or Path(config.actor_rollout_ref.model.path)
        named = f"The tokenizer of the model that is to learn is needed, but {str(folder)!r}"
    else:
        await server.find_model()
        folder = args.tokenizer or Path(server.root or "")
        named = f"The server names {server.root!r}, which"
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"{named} is not a folder here. Give --tokenizer DIR.")
    return folder


async def _connected(
    args: argparse.Namespace, server: Any, tokenizer: Any, folder: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Connect to the server; return what distinguishes its model from others, and its names for a reader."""
    if args.model:
        return {"sha256": model_fingerprint(folder)}, {"model": str(folder)}
    if args.chat:
        await server.connect()
        return {"served": server.model, "root": server.url}, {"model": server.model, "server": args.chat}
    await server.connect(tokenizer)
    served = {"served": server.model, "root": server.root or args.server}
    return served, {"model": server.model, "server": args.server}


def set_environment() -> None:
    """Set what verl and vLLM read when they are imported, as the launchers do."""
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_ext")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from verl_ext.cpu import is_cpu_only

    if is_cpu_only():
        from verl_ext.cpu.warm_python import ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
