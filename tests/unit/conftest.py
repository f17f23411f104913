"""Fixtures that several test modules use. Heavy packages are imported by the fixtures that need them."""

import asyncio
import importlib.util
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt

from verl_ext.settings import CONFIGS, VERL

REPO = Path(__file__).resolve().parents[2]

os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_ext"  # as the launchers do; read when verl is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("studies", "bench"):  # no part of a run
            item.add_marker(pytest.mark.nightly)


@wrapt.when_imported("hydra._internal.config_repository")
def parse_each_yaml_once(hydra: ModuleType) -> None:
    """Hydra parses 35 YAMLs of verl and of configs/ for each run that it composes, which is half of its 0.4 s."""
    load, parsed = hydra.ConfigRepository.load_config, {}
    lasting = {str(CONFIGS), str(VERL / "trainer" / "config")}

    def load_once(self: Any, config_path: str) -> Any:
        places = tuple(source.path for source in self.sources)
        if any(place.startswith("/") and place not in lasting for place in places):  # a test may write there again
            return load(self, config_path)
        if (places, config_path) not in parsed:
            parsed[places, config_path] = pickle.dumps(load(self, config_path))
        return pickle.loads(parsed[places, config_path])

    hydra.ConfigRepository.load_config = load_once


@pytest.fixture(autouse=True)
def all_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's import of model_hosting_container_standards sets the root logger, and pytest's handler there, to ERROR."""
    logging.getLogger().setLevel(logging.WARNING)
    caplog.handler.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """A script of scripts/ as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, REPO / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group with this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_tools() -> SimpleNamespace:
    """The scripts of data/tiny_tools as modules: `task`, `prepare`, `build_model`."""
    folder = str(REPO / "data" / "tiny_tools")
    sys.path.insert(0, folder)
    import build_model
    import prepare
    import task

    sys.path.remove(folder)
    return SimpleNamespace(task=task, prepare=prepare, build_model=build_model)


@pytest.fixture(scope="session")
def small_task() -> SimpleNamespace:
    """The scripts of data/small as modules: `word_problems`, `prepare`, `build_model`."""
    modules = {}
    for name in ("word_problems", "prepare", "build_model"):
        path = REPO / "data" / "small" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name if name == "word_problems" else f"small_{name}", path)
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[name]  # dataclasses look there
        spec.loader.exec_module(modules[name])
    return SimpleNamespace(**modules)


@pytest.fixture(scope="session")
def tokenizer(tiny_tools: SimpleNamespace) -> Any:
    """The tiny task's tokenizer; every digit and operator is a token."""
    return tiny_tools.build_model.build_tokenizer()


@pytest.fixture(scope="session")
def qwen_tokenizer() -> Any:
    """A byte-level BPE as Qwen2.5's, small and trained on the traces, with its added tokens and its chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        (REPO / "tests/data/traces.jsonl").read_text(encoding="utf-8").splitlines(),
        trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = (REPO / "tests/data/qwen2.5_chat_template.jinja").read_text()
    return tokenizer


@pytest.fixture
def encode(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@dataclass
class ScriptedServer:
    """The far side of `server_manager`: answers each turn with the next of `turns`, cut to `max_tokens` as vLLM would.

    A turn is token ids, or (ids, stop_reason, extra_fields). Log-probs are -0.001, -0.002, ... over all tokens sent.
    """

    turns: Iterable[Any]
    with_log_probs: bool = True
    calls: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = iter(self.turns)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int):
        from verl.workers.rollout.replica import TokenOutput

        self.calls.append({"request_id": request_id, "prompt_ids": list(prompt_ids), **sampling_params})
        assert sampling_params["max_tokens"] >= 1, "vLLM refuses max_tokens < 1"
        turn = next(self._turns)
        ids, stop_reason, extra_fields = turn if isinstance(turn, tuple) else (turn, "completed", {})
        ids = list(ids)[: sampling_params["max_tokens"]]
        before = sum(map(len, self.sent))
        self.sent.append(ids)
        log_probs = [-(before + i + 1) / 1000 for i in range(len(ids))] if self.with_log_probs else None
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason=stop_reason, extra_fields=extra_fields)


@dataclass
class ScriptedSandbox:
    """The far side of the sandbox client: gives each call the next of `results`, a RunResult or what was printed."""

    results: Iterable[Any]
    codes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._results = iter(self.results)

    async def run(
        self, code: str, *, timeout_s: float, memory_limit_mb: int, echo_last_expression: bool, session_id: str = ""
    ):
        from verl_ext.sandbox.client import RunResult

        assert (timeout_s, memory_limit_mb, echo_last_expression) == (5, 256, bool(session_id))
        self.codes.append(code)
        result = next(self._results)
        if isinstance(result, str):
            result = RunResult("ok", result, "", 0, queue_s=0.0, run_s=0.0, attempts=1, message="")
        return result

    async def end_session(self, session_id: str) -> None:
        """End a notebook's session; there is none."""


