"""The commands on the pages work as typed: options parse, overrides fit their run, and the 32B block is in order.

Nothing is run: each command's own parser reads what the page has after its name.
"""

import argparse
import json
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path

import pytest

from verl_ext.__main__ import COMMANDS
from verl_ext.doctor.__main__ import main
from verl_ext.settings import compose_run

REPO = Path(__file__).resolve().parents[2]
PAGES = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]
TUTORIAL = REPO / "docs" / "tutorials" / "train-32b.md"
SHELL_FRONTS = {  # scripts that pass their arguments on -> the module that parses them, and what they put before
    "scripts/merge_and_eval.sh": ("verl_ext.evaluation", ["--checkpoint"]),
    "scripts/quickstart.sh": ("verl_ext.quickstart", []),
}
OF_THE_READER = {"+task=NAME": "+task=shop"}  # a file that the page tells its reader to write
CODE = re.compile(
    r"```\w*\n(?P<fenced>.*?)```|(?P<indented>(?:^    \S.*\n)+)|`(?P<inline>[^`]+)`", re.DOTALL | re.MULTILINE
)


def commands(page: Path) -> list[list[str]]:
    """Words of each command, from `python` or `bash` on: of code blocks, and of back quotes that have an argument."""
    found = []
    for match in CODE.finditer(page.read_text(encoding="utf-8")):
        text = re.sub(r"\\\n\s*", " ", match["fenced"] or match["indented"] or re.sub(r"\s+", " ", match["inline"]))
        for line in text.splitlines():
            for command in re.split(r"&&|[|&;](?:\s|$)", line):
                try:
                    words = shlex.split(command, comments=True)
                except ValueError:  # not a shell's: `A'`
                    continue
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                is_name = match["inline"] and len(words) == 2 + (words[1:2] == ["-m"])  # in a sentence, not to be typed
                if len(words) > 1 and words[0] in ("python", ".venv/bin/python", "bash", "retool") and not is_name:
                    found.append([re.sub(r"\$\w+", "x", word) for word in words])
    return found


def target(words: list[str]) -> tuple[str, list[str]] | None:
    """(module or file, arguments) of a command of this repository whose options argparse reads; None of another."""
    if words[0] == "bash":
        module, before = SHELL_FRONTS.get(words[1], (None, []))
        return module and (module, [*before, *words[2:]])
    if words[0] == "retool":
        return COMMANDS[words[1]][0], words[2:]
    if words[1] == "-m":
        return (words[2], words[3:]) if words[2].startswith(("verl_ext.", "scripts.")) else None
    return (words[1], words[2:]) if words[1].startswith(("scripts/", "data/")) else None


class Parsed(BaseException):
    """Raised once the command line has been read, so that nothing runs after it."""


