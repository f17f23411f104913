"""Make questions of a corpus for the environment `search`, each of which needs several of its documents.

    retool traces questions corpus.jsonl --out questions.parquet
    retool traces questions corpus.jsonl --chat https://api.example.org/v1 --api-key-env KEY \\
        --out questions.parquet

A chain of documents leads to a name, number or date that only the last one has: each links to the next, has its title
in its text, or shares a name with it. The question has a clause of each document with a gap, or is a teacher's. It is
kept if no single document and no single search answers it, and if `search` and `read` lead from each document to the
next. OUT.parquet has rows for RL, OUT.traces.parquet the calls that lead to the answers, for `check` and SFT.

A teacher's answers are kept in OUT.asked.jsonl: the same command asks nothing twice.
"""

import argparse
import asyncio
import json
import random
import shlex
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_ext.datasets.rows import progress_bar
from verl_ext.datasets.text import PROMPTS
from verl_ext.environments.corpus import open_corpus
from verl_ext.environments.search import Search
from verl_ext.evaluation.options import check_endpoint
from verl_ext.runs import jsonl, parquet
from verl_ext.runs.lock import lock_file
from verl_ext.settings.overrides import quoted
from verl_ext.traces import wording
from verl_ext.traces.chains import Chain, Documents
from verl_ext.traces.hops import MAX_PAGES, Drop, Dropped, Told, check_chain, check_question, check_searches, gold_path
from verl_ext.traces.output import as_text, beside, row_of, write_kept
from verl_ext.traces.teacher import Teacher, add_endpoint_options, at_endpoint, begin_answers, settings_of
from verl_ext.traces.trace import Trace

VERIFIER = "exact"  # as the `ability` of the rows, it chooses this verifier
PER_END = 3  # questions with the same last document
TRIES = 8  # candidates for a question, from one document, whose answer is in no other one
REQUESTS = 16  # to a teacher at a time
_TEXT = pa.string()
SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
        "ability": _TEXT,
        "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
        # `gold_calls`: JSON of name and arguments of each call that leads to the answer; `documents`: their ids
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                "split": _TEXT,
                "id": _TEXT,
                "hops": pa.int64(),
                "documents": pa.list_(_TEXT),
                "gold_calls": _TEXT,
            }
        ),
    }
)
Ask = Callable[[Chain], Awaitable[str]]


@dataclass(frozen=True)
class Question:
    """A question with its chain and the calls that answer it."""

    text: str
    chain: Chain
    told: list[Told]


@dataclass
class Found:
    """What came of the candidates from one document: a question or none, and how many were dropped for which reason."""

    hops: int
    question: Question | None = None
    dropped: Counter[str] = field(default_factory=Counter)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="CORPUS", help="as `corpus` of the environment search")
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="OUT.parquet", help="rows for RL; SFT's stand next to it")
    add("--n", type=int, default=1000, metavar="N", help="questions, as many of each number of hops (default: 1000)")
    add("--hops", type=int, nargs="+", default=[2, 3], metavar="H", help="documents of a chain (default: 2 3)")
    add("--top", type=int, default=5, metavar="N", help="as `top` of the environment (default: 5)")
    add("--page-chars", type=int, default=1500, metavar="N", help="as `page_chars` of the environment (default: 1500)")
    add("--name", default="search", help="data_source of the rows (default: search)")
    add("--split", default="train", help="noted in the rows (default: train)")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    add = parser.add_argument_group("a teacher, in place of the template").add_argument
    add("--chat", metavar="URL", help="chat endpoint, such as https://api.example.org/v1")
    add_endpoint_options(add, reply_tokens=1024)
    parser.set_defaults(check_options=lambda parser, args: check_endpoint(parser, args, "chat"))


