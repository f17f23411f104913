"""Turn text reasoning into traces, as ReTool's cold start was made: a teacher puts programs in place of calculations.

    retool traces convert mine.jsonl --chat https://api.example.org/v1 --served-model NAME \\
        --api-key-env KEY --config qwen3-4b_dapo --out traces.parquet

A row has a problem, its answer and its reasoning; other names than problem, answer and reasoning: --columns. The
sandbox runs each program, and its output stands in the trace; nothing of it comes from the teacher. A rewriting that
changes the text, or whose later text contradicts an output, is left out with that reason. All others pass the check.

The teacher's answers are kept in OUT.asked.jsonl, each when it arrives: the same command continues after a kill.
"""

import argparse
import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_ext.datasets.rows import DataError, field, progress_bar, read_rows
from verl_ext.datasets.text import PROMPTS
from verl_ext.evaluation.options import check_endpoint
from verl_ext.protocols.base import CODE_TOOL, Call
from verl_ext.runs import jsonl
from verl_ext.runs.lock import lock_file
from verl_ext.runs.workers import run_together
from verl_ext.traces import check, template
from verl_ext.traces.output import beside
from verl_ext.traces.rewriting import check_outputs_agree, check_text, split
from verl_ext.traces.teacher import (
    Teacher,
    add_endpoint_options,
    at_endpoint,
    begin_answers,
    params_of,
    settings_of,
)
from verl_ext.traces.trace import LeftOut, Reason, Trace, Unread

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.rollout.talk import Answer
    from verl_ext.traces.gate import Gate

COLUMNS = ("problem", "answer", "reasoning")
_LINE = ("id", "key", "number", "text", "was_cut", "usage")  # of the journal
_FORM = "lines that convert wrote; delete the file to ask anew"


@dataclass
class Draft(Trace):
    """A trace whose programs have not run yet: its one message is all that the teacher wrote.

    Attributes:
        reasoning: the text that the teacher was given.
    """

    reasoning: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE", help="parquet or JSONL file, or hub data set")
    teacher = parser.add_mutually_exclusive_group(required=True)
    teacher.add_argument("--chat", metavar="URL", help="chat endpoint, such as https://api.example.org/v1")
    teacher.add_argument("--teacher", type=Path, metavar="DIR", help="Hugging Face folder of a chat model")
    add = parser.add_argument_group("the teacher").add_argument
    add_endpoint_options(add, reply_tokens=4096)
    add("--requests", type=int, default=16, metavar="N", help="requests at a time (default: 16)")
    add("--n", type=int, default=1, metavar="N", help="rewritings of each row (default: 1)")
    add = parser.add_argument_group("the rows").add_argument
    add("--columns", nargs=3, default=COLUMNS, metavar="NAME", help="of problem, answer and reasoning")
    add("--name", default="", help="data_source of the traces, which chooses their verifier (default: the file's name)")
    add("--split", default="train", help="of a hub data set (default: train)")
    what = "leave out a rewriting that changes more of the words that were to stay (default: 0.15)"
    add("--max-change", type=float, default=0.15, metavar="SHARE", help=what)
    check.add_shared_options(parser)
    parser.set_defaults(computed=True, min_calls=1, check_options=check_teacher)


def check_teacher(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command if an option makes no sense."""
    check.check_shared(parser, args)
    check_endpoint(parser, args, "chat")
    for name in ("requests", "n", "reply_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected at least 1")


def run(args: argparse.Namespace) -> None:
    """Ask the teacher for what is missing, and check all that it has written. Raises as `check.check`.

    Raises:
        TeacherDown: see there; what was answered is kept.
    """
    from verl_ext.evaluation.take import set_environment

    _, config = check.chosen_config(args, None)
    set_environment()
    asked = beside(args.out, "asked.jsonl")
    asked.parent.mkdir(parents=True, exist_ok=True)
    settings = settings_of(args, args.chat or str(args.teacher), template.digest())
    with lock_file(asked):
        begin_answers(asked, settings | {"columns": list(args.columns)})
        asyncio.run(_ask_all(args, config, asked))

    async def finish(gate: "Gate", draft: Draft) -> Trace:
        return await finished(gate, draft, args.max_change)

    check.check(_drafts(args, config, asked), args, finish=finish)
    used = list(_answers(asked))
    tokens = (sum(row["usage"][name] for row in used) for name in ("prompt_tokens", "completion_tokens"))
    print("teacher: {:,} answers, {:,} tokens of prompts, {:,} of answers".format(len(used), *tokens))


# Asking --------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the source. `key` names its text in the journal: a row that was changed is asked about anew."""

    name: str
    problem: str
    answer: str
    reasoning: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.problem}\0{self.reasoning}".encode(errors="surrogatepass")).hexdigest()[:16]


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the source.

    Raises:
        DataError: a row lacks one of them.
    """
    for where, row in read_rows(args.source, split=args.split):
        texts = [str(field(row, column, where, (str, int, float))).strip() for column in args.columns]
        if empty := [column for column, text in zip(args.columns, texts, strict=True) if not text]:
            raise DataError(f"{where}, column {empty[0]}: it is empty.")
        name = str(row["id"]) if row.get("id") is not None else where.rpartition(", ")[2]
        yield Row(name, *texts)


def _todo(args: argparse.Namespace, there: set[tuple[str, int]]) -> Iterator[tuple[Row, int]]:
    """Yield (row, number) of each question that is neither in `there` nor has been yielded."""
    for row in _rows(args):
        for number in range(args.n):
            if (row.key, number) not in there:
                there.add((row.key, number))
                yield row, number


async def _ask_all(args: argparse.Namespace, config: "DictConfig", asked: Path) -> None:
    waiting = _todo(args, {(row["key"], row["number"]) for row in _answers(asked)})
    if (first := next(waiting, None)) is None:
        return
    waiting = itertools.chain([first], waiting)
    async with at_endpoint(args) if args.chat else _of_folder(args, config) as teacher:
        with open(asked, "ab", buffering=0) as file, progress_bar(desc="ask", unit=" rows") as progress:

            async def work() -> None:
                for row, number in waiting:
                    await _ask(teacher, row, number, file)
                    progress.update()

            await run_together(work, args.requests)


def _answers(asked: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal that hold an answer."""

    def parse(line: dict[str, Any]) -> dict[str, Any]:
        return line if "settings" in line else {name: line[name] for name in _LINE}

    return (line for line in jsonl.read(asked, parse, expected=_FORM) if "settings" not in line)


