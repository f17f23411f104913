"""The servers that the agent loop uses in an evaluation: vLLM in this process, or an OpenAI-compatible server.

Both replace verl's `LLMServerClient` of training: `generate` takes and returns token ids.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import uuid4

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase
from verl.workers.rollout.replica import TokenOutput

from verl_ext.protocols.base import decoded
from verl_ext.protocols.code import CODE_START
from verl_ext.reward.openai_endpoint import OpenAiEndpoint, RequestFailed
from verl_ext.rollout.sampled import FAILED_STOPS
from verl_ext.rollout.stops import end_id

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.v1.engine.async_llm import AsyncLLM

# The `sampling_params` that every server gets, so that no generation_config.json decides instead.
NEUTRAL: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
_PROBE = "<code>\nprint(1 + 1)\n</code>\n<interpreter>\n2\n</interpreter>\n\\boxed{2}"


class ServerFailure(RuntimeError):
    """The server did not answer, however often it was asked: an infrastructure failure, not the model's."""


class ServerRefused(RuntimeError):
    """The server takes requests but not this one: a wrong model, key, tokenizer or length. A retry would not help."""


class TooFewGpus(ValueError):
    """The config spreads the model over more GPUs than this machine has."""


class Server(Protocol):
    interface: str  # how requests are made, for the result
    max_model_len: int | None  # tokens, prompt and response; None if the server does not say
    seeded: bool  # it takes a seed for each sample

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int = 0
    ) -> TokenOutput: ...

    async def aclose(self) -> None: ...