@pytest.fixture(scope="session")
def roll_out() -> Callable[..., Any]:
    """Run the real RetoolAgentLoop between scripted server and sandbox; returns (episode, server, sandbox)."""
    from omegaconf import OmegaConf

    from verl_ext.rollout.loop import RetoolAgentLoop

    def run(
        tokenizer: Any,
        turns: Iterable[Any],
        results: Iterable[Any] = (),
        *,
        question: str = "1+1?",
        response_length: int = 100,
        logprobs: bool = True,
        tools: Iterable[Any] = (),
        max_parallel_calls: int = 1,
        agent_loop_manager_class: str | None = "verl_ext.rollout.workers.LeanAgentLoopManager",
        prompt: dict[str, Any] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> tuple[Any, ScriptedServer, ScriptedSandbox]:
        sandbox_settings = {
            "urls": ["http://127.0.0.1:1"],
            "max_concurrency": 4,
            "timeout_s": 5,
            "memory_limit_mb": 256,
            "max_calls_per_s": None,
            "echo_last_expression": False,
            "queue_timeout_s": 5,
        } | settings.pop("sandbox", {})
        retool = {
            "protocol": "code",
            "repair_json": False,
            "max_tool_calls": 3,
            "run_last_code": False,
            "max_malformed_calls": 3,
            "max_tool_response_tokens": 48,
            "traceback": "last_line",
            "recorder": {"enable": False},
        } | settings
        config = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "rollout": {
                        "response_length": response_length,
                        "prompt_length": 5000,
                        "seed": seed,
                        "multi_turn": {"max_parallel_calls": max_parallel_calls},
                        "agent": {"agent_loop_manager_class": agent_loop_manager_class},
                    }
                },
                "retool": retool | {"sandbox": sandbox_settings},
            }
        )
        server, sandbox = ScriptedServer(turns, with_log_probs=logprobs), ScriptedSandbox(results)

        async def roll() -> Any:
            loop = RetoolAgentLoop(
                trainer_config=SimpleNamespace(config=config),
                server_manager=server,
                tokenizer=tokenizer,
                processor=None,
                dataset_cls=None,
                data_config=SimpleNamespace(config=OmegaConf.create({})),
                hf_model_type="qwen2",
                tools=SimpleNamespace(tools=list(tools)),
            )
            row = {"uid": "prompt-0", "session_id": 0, "raw_prompt": [{"role": "user", "content": question}]}
            row |= prompt or {}
            return await loop.roll_out({"temperature": 1.0, "logprobs": logprobs}, **row)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("verl_ext.environments.interpreter.shared_client", lambda _: sandbox)
            return asyncio.run(roll()), server, sandbox

    return run


@pytest.fixture(scope="session")
def cpu_platform() -> ModuleType:
    """verl_ext.cpu.patches, installed; skips if verl uses an accelerator."""
    from verl_ext.cpu import is_cpu_only

    if not is_cpu_only():
        pytest.skip("torch was built for an accelerator: the CPU platform is not active here")
    import verl  # noqa: F401  imports verl_ext, which installs the patches

    from verl_ext.cpu import patches

    return patches


@pytest.fixture(scope="module")
def box_server() -> Iterator[Any]:
    """A sandbox server that is there for its boxes."""
    from tests.unit.sandbox.boxes import need_boxes
    from tests.unit.sandbox.server_process import Server

    server = Server("--preload", "")
    try:
        need_boxes(server.url)
        yield server
    finally:
        server.stop()