def run(args: argparse.Namespace) -> None:
    """Find questions, write them, and print what became of the candidates.

    Raises:
        ValueError: an option or the corpus is wrong, or no question is found.
        TeacherDown: see there; what was answered is kept.
        SystemExit: a teacher did not answer some requests; the other questions are written.
    """
    if args.out.suffix != ".parquet":
        raise ValueError(f"--out is {args.out}: expected a name that ends in .parquet.")
    if args.n < 1 or min(args.hops) < 2 or len(set(args.hops)) < len(args.hops):
        raise ValueError("--n is at least 1, and --hops are different numbers from 2, such as 2 3.")
    search = Search(corpus=args.corpus, top=args.top, page_chars=args.page_chars)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+", dir=args.out.parent, encoding="utf-8") as spool:
        with Documents(open_corpus(args.corpus), MAX_PAGES * args.page_chars) as documents:
            counts = asyncio.run(_find_all(args, documents, search, spool))
        print(table(counts))
        if not any(each["kept"] for each in counts.values()):
            raise ValueError("No question was found. The table says why; documents without links or names have none.")
        _write(args, spool)
    if missing := sum(each[Drop.NOT_ASKED] for each in counts.values()):
        raise SystemExit(f"traces: {missing} could not be asked; the same command asks them again")


def table(counts: dict[int, Counter[str]]) -> str:
    """Return how many candidates became questions, and why the others did not, by hops."""
    rows = [["", *(f"{hops} hops" for hops in counts)]]
    for name in ("kept", *Drop):
        if name == "kept" or any(each[name] for each in counts.values()):
            rows.append([str(name), *(f"{each[name]:,}" for each in counts.values())])
    return as_text(rows)


# Finding -------------------------------------------------------------------------------------------------------------


