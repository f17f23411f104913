"""What the quickstart can make: the models and tasks that `--model` names, and what differs between them."""

import ast
import hashlib
import io
import json
import tokenize
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_ext.settings import REPO


@dataclass(frozen=True)
class Rung:
    """One model with its task; `name` is that of `--model`. `tools` has prepare.py and build_model.py."""

    name: str
    tools: Path
    sft_launcher: str  # in recipe/retool
    rl_launcher: str
    model_seed: bool  # whether build_model.py draws weights, by `--seed`
    shares_python: bool  # one server forks the processes of all stages; else each launcher sets its own threads
    titles: tuple[str, str]  # of the data's step and the SFT's
    task: tuple[
        str, ...
    ]  # globs of the repository's files that define the task: its data and its two configs, none of a machine's

    def config(self, stage: str) -> str:
        """Return the name of the YAML of "sft" or "rl"."""
        launcher = self.sft_launcher if stage == "sft" else self.rl_launcher
        return launcher.removeprefix("run_").removesuffix(".sh")

    def task_digest(self) -> str:
        """Return `digest` of what `task` names: results with a different digest are another task's."""
        return digest(*self.task)


def digest(*patterns: str) -> str:
    """Return the first digits of the SHA-256 of the repository's files that globs name, in order.

    For YAML only the values count, not comments; for Python, all except comments, docstrings and empty lines.
    """
    files = sorted(path for pattern in patterns for path in REPO.glob(pattern))
    return hashlib.sha256(b"".join(map(_content, files))).hexdigest()[:16]


def _content(path: Path) -> bytes:
    match path.suffix:
        case ".yaml":
            return json.dumps(yaml.safe_load(path.read_text())).encode()
        case ".py":
            return _code(path.read_text(encoding="utf-8")).encode()
    return path.read_bytes()


def _code(source: str) -> str:
    """Return code as written: syntax trees, and what is made of them, differ between versions of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_body and ast.get_docstring(node) is not None:
            start, end = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            lines[start:end] = [""] * (end - start)
    return "\n".join(line.rstrip() for line in lines if line.strip())


SHARED = "configs/shared/*.yaml"  # of the runs of both rungs
RUNGS = {
    "tiny": Rung(
        name="tiny",
        tools=REPO / "data" / "tiny_tools",
        sft_launcher="run_tiny_sft.sh",
        rl_launcher="run_tiny_dapo.sh",
        model_seed=True,
        shares_python=True,
        titles=("word problems, tokenizer, random model", "multi-turn SFT, FSDP2 on two ranks"),
        task=("data/tiny_tools/*.py", "configs/tiny_*.yaml", SHARED),
    ),
    "small": Rung(
        name="small",
        tools=REPO / "data" / "small",
        sft_launcher="run_smollm2_sft.sh",
        rl_launcher="run_smollm2_dapo.sh",
        model_seed=False,
        shares_python=False,
        titles=("word problems; SmolLM2-135M-Instruct, weights from 4 bits", "multi-turn SFT, FSDP2"),
        task=("data/small/*.txt", "data/small/*.py", "data/svamp/*.jsonl", "configs/smollm2_*.yaml", SHARED)
        + ("requirements/small.txt",)  # the model
        + ("data/arithmetic.py", "data/worked.py")
        + ("verl_ext/protocols/instructions.py",)
        + tuple(f"verl_ext/datasets/{name}.py" for name in ("problems", "text", "traces")),
    ),
}
