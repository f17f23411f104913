"""What a user brings to the quickstart: problems, traces, tools, terms of the reward, another model."""

import ast
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_ext.settings import REPO
from verl_ext.settings.overrides import quoted

TOOLS = REPO / "data" / "own"
OVERRIDES = "overrides.json"  # of data/own/lengths.py, in the folder of the data


@dataclass(frozen=True)
class Own:
    """Files of a user; paths are absolute.

    Attributes:
        data: problems and answers, or rows in verl's columns; None: those of `--model`.
        traces: for SFT; None: those of `--model`, if it has any.
        tools: a file of functions, which the model calls by the hermes protocol.
        rewards: `FILE.py:NAME` or `FILE.py:NAME=WEIGHT`, terms of the reward.
    """

    data: Path | None = None
    traces: Path | None = None
    tools: Path | None = None
    rewards: tuple[str, ...] = ()

    @property
    def protocol(self) -> str:
        return "hermes" if self.tools else "code"

    def digests(self) -> dict[str, str]:
        """Return what the files hold, for the journal: with another file it is another run."""
        named = {"data": self.data, "traces": self.traces, "tools": self.tools}
        files = [Path(_parts_of(each)[0]) for each in self.rewards]
        named |= {f"reward {number}": file for number, file in enumerate(files)}
        found = {name: _digest(path) for name, path in named.items() if path}
        return found | ({"rewards": " ".join(self.rewards)} if self.rewards else {})

    def sft_overrides(self, data: Path) -> list[str]:
        protocol = ["data.retool.protocol=hermes"] if self.tools else []
        return [*protocol, *_measured(data, "sft")]

    def rl_overrides(self, data: Path) -> list[str]:
        """Return the settings of RL and evaluation, those of the lengths last."""
        return [*self.parts(), *_measured(data, "rl")]

    def parts(self) -> list[str]:
        """Return the settings that connect tools and terms."""
        found = []
        if self.tools:
            found += ["retool.protocol=hermes"]
            found += [f"actor_rollout_ref.rollout.multi_turn.function_tool_path={quoted(str(self.tools))}"]
        for path, name, weight in map(_parts_of, self.rewards):
            where = quoted(f"{path}:{name}")
            found += [f"+reward.reward_kwargs.terms.{name}={{path: {where}, weight: {weight or 1.0}}}"]
        return found

    def prepare_command(self, out: Path) -> list[str]:
        """Return the command that writes problems, and traces if there are any."""
        prompt = "hermes" if self.tools else "code_short"
        command = [sys.executable, str(TOOLS / "prepare.py"), "--data", str(self.data), "--out", str(out)]
        return [*command, "--prompt", prompt, *(["--traces", str(self.traces)] if self.traces else [])]

    def build_command(self, data: Path, out: Path, seed: int) -> list[str]:
        """Return the command that builds the tiny model."""
        command = [sys.executable, str(TOOLS / "build_model.py"), "--data", str(data), "--out", str(out)]
        return [*command, "--protocol", self.protocol, "--seed", str(seed)]

    def lengths_command(self, data: Path, model: str, rl: str, sft: str) -> list[str]:
        """Return the command that measures the data with the model's tokenizer."""
        command = [sys.executable, str(TOOLS / "lengths.py"), "--data", str(data), "--model", model]
        return [*command, "--rl", rl, "--sft", sft, *self.parts()]


def read_rewards(given: list[str]) -> tuple[str, ...]:
    """Return `FILE.py:NAME` for each function that is meant: all public ones of a file without a name.

    Raises:
        SystemExit: there is no such function, a weight is no number, or two have one name.
    """
    found: dict[str, str] = {}
    for each in given:
        path, name, weight = _parts_of(each)
        file = Path(path).resolve()
        try:
            functions = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        except (SyntaxError, ValueError) as error:
            raise SystemExit(f"--reward {each}: {file} is no Python file: {error}") from None
        named = [name] if name else [function for function in functions if not function.startswith("_")]
        if not named or (name and name not in functions):
            has = ", ".join(functions) or "none"
            raise SystemExit(f"--reward {each}: expected FILE.py:NAME of a function in {file.name}; it has {has}.")
        try:
            float(weight or 1.0)
        except ValueError:
            raise SystemExit(f"--reward {each}: its weight is {weight!r}; expected a number.") from None
        if twice := [function for function in named if function in found]:
            raise SystemExit(f"--reward {each}: there is another term {twice[0]}. Give each function another name.")
        found |= {function: f"{file}:{function}{weight and f'={weight}'}" for function in named}
    return tuple(found.values())


def _parts_of(reward: str) -> tuple[str, str, str]:
    """Return file, name and weight of `FILE.py:NAME=WEIGHT`; name and weight are "" if they are not there."""
    file, colon, function = reward.partition(".py:")
    name, _, weight = function.partition("=")
    return f"{file}.py" if colon else file, name, weight


def _measured(data: Path, stage: str) -> list[str]:
    file = data / OVERRIDES
    return json.loads(file.read_text())[stage] if file.is_file() else []


def _digest(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