async def _find_all(
    args: argparse.Namespace, documents: Documents, search: Search, spool: Any
) -> dict[int, Counter[str]]:
    """Write the questions into the spool, line by line, and return what became of the candidates."""
    counts = {hops: Counter() for hops in sorted(args.hops)}
    wanted = {hops: args.n // len(counts) + (place < args.n % len(counts)) for place, hops in enumerate(counts)}
    ends: Counter[int] = Counter()
    texts: set[int] = set()
    order = documents.order(args.seed)
    async with _asking(args) as ask:
        with progress_bar(desc="look", unit=" documents", total=documents.count) as progress:
            while starts := list(islice(order, REQUESTS)):
                open_hops = [hops for hops in counts if counts[hops]["kept"] < wanted[hops]]
                if not open_hops:
                    break
                tried = [_question_from(n, hops, args, documents, search, ask) for n in starts for hops in open_hops]
                for found in await asyncio.gather(*tried):
                    count, question = counts[found.hops], found.question
                    count.update(found.dropped)
                    if question is None or count["kept"] >= wanted[found.hops]:
                        continue
                    if ends[question.chain.last.number] >= PER_END or hash(question.text) in texts:
                        count[Drop.TOO_MANY] += 1
                        continue
                    count["kept"] += 1
                    ends[question.chain.last.number] += 1
                    texts.add(hash(question.text))
                    spool.write(jsonl.dumps(_line(question, args)) + "\n")
                progress.set_postfix({f"{hops} hops": each["kept"] for hops, each in counts.items()}, refresh=False)
                progress.update(len(starts))
    return counts


async def _question_from(
    start: int, hops: int, args: argparse.Namespace, documents: Documents, search: Search, ask: Ask
) -> Found:
    """Return the first question from a document that passes all checks."""
    found = Found(hops)
    rng = random.Random(f"{args.seed}/{start}/{hops}")
    for chain in documents.chains(start, hops, rng):
        if found.dropped.total() - found.dropped[Drop.ANSWER_AMBIGUOUS] >= TRIES:
            break
        try:
            check_chain(chain, documents)
            told = gold_path(chain, search, args.page_chars)
            text = await ask(chain)
            check_question(text, chain, documents)
            await asyncio.to_thread(check_searches, text, chain, search)  # most of the work
        except Dropped as why:
            found.dropped[why.reason] += 1
            continue
        found.question = Question(text, chain, told)
        break
    if not found.dropped and not found.question:
        found.dropped[Drop.NO_CHAIN] += 1
    return found


# Asking --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _asking(args: argparse.Namespace) -> AsyncIterator[Ask]:
    """Give a function that words the question of a chain, and raises Dropped if there is none.

    Raises:
        ValueError: the endpoint refuses us.
    """

    async def templated(chain: Chain) -> str:
        if (text := wording.templated(chain)) is None:
            raise Dropped(Drop.NO_CLUE)
        return text

    if not args.chat:
        yield templated
        return
    journal = beside(args.out, "asked.jsonl")
    with lock_file(journal):
        begin_answers(journal, settings_of(args, args.chat, wording.digest()))
        async with at_endpoint(args) as teacher:
            with open(journal, "a+b", buffering=0) as file:
                yield _Asker(teacher, journal, file).ask


class _Asker:
    """Asks a teacher for questions, and keeps the answers in a file."""

    def __init__(self, teacher: Teacher, journal: Path, file: Any):
        self._teacher, self._file = teacher, file
        self._answers = {row["asked"]: row for row in jsonl.read(journal) if "asked" in row}

    async def ask(self, chain: Chain) -> str:
        """Return the teacher's question. Raises Dropped if there is none."""
        messages = wording.request(chain)
        asked = wording.key(messages)
        if asked not in self._answers:
            said = await self._teacher.ask(messages)
            if said is None:
                raise Dropped(Drop.NOT_ASKED)
            self._answers[asked] = {"asked": asked, "text": said.text, "is_whole": not said.was_cut}
            self._answers[asked] |= {"refusals": said.usage.refusals}
            self._file.write(f"{jsonl.dumps(self._answers[asked])}\n".encode())
        row = self._answers[asked]
        text = " ".join(row["text"].split())
        if not text or row["refusals"] or not row["is_whole"]:
            raise Dropped(Drop.REFUSED)
        return text


# Writing -------------------------------------------------------------------------------------------------------------


def _line(question: Question, args: argparse.Namespace) -> dict[str, Any]:
    """Return a question as the spool has it: row for RL without index, and the calls with their outputs."""
    chain = question.chain
    calls = [{"name": told.name, "arguments": told.arguments} for told in question.told]
    asks = PROMPTS["hermes"].format(problem=question.text)
    row = {
        "data_source": args.name,
        "prompt": [{"role": "user", "content": asks}],
        "ability": VERIFIER,
        "reward_model": {"style": "rule", "ground_truth": chain.answer.name},
        "extra_info": {
            "split": args.split,
            "id": "/".join(str(document.number) for document in chain.documents),
            "hops": len(chain.documents),
            "documents": [document.id for document in chain.documents],
            "gold_calls": json.dumps(calls, ensure_ascii=False),
        },
    }
    return {"row": row, "outputs": [told.output for told in question.told]}


def _write(args: argparse.Namespace, spool: Any) -> None:
    """Write rows and traces, print where they are, an example, and how to check the traces."""
    options = {name: value for name, value in vars(args).items() if name != "check_options"}
    notes = {"options": options, "template": wording.digest() if args.chat else wording.ENDING}
    count = parquet.write(args.out, (line["row"] for line in _lines(spool)), SCHEMA)
    traces, about = beside(args.out, "traces.parquet"), {"teacher": args.served_model or args.chat}
    tools = list(Search.schemas(corpus=args.corpus).values())
    write_kept((row_of(_trace(line, tools, args.out, about)) for line in _lines(spool)), traces, notes)
    example = next(_lines(spool))["row"]
    print(f"{example['prompt'][0]['content']}\n  -> {example['reward_model']['ground_truth']}")
    print(f"{args.out}: {count:,} questions\n{traces}: the calls that answer them. Next:")
    corpus, checked = quoted(str(args.corpus)), shlex.quote(str(traces))
    entry = f"{{name: search, corpus: {corpus}, top: {args.top}, page_chars: {args.page_chars}}}"
    settings = f"--set retool.protocol=hermes --set {shlex.quote(f'retool.environment={entry}')}"
    print(f"retool traces check {checked} --config CONFIG {settings} --out sft.parquet")


def _lines(spool: Any) -> Iterator[dict[str, Any]]:
    """Yield the lines of the spool, with the index in each row."""
    spool.seek(0)
    for index, text in enumerate(spool):
        line = json.loads(text)
        line["row"]["extra_info"]["index"] = index
        yield line


def _trace(line: dict[str, Any], tools: Sequence[dict], source: Path, about: dict[str, Any]) -> Trace:
    row = line["row"]
    extra = row["extra_info"]
    messages = list(row["prompt"])
    for call, output in zip(json.loads(extra["gold_calls"]), line["outputs"], strict=True):
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": output})
    messages.append({"role": "assistant", "content": f"\\boxed{{{row['reward_model']['ground_truth']}}}"})
    task = {name: row[name] for name in ("data_source", "ability", "reward_model")} | {"extra_info": extra}
    return Trace(extra["id"], str(source), messages, list(tools), task, about)