async def _ask(teacher: Teacher, row: Row, number: int, file: Any) -> None:
    said = await teacher.ask(template.messages(row.problem, row.reasoning))
    if said is not None:
        line = dict(zip(_LINE, (row.name, row.key, number, said.text, said.was_cut, vars(said.usage)), strict=True))
        file.write(f"{jsonl.dumps(line)}\n".encode())  # at once and whole, so that a kill loses no answer


@asynccontextmanager
async def _of_folder(args: argparse.Namespace, config: "DictConfig") -> AsyncIterator[Teacher]:
    from verl_ext.protocols.base import decoded, render
    from verl_ext.rollout.servers import VllmServer
    from verl_ext.rollout.standalone import load_tokenizer
    from verl_ext.rollout.talk import Answer
    from verl_ext.usage import Usage

    tokenizer = load_tokenizer(args.teacher)
    server = VllmServer(args.teacher, config.actor_rollout_ref.rollout)
    server.start()

    async def answer(messages: Sequence[dict[str, str]]) -> "Answer":
        ids = tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)
        output = await server.generate("", prompt_ids=ids, sampling_params=params_of(args))
        is_over = output.token_ids[-1:] == [tokenizer.eos_token_id]
        text = decoded(tokenizer, output.token_ids, skip_special_tokens=True)
        return Answer(text, was_cut=not is_over, usage=Usage(1, len(ids), len(output.token_ids)))

    async with aclosing(server):
        yield Teacher(answer)


# Making traces of the answers ----------------------------------------------------------------------------------------


def _drafts(args: argparse.Namespace, config: "DictConfig", asked: Path) -> check.Found:
    """Yield a draft for each answer, in the order of the rows, or why there is none."""
    answers = {(line["key"], line["number"]): line for line in _answers(asked)}
    source = args.name or Path(args.source).stem
    about = {"teacher": args.served_model or args.chat or str(args.teacher), "template": template.digest()}
    for index, row in enumerate(_rows(args)):
        for number in range(args.n):
            key = f"{row.name}/{number}" if args.n > 1 else row.name
            said = answers.get((row.key, number))
            if said is None:
                yield Unread(key, args.source, LeftOut(Reason.NOT_CHECKED, "the teacher did not answer"))
                continue
            if said["usage"]["refusals"]:
                yield Unread(key, args.source, LeftOut(Reason.REFUSED, said["text"][:200] or "an empty answer"))
                continue
            if said["was_cut"]:
                yield Unread(key, args.source, LeftOut(Reason.CUT_OFF, f"after {len(said['text'])} characters"))
                continue
            asks = PROMPTS[config.retool.protocol].format(problem=row.problem)
            prompt = [{"role": "user", "content": asks}]
            task = {"data_source": source, "ability": "math", "reward_model": {"ground_truth": row.answer}}
            task["extra_info"] = {"index": index, "id": row.name}
            messages = [*prompt, {"role": "assistant", "content": said["text"]}]
            yield Draft(key, args.source, messages, None, task, about, None, row.reasoning)


async def finished(gate: "Gate", draft: Draft, max_change: float) -> Trace:
    """Run the programs of a draft, and return the trace with their outputs.

    Raises:
        LeftOut: the rewriting is not what was asked for, a program fails, or the text contradicts an output.
        NotRun: the sandbox failed.
    """
    rewriting = split(draft.messages[-1]["content"])
    check_text(draft.reasoning, rewriting, max_change=max_change)
    calls = [Call(CODE_TOOL, {"code": program}, 0) for program in rewriting.programs]
    results = await gate.results(draft, calls)
    for number, result in enumerate(results, 1):
        if result.error:
            raise LeftOut(Reason.PROGRAM_FAILED, f"program {number}: {result.error}: {result.output[-200:]!r}")
    outputs = [result.output for result in results]
    check_outputs_agree(draft.problem, draft.reasoning, rewriting, outputs)
    messages = list(draft.prompt)
    for text, call, output in zip(rewriting.texts, calls, outputs, strict=False):
        function = {"name": call.tool, "arguments": call.arguments}
        messages.append(
            {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": output})
    messages.append({"role": "assistant", "content": rewriting.texts[-1]})
    return Trace(draft.id, draft.source, messages, draft.tools, draft.task, draft.about)
