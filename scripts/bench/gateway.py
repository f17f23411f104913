"""Measure what the gateway costs: CPU time of its process for each request, beside the same calls made directly.

    python -m scripts.bench.gateway                     # exit code 1 above the limits
    python -m scripts.bench.gateway --profile 50        # and where the time goes at 50 turns, with the tiny template

The far side is a script that answers at once, so that nothing but the gateway is measured: HTTP, the comparison of
messages, the chat template, the tokens of what is new. The server is a process of its own; its CPU time is read before
and after. `direct` is a call of `generate` with the tokens of each prompt, in the same process.
"""

import argparse
import asyncio
import contextlib
import copy
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil

from scripts.studies.shared import REPO, command_line, markdown

TURNS = {5: 2.0, 20: None, 50: 4.0}  # of a conversation -> limit of CPU-ms for a request; None: only told
SESSIONS = {5: 40, 20: 10, 50: 4}  # in a part
PARTS = 5  # the figure is their median
CHARACTERS = 200  # of a message
ANSWER_TOKENS = 51


def templates() -> dict[str, Any]:
    """Return tokenizers by the name of their templates: the tiny task's, and with Qwen2.5's template."""
    sys.path.insert(0, str(REPO / "data" / "tiny_tools"))
    import build_model

    sys.path.pop(0)
    tiny = build_model.build_tokenizer()
    qwen = copy.deepcopy(tiny)
    qwen.chat_template = (REPO / "tests" / "data" / "qwen2.5_chat_template.jinja").read_text()
    return {"tiny": tiny, "qwen2.5": qwen}


async def serve(name: str, profile: bool) -> None:
    """Serve sessions until the standard input ends. Each line asks for a number of sessions, or for direct calls."""
    from verl_ext.gateway.server import Gateway
    from verl_ext.gateway.session import Sampled
    from verl_ext.gateway.template import Template

    tokenizer = templates()[name]
    text = "so the answer is 12 and we go on " * 2
    answer = [*tokenizer.encode(text, add_special_tokens=False)[: ANSWER_TOKENS - 1], tokenizer.eos_token_id]
    log_probs = [-0.5] * len(answer)

    async def generate(request_id: str, prompt_ids: list[int], params: dict[str, Any]) -> Sampled:
        return Sampled(answer, log_probs, [(0, len(answer), 1)])

    gateway = Gateway(generate, Template(tokenizer))
    await gateway.start()
    profiler, endpoints = cProfile.Profile() if profile else None, []
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.startswith("open"):
            count = int(line.split()[1])
            endpoints = [gateway.open({"temperature": 1.0, "logprobs": 0}, 10**6, max_turns=64) for _ in range(count)]
            print(json.dumps([endpoint.base_url for endpoint in endpoints]), flush=True)
            if profiler:
                profiler.enable()
        else:
            if profiler:
                profiler.disable()
            prompts = []
            for endpoint in endpoints:
                prompts += [node.place.prompt_ids for node in (await gateway.seal(endpoint)).nodes]
            process = psutil.Process()
            before = sum(process.cpu_times()[:2])
            for prompt in prompts:
                await generate("r", list(prompt), {"temperature": 1.0, "logprobs": 0, "max_tokens": 100})
            print(1e3 * (sum(process.cpu_times()[:2]) - before) / len(prompts), flush=True)
    if profiler:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    await gateway.stop()


async def converse(urls: list[str], turns: int, stream: bool) -> None:
    """Play conversations by plain HTTP, one after the other: the client costs little, in this process."""
    import aiohttp

    async with aiohttp.ClientSession() as http:
        for url in urls:
            messages = [{"role": "user", "content": "x" * CHARACTERS}]
            for _ in range(turns):
                body = {"model": "m", "messages": messages, "stream": stream}
                async with http.post(f"{url}/chat/completions", json=body) as answer:
                    said = await answer.text()
                    assert answer.status == 200, said
                chunks = [each[6:] for each in said.split("\n\n") if each.startswith("data: {")] if stream else [said]
                choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
                told = [choice.get("delta") or choice.get("message") or {} for choice in choices]
                messages.append({"role": "assistant", "content": "".join(each.get("content") or "" for each in told)})
                messages.append({"role": "user", "content": "y" * CHARACTERS})


class Server:
    """The process that is measured."""

    def __init__(self, name: str, *, profile: bool = False):
        command = [sys.executable, "-m", "scripts.bench.gateway", "--serve", name, *["--profile", "0"] * profile]
        self._process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._watched = psutil.Process(self._process.pid)

    def _ask(self, line: str) -> Any:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def measure(self, turns: int, sessions: int, stream: bool) -> tuple[float, float]:
        """Return the CPU-ms of a request through the gateway, and of one made directly."""
        urls = self._ask(f"open {sessions}")
        before = sum(self._watched.cpu_times()[:2])
        asyncio.run(converse(urls, turns, stream))
        used = sum(self._watched.cpu_times()[:2]) - before
        return 1e3 * used / (turns * sessions), self._ask("direct")

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def server(name: str, *, profile: bool = False) -> Iterator[Server]:
    found = Server(name, profile=profile)
    try:
        yield found
    finally:
        found.stop()


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--profile", type=int, metavar="TURNS", help="profile conversations of so many turns instead")
    parser.add_argument("--template", choices=("tiny", "qwen2.5"), default="tiny", help="for --profile")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.profile is not None))
        return 0
    if args.profile:
        with server(args.template, profile=True) as found:
            print(found.measure(args.profile, SESSIONS[5], False))
        return 0
    lines, is_over = [], False
    for name in ("tiny", "qwen2.5"):
        with server(name) as found:
            found.measure(5, 20, False)  # warm-up
            for turns, limit in TURNS.items():
                for stream in (False, True):
                    parts = [found.measure(turns, SESSIONS[turns], stream) for _ in range(PARTS)]
                    through, direct = (statistics.median(each) for each in zip(*parts, strict=True))
                    is_over |= limit is not None and through > limit
                    told = "" if limit is None else f"{limit:g}"
                    lines.append([name, f"{turns}", "yes" if stream else "no", f"{through:.2f}", f"{direct:.3f}", told])
    print(f"CPU-ms a request, messages of {CHARACTERS} characters, median of {PARTS} parts")
    print(markdown(["template", "turns", "stream", "gateway", "direct", "limit"], lines))
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