async def ask(endpoint: OpenAiEndpoint, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what an endpoint answers to a GET, or to a POST of `body`: an object with `choices` or `data`.

    Raises:
        ServerFailure, ServerRefused: see there.
    """
    where = f"{endpoint.url}{path}"
    try:
        answer = await endpoint.request(path, body)
    except RequestFailed as error:
        if error.is_refusal:
            raise ServerRefused(f"{where} refused the request with {error}") from error
        raise ServerFailure(f"{where} failed {endpoint.max_attempts} times, the last time: {error}") from error
    if not isinstance(answer, dict) or not ("choices" in answer or "data" in answer):
        raise ServerFailure(f"{where} answered {str(answer)[:200]!r}, expected `choices` or `data`")
    return answer


def turn_seed(seed: int, prompt_ids: Sequence[int]) -> int:
    """Return the seed of one turn: each turn of a sample has a different one, because its prompt grows."""
    return (seed + len(prompt_ids)) % 2**63


def _vary_seed(params: dict[str, Any], prompt_ids: Sequence[int]) -> None:
    if "seed" in params:
        params["seed"] = turn_seed(params["seed"], prompt_ids)


class VllmServer:
    """vLLM's asynchronous engine on a Hugging Face folder, with the engine settings of `rollout`.

    The settings for training are left out: weight transfer, sleeping, dummy weights. It tells the log-probs of the
    tokens only if `sampling_params` has `logprobs: 0`.

    Raises:
        TooFewGpus: `rollout` wants more GPUs than there are.
    """

    interface = "vLLM in this process, token ids in, token ids out"

    def __init__(self, model: Path, rollout: DictConfig, *, trust_remote_code: bool = False):
        devices, wanted = torch.cuda.device_count(), rollout.tensor_model_parallel_size * rollout.data_parallel_size
        if wanted > max(devices, 1):
            raise TooFewGpus(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size x data_parallel_size is {wanted}, but there are "
                f"{devices} GPUs here. Lower them, or on a CPU add +hardware=cpu."
            )
        # vLLM 0.28.0, v1/worker/gpu_model_runner.py:3825 sets the generator of a seeded request back when its prompt is
        # computed in pieces. A CPU's generator cannot be set back, and the engine dies.
        self.seeded = devices > 0
        self.max_model_len = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        batched = rollout.max_num_batched_tokens
        given = OmegaConf.select(rollout, "engine_kwargs.vllm") or OmegaConf.create()
        own = cast(dict[str, Any], OmegaConf.to_container(given))
        own.pop("worker_extension_cls", None)  # loads weights that a trainer sends
        self._settings = {
            "model": str(model),
            "trust_remote_code": trust_remote_code,
            "max_model_len": self.max_model_len,
            # as in training (vllm_async_server.py:338). With vLLM's own, raw_logprobs, FlashInfer may sample on CUDA
            # (v1/sample/ops/topk_topp_sampler.py, line 90 in vLLM 0.24.0, 97 in 0.28.0)
            "logprobs_mode": rollout.logprobs_mode,
            "dtype": rollout.dtype,
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "data_parallel_size": rollout.data_parallel_size,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": batched if rollout.enable_chunked_prefill else max(batched, self.max_model_len),
            "enable_chunked_prefill": rollout.enable_chunked_prefill,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "enforce_eager": rollout.enforce_eager,
            "quantization": rollout.get("quantization"),
            "disable_log_stats": True,
            **{name: value for name, value in own.items() if value is not None},
        }
        self._engine: AsyncLLM | None = None

    def start(self) -> None:
        """Load the weights; call it within the event loop that `generate` runs in."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self.seeded:
            # torch's query for the GPUs makes CUDA unusable in forks; vLLM 0.24.0 (utils/system_utils.py:148) does not
            # notice, because CUDA is not initialised. In training vLLM runs in a Ray actor, where it spawns.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._settings))

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int = 0
    ) -> TokenOutput:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._engine is not None, "`start` comes first"
        params = NEUTRAL | sampling_params
        _vary_seed(params, prompt_ids)
        try:
            prompt = TokensPrompt(prompt_token_ids=prompt_ids)
            outputs = self._engine.generate(prompt, SamplingParams(**params), request_id=uuid4().hex)
            final = [output async for output in outputs][-1]  # the only one, as `output_kind` asks
        except EngineDeadError as error:
            raise ServerFailure(f"vLLM's engine died: {error}") from error
        if not final.outputs or final.outputs[0].finish_reason in FAILED_STOPS:
            raise ServerFailure("vLLM's engine failed or aborted the request")
        written = final.outputs[0]
        ids = list(written.token_ids)
        each_token = cast("list[dict[int, Logprob]] | None", written.logprobs)  # of another form only if asked for
        log_probs = None if each_token is None else [each[i].logprob for i, each in zip(ids, each_token, strict=True)]
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={})

    async def aclose(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


class OpenAiServer:
    """An OpenAI-compatible server's `/v1/completions`, by token ids if it can, else by text; see `connect`.

    An answer in text is tokenised here: the tokens may differ from those that the model sampled. A stop string that the
    server cut off is added again if the server says that it stopped there, or if a `<code>` is open.

    Args:
        url: such as "http://127.0.0.1:8000/v1".
        model: as the server names it; "" takes the first of its `/models`.
        seeded: send a seed with each sample, which kills vLLM 0.28 on a CPU (see VllmServer).
        timeout_s, max_attempts: limits for one turn; see `OpenAiEndpoint`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str = "",
        seeded: bool = True,
        timeout_s: float = 3600.0,
        max_attempts: int = 4,
    ):
        self._endpoint = OpenAiEndpoint(url, api_key=api_key, timeout_s=timeout_s, max_attempts=max_attempts)
        self.url, self.model, self.seeded = self._endpoint.url, model, seeded
        self.root: str | None = None  # the folder or name of the weights, if the server says
        self.max_model_len: int | None = None
        self.interface = ""
        self._ids_in = self._ids_out = True
        self._tokenizer: PreTrainedTokenizerBase  # from `connect`

    async def find_model(self) -> None:
        """Ask the server what it serves; set `model`, `root` and `max_model_len`.

        Raises:
            ServerRefused: the server does not serve `model`.
            ServerFailure: it does not answer.
        """
        served = (await ask(self._endpoint, "/models"))["data"]
        chosen = next((each for each in served if self.model in ("", each["id"])), None)
        if chosen is None:
            names = ", ".join(each["id"] for each in served)
            raise ServerRefused(f"{self.url} does not serve {self.model!r}; it serves {names}. Give one of those.")
        self.model, self.root, self.max_model_len = chosen["id"], chosen.get("root"), chosen.get("max_model_len")

    async def connect(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out what the server can do, after `find_model`; set `interface`.

        Raises:
            ServerRefused: the server refuses every form of request, or tokenises differently from `tokenizer`.
            ServerFailure: it does not answer.
        """
        self._tokenizer = tokenizer
        ids = tokenizer.encode(_PROBE, add_special_tokens=False)
        request = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        try:
            answer = await self._choice(request | {"return_token_ids": True})
        except ServerRefused:  # a strict server refuses the unknown field
            answer = {}
        self._ids_out = bool(answer.get("token_ids"))
        if not self._ids_out:
            try:
                await self._choice(request)
            except ServerRefused:
                self._ids_in = False
                await self._choice(request | {"prompt": _PROBE})
        self.interface = (
            f"/v1/completions, {'token ids' if self._ids_in else 'text'} in, "
            f"{'token ids' if self._ids_out else 'text (tokenised again here)'} out"
        )
        if self._ids_out:
            text = {"prompt": _PROBE, "add_special_tokens": False, "return_token_ids": True}
            theirs = (await self._choice(request | text)).get("prompt_token_ids")
            if theirs != ids:
                raise ServerRefused(
                    f"{self.url} tokenises {_PROBE[:24]!r}... as {(theirs or [])[:8]}..., the tokenizer here as "
                    f"{ids[:8]}... Give the folder of the served model with --tokenizer."
                )

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int = 0
    ) -> TokenOutput:
        params = {name: value for name, value in sampling_params.items() if name not in ("output_kind", "logprobs")}
        _vary_seed(params, prompt_ids)
        request = {"model": self.model, "prompt": prompt_ids if self._ids_in else decoded(self._tokenizer, prompt_ids)}
        if self._ids_out:
            choice = await self._choice(request | NEUTRAL | params | {"return_token_ids": True})
            return TokenOutput(token_ids=choice["token_ids"], stop_reason="completed", extra_fields={})
        for name in ("stop_token_ids", "include_stop_str_in_output"):  # vLLM's
            params.pop(name, None)
        if params.get("top_k", -1) <= 0:
            params.pop("top_k", None)
        choice = await self._choice(request | params)
        ids = self._ids_of(choice, params.get("stop") or [])[: params["max_tokens"]]
        return TokenOutput(token_ids=ids, stop_reason="completed", extra_fields={})

    def _ids_of(self, choice: Mapping[str, Any], stops: Sequence[str]) -> list[int]:
        """Return the tokens of an answer in text, with what ended it: the stop string, or the end token."""
        text = choice["text"]
        if choice.get("finish_reason") != "stop" or text.endswith(tuple(stops) or "\0"):
            return self._tokenizer.encode(text, add_special_tokens=False)
        told = next((name for name in ("stop_reason", "matched_stop") if name in choice), None)  # vLLM's, SGLang's
        for stop in stops:
            if choice[told] == stop if told else text.rfind(CODE_START) > text.rfind(stop):
                return self._tokenizer.encode(text + stop, add_special_tokens=False)
        return [*self._tokenizer.encode(text, add_special_tokens=False), end_id(self._tokenizer)]

    async def _choice(self, request: dict[str, Any]) -> dict[str, Any]:
        choice = (await ask(self._endpoint, "/completions", request))["choices"][0]
        if (reason := choice.get("finish_reason")) in FAILED_STOPS:
            raise ServerFailure(f"{self.url} ended the request with {reason!r}")
        return choice

    async def aclose(self) -> None:
        await self._endpoint.aclose()
