"""Measure what the environments cost that need no network: CPU-ms of an episode with one call, and of each later call.

    python -m scripts.bench.environments [--episodes 40]

CPU-ms, unlike wall time, hardly depend on what else the machine does. They are of this process with all that it
started: the sandbox server with its programs, and MCP servers. Episodes run one after the other, without a model: each
is opened, makes its calls and is closed, as the agent loop does it. The corpus of `search` has 10,000 documents of 80
words. The server of `mcp` does next to nothing, so that its figures are the client's and those of a process that
starts; `skyrl_gym` steps an environment that does nothing.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from scripts.studies.shared import command_line, cpu_seconds, markdown
from verl_ext.environments.by_name import Environments
from verl_ext.environments.corpus import CACHE_VARIABLE
from verl_ext.protocols.base import Call
from verl_ext.rollout.lives import Life
from verl_ext.rollout.ways import Way
from verl_ext.sandbox import running_server
from verl_ext.settings import Domain

LATER = 10  # calls of the longer episodes beyond the first
TASK = {"raw_prompt": [{"role": "user", "content": "?"}], "uid": "0", "extra_info": {}}
SERVER = """
import json, sys
TOOL = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "echo", "version": "1"}},
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "said"}]},
    }.get(asked["method"])
    said = {"result": answer} if answer else {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)
"""
GYM = """
class Nothing:
    def __init__(self, env_config=None, extras=None):
        self.turns = 0
    def init(self, prompt):
        return prompt, {}
    def step(self, action):
        return {"observations": [{"role": "user", "content": "go on"}], "reward": 0.0, "done": False, "metadata": {}}
"""


def main() -> None:
    """Print a table with a line for each environment."""
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--episodes", type=int, default=40, help="of each length (default: %(default)s)")
    parser.add_argument("--only", nargs="*", help="names of the table's lines")
    args = parser.parse_args()
    options = ("--preload", "numpy,sympy,scipy", "--max-sessions", "4")
    with running_server(workers=1, options=options) as url, tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        lines = entries(Path(folder))
        asyncio.run(measure_all(url, {name: lines[name] for name in args.only or lines}, args.episodes))


def entries(folder: Path) -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Return name -> (entry, tool, arguments), and write what they need; a tool of "" is a turn without a call."""
    rng, words = random.Random(0), [f"word{number}" for number in range(5000)]
    documents = (
        {"id": str(n), "title": f"Title {n}", "text": " ".join(rng.choices(words, k=80))} for n in range(10_000)
    )
    (folder / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "server.py").write_text(SERVER)
    (folder / "nothing.py").write_text(GYM)
    search = {"name": "search", "corpus": str(folder / "corpus.jsonl")}
    mcp = {"name": "mcp", "command": [sys.executable, "-IS", str(folder / "server.py")]}
    plot = {"expressions": ["x^2 - 4", "2*x"], "variable": "x", "lower": -5, "upper": 5}
    return {
        "python, print": ("python", "code_interpreter", {"code": "print(6 * 7)"}),
        "notebook, print": ("notebook", "code_interpreter", {"code": "print(6 * 7)"}),
        "search, search": (search, "search", {"query": "word7 word77 word777"}),
        "search, read": (search, "read", {"id": "7"}),
        "math_tools, simplify": ("math_tools", "simplify", {"expression": "(x + 1)^2", "form": "expand"}),
        "math_tools, solve": ("math_tools", "solve", {"equations": ["x + y = 3", "x*y = 2"], "unknowns": ["x", "y"]}),
        "math_tools, plot": ("math_tools", "plot", plot),
        "mcp, its own process": (mcp, "echo", {"text": "a"}),
        "mcp, shared process": (mcp | {"shared": True}, "echo", {"text": "a"}),
        "skyrl_gym, step": ({"name": "skyrl_gym", "env": f"{folder}/nothing.py:Nothing"}, "", {}),
    }


async def measure_all(url: str, lines: dict[str, tuple[Any, str, dict[str, Any]]], episodes: int) -> None:
    sandbox = {"urls": [url], "timeout_s": 30, "memory_limit_mb": 1024, "queue_timeout_s": 30, "max_concurrency": 4}
    settings = {"sandbox": sandbox | {"echo_last_expression": False, "max_calls_per_s": None}, "traceback": "full"}
    config, rows = OmegaConf.create({"retool": settings}), []
    for name, (entry, tool, arguments) in lines.items():
        way = Way(None, None, Environments(entry, config), Domain())
        kept = await held(way) if "shared" in name else None
        await live(way, tool, arguments, 2, 1)
        one, more = [await live(way, tool, arguments, episodes, calls) for calls in (1, 1 + LATER)]
        if kept is not None:
            await kept.close()
        rows.append((name, f"{one:.1f}", f"{(more - one) / LATER:.1f}"))
        print(f"{name}: {one:.1f} CPU-ms an episode with one call, {(more - one) / LATER:.1f} a later call", flush=True)
    print(markdown(("environment, call", "episode with one call", "later call"), rows))


async def held(way: Way) -> Any:
    """Return an open environment, which keeps what episodes share, as other episodes do in a run."""
    environment = way.environments.make()
    await environment.open(TASK)
    return environment


async def live(way: Way, tool: str, arguments: dict[str, Any], episodes: int, calls: int) -> float:
    """Live episodes one after the other; return CPU-ms of each."""
    before = cpu_seconds(psutil.Process())
    for _ in range(episodes):
        async with Life(way).opened(TASK) as life:
            assert not life.failure, life.failure
            for _ in range(calls):
                if tool:
                    ((result, _),) = await life.run([Call(tool, arguments, 0)], 0)
                    assert not result.failure and not result.error, result
                else:
                    await life.reply("a turn")
    return (cpu_seconds(psutil.Process()) - before) / episodes * 1000


if __name__ == "__main__":
    main()