@pytest.fixture
def parse(monkeypatch):
    """Start a command, and stop it when it has read its command line."""
    methods = ("parse_args", "parse_intermixed_args")
    real = {name: getattr(argparse.ArgumentParser, name) for name in methods}

    def stopping(method: str):
        def read(self, args=None, namespace=None):
            raise Parsed(real[method](self, args, namespace))

        return read

    def start(name: str, arguments: list[str]) -> argparse.Namespace:
        for method in methods:
            monkeypatch.setattr(argparse.ArgumentParser, method, stopping(method))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if name.endswith(".py"):
                monkeypatch.syspath_prepend((REPO / name).parent)
                runpy.run_path(str(REPO / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
        except Parsed as parsed:
            return parsed.args[0]
        finally:
            signal.signal(signal.SIGTERM, handler)
            monkeypatch.undo()
        raise AssertionError(f"{name} read no command line")

    return start


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of runpy: the module is imported already
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_options_of_every_command_parse(page: Path, parse, capsys):
    refused = []
    for words in commands(page):
        if not (found := target(words)):
            continue
        name, arguments = found
        arguments = [argument.strip("[]") for argument in arguments]  # `[--quick]` of a synopsis
        arguments = ["2" if argument == "N" else argument for argument in arguments]
        try:
            parse(name, arguments)
        except SystemExit:
            refused.append(f"{shlex.join(words)}: {capsys.readouterr().err.splitlines()[-1]}")
    assert refused == []


def test_the_pages_have_commands_to_test():
    named = [found[0] for page in PAGES for words in commands(page) if (found := target(words))]
    assert len(named) > 40
    assert {
        "verl_ext.doctor",
        "verl_ext.evaluation",
        "verl_ext.report",
        "verl_ext.reward",
        "data/prepare_jsonl.py",
    } <= set(named)


def overrides_of(words: list[str]) -> tuple[str, list[str]] | None:
    """(run, overrides) of a launcher's or the doctor's command."""
    overrides = [OF_THE_READER.get(word, word) for word in words if re.match(r"[+~]{0,2}[a-z_.{},]+=", word)]
    if words[:2] == ["retool", "doctor"] and "--config-name" in words:
        return words[words.index("--config-name") + 1], overrides
    launcher = re.fullmatch(r"recipe/retool/run_([\w-]+)\.sh", words[1])
    return (launcher[1], overrides) if launcher and overrides and launcher[1] != "NAME" else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_overrides_of_every_command_fit_their_run(page: Path):
    for run, overrides in {(run, tuple(keys)) for run, keys in filter(None, map(overrides_of, commands(page)))}:
        compose_run(run, overrides)  # raises on a key that the run does not have, and on a group without such a file


def test_the_32b_block_makes_what_a_later_command_takes():
    text = TUTORIAL.read_text(encoding="utf-8")
    block = text[text.index("## One node") : text.index("## Two nodes")]
    steps = [
        "setup_env.sh",
        "activate",
        "prepare_retool_sft.py",
        "NNODES=1",
        "run_qwen2-32b_sft.sh",
        "latest_checkpointed",
    ]
    steps += ["verl.model_merger", "retool sandbox", "retool doctor", "run_qwen2-32b_dapo.sh", "merge_and_eval.sh"]
    places = [block.index(step) for step in steps]
    assert places == sorted(places)
    made = set(re.findall(r"# .*?(data/\S+\.parquet)", block)) | set(re.findall(r", (data/\S+\.parquet)", block))
    taken = set(re.findall(r"files=(data/\S+\.parquet)", block))
    assert taken and taken <= made


@pytest.mark.parametrize(
    ("row", "name", "nodes"),
    [
        ("RL on 2 nodes", "qwen2-32b_dapo", 2),
        ("RL on 1 node", "qwen2-32b_dapo", 1),
        ("SFT on 2 nodes", "qwen2-32b_sft", 2),
        ("SFT on 1 node", "qwen2-32b_sft", 1),
    ],
)
def test_the_memory_of_the_32b_table_is_what_the_doctor_says(row, name, nodes, capsys):
    text = TUTORIAL.read_text(encoding="utf-8")
    [cells] = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| {row} |")]
    path = {"qwen2-32b_dapo": "actor_rollout_ref.model.path", "qwen2-32b_sft": "model.path"}[name]
    of_nodes = [f"trainer.nnodes={nodes}", "data.val_files=none"] if name.endswith("dapo") else ["--nnodes", str(nodes)]
    command = ["--quick", "--json", "--gpu-gib", "79.1", "--nproc-per-node", "8", "--config-name", name, *of_nodes]
    main([*command, f"{path}=Qwen/Qwen2.5-32B-Instruct", "data.train_files=none"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    [training] = [finding for finding in findings if finding["message"].startswith("training peaks at")]
    [host] = [finding for finding in findings if finding["message"].startswith("host memory of a node")]
    gib = [re.search(r"about (\d+) GiB", finding["message"])[1] for finding in (training, host)]
    assert [re.match(r"\d+", cell)[0] for cell in cells[1:3]] == gib
    assert ("FAIL" in cells[1], "warns" in cells[1]) == (training["level"] == "FAIL", training["level"] == "WARN")
