"""Whether data rows have the right form, no duplicates or evaluation problems, and are short enough.

The quick part looks at samples of the files, with a tokenizer that does not need transformers; the rest at every row.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.peek import count_rows
from verl_ext.datasets.problems import check_row, evaluation_problems
from verl_ext.datasets.prompts import PromptLengths, prompt_length
from verl_ext.datasets.rows import DataError, read_rows
from verl_ext.datasets.text import bare_problem, same_problem_key
from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.names import agent_loops
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.doctor.template import protocol_of, shown, template_kwargs, tool_schemas
from verl_ext.doctor.tokens import PlainEncoder, QuickTokenizer
from verl_ext.environments import BUILT_IN, OF_SANDBOX
from verl_ext.protocols.base import SegmentEncoder
from verl_ext.protocols.trace import messages_of, rendered_trace
from verl_ext.settings.domains import of_whole_run, read_domains
from verl_ext.settings.objects import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHOWN = 3
QUICK_BYTES = 2**17  # of texts that the quick part tokenizes, the longest first: a tenth of a second
Rows = Iterable[tuple[str, dict[str, Any]]]  # (where, row)


def check_rows(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer | None", *, is_quick: bool = False
) -> Iterator[Finding]:
    """Check the rows of all files, except those that `check_files` reports.

    Args:
        tokenizer: without one, lengths are not checked, nor SFT's rows at all.
        is_quick: look at samples only.
    """
    for split in ("train", "val"):
        files, samples = [], []
        for path in run.files(split):
            with suppress(DataError, OSError):
                if run.sample(path).rows and run.text_column in run.sample(path).columns.names:
                    files.append(path)
                    samples.append(run.sample(path))
        if not files:
            continue
        rows: Rows = chain.from_iterable(each.rows for each in samples)
        total = sum(each.total for each in samples) if is_quick else None
        if not is_quick:
            rows = chain.from_iterable(read_rows(str(path)) for path in files)
        if run.is_rl:
            yield from _check_problems(run, tokenizer, split, rows, total)
        elif tokenizer is not None:
            yield from _check_traces(run, tokenizer, split, rows, total)


class Lengths:
    """Finder of the texts that are too long; the quick part looks at the longest ones, up to `QUICK_BYTES`.

    Args:
        count: tokens of a text; 0 if its bytes show that it is short enough. Raises ValueError if it is refused.
    """

    def __init__(self, count: Callable[[Any], int] | None, limit: int, *, is_quick: bool):
        self._count, self._limit, self._is_quick = count, limit, is_quick
        self.some = ""  # or "at least ", if not all were counted
        self._waiting: list[tuple[int, bool, str, Any]] = []
        self._kinds: set[Any] = set()
        self._long: list[tuple[int, Any]] = []
        self.refused: list[str] = []  # where the chat template refuses a text, and why

    def add(self, where: str, text: Any, size: int, kind: Any = None) -> None:
        """Add a text of `size` bytes. The first text of each `kind` is counted even if it is short."""
        if self._is_quick:
            self._waiting.append((size, kind not in self._kinds, where, text))
            self._kinds.add(kind)
        else:
            self._measure(where, text)

    def long(self) -> list[tuple[int, Any]]:
        """Return (tokens, text) of each text that is longer than the limit."""
        left = QUICK_BYTES
        for size, is_first, where, text in sorted(self._waiting, key=lambda each: -each[0]):
            if left > 0 or is_first:
                self._measure(where, text)
                left -= size
            else:
                self.some = "at least "
        self._waiting = []
        return self._long

    def _measure(self, where: str, text: Any) -> None:
        try:
            length = self._count(text) if self._count else 0
        except ValueError as error:
            self.refused.append(f"{where}: {error}")
            return
        if length > self._limit:
            self._long.append((length, text))


class Overlaps:
    """Finder of training rows that ask what AIME or a validation file asks."""

    def __init__(self, run: Run, split: str, *, is_quick: bool):
        self.rows: list[str] = []  # where they are
        self._held_out: set[str] = set()
        self._evaluation = evaluation_problems([]) if split == "train" else None
        for path in run.files("val") if self._evaluation else []:
            with suppress(DataError, OSError):  # `check_files` reports them
                rows = run.sample(path).rows if is_quick else read_rows(str(path))
                self._held_out |= {same_problem_key(_problem(row.get(run.text_column))) for _, row in rows}

    def add(self, where: str, problem: str, key: str) -> None:
        if problem and self._evaluation and (key in self._held_out or self._evaluation.find_overlap(problem)):
            self.rows.append(where)

    def findings(self, split: str) -> Iterator[Finding]:
        if self.rows:
            yield warn(f"""{split}: {len(self.rows)} problem(s) are also in AIME 2024, AIME 2025 or data.val_files
                ({self.rows[0]}) -> Remove them, as data/prepare_*.py do (--evaluation adds files).""")


def _problem(messages: Any) -> str:
    """Return what the last user message of a prompt or a trace's prompt asks; "" if there is none."""
    with suppress(ValueError):  # the row's own check reports it
        texts = [each.get("content") for each in messages_of(messages) if each.get("role") == "user"]
        return bare_problem(texts[-1]) if texts and isinstance(texts[-1], str) else ""
    return ""


def _readable(rows: Rows) -> Rows:
    """Raise DataError for a text with half a character, which JSON can spell but no tokenizer accepts."""
    for where, row in rows:
        try:
            json.dumps(row, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
            raise DataError(
                f"{where}: a text has {half}, half a character (a lone surrogate), which verl cannot read. Remove it"
            ) from None
        yield where, row


def _check_traces(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer", split: str, rows: Rows, total: int | None
) -> Iterator[Finding]:
    """Find rows that RetoolSFTDataset does not take for a trace, or too long ones. `total`: all rows of a sample."""
    is_quick, protocol, kwargs = total is not None, protocol_of(run, tokenizer), template_kwargs(run)
    encoder = PlainEncoder(tokenizer) if isinstance(tokenizer, QuickTokenizer) else SegmentEncoder(tokenizer)
    limit, tools_key = run.longest, run.get("data.tools_key", "tools")
    lengths = Lengths(lambda trace: sum(len(encoder.encode(each.parts)) for each in trace), limit, is_quick=is_quick)
    overlaps, bad, seen, number = Overlaps(run, split, is_quick=is_quick), [], Counter(), 0
    try:
        for where, row in _readable(rows):
            number += 1
            messages = row.get(run.text_column)
            problem = _problem(messages)
            overlaps.add(where, problem, same_problem_key(problem))
            try:
                trace = rendered_trace(messages, row.get(tools_key), protocol, tokenizer, kwargs)
            except ValueError as error:
                bad.append(f"{where.rpartition(', ')[2]}: {error}")
                continue
            text = "".join(part for segment in trace for part in segment.parts)
            seen[text] += 1
            if (size := len(text.encode())) > limit:  # no text has more tokens than bytes
                lengths.add(where, trace, size)
    except DataError as error:
        yield fail(f"{split}: {error} -> Use data/prepare_retool_sft.py, which writes the expected form.")
        return
    of = _of(number, total)
    if bad:
        say = warn if run.get("data.retool.bad_rows") == "drop" else fail
        yield say(f"""{split}: {len(bad)} of {of} rows are not traces ({"; ".join(bad[:MAX_SHOWN])})
            -> Correct them, or set data.retool.bad_rows=drop.""")
    if long := lengths.long():
        say = fail if run.get("data.truncation") == "error" else warn
        yield say(f"""{split}: {lengths.some}{len(long)} of {of} traces are longer than data.max_length={limit} (the
            longest has {max(length for length, _ in long)} tokens)
            -> Raise data.max_length, or set data.truncation=drop.""")
    if copies := sum(seen.values()) - len(seen):
        yield warn(f"""{split}: {copies} of {of} traces repeat an earlier one word for word
            -> Remove them, as data/prepare_retool_sft.py does.""")
    yield from overlaps.findings(split)
    left = number - len(bad) - (len(long) if run.get("data.truncation") == "drop" else 0)
    yield from _too_few(run, split, left, number == (total or number))
    yield ok(f"{split}: {left} of {of} rows are traces of the protocol {run.protocol}")


def _check_problems(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer | None", split: str, rows: Rows, total: int | None
) -> Iterator[Finding]:
    """Check problems as a rollout gets them. `total`: all rows, if `rows` are a sample."""
    is_quick, limit, is_train = total is not None, run.get("data.max_prompt_length"), split == "train"
    count, count_as_verl = _counters(run, tokenizer, limit) if tokenizer is not None else (None, None)
    lengths, overlaps = Lengths(count, limit, is_quick=is_quick), Overlaps(run, split, is_quick=is_quick)
    answers: dict[str, set[str]] = {}
    number, writes_first = 0, cache(partial(_writes_first, run))
    try:
        for where, row in _readable(rows):
            number += 1
            has_user = not _is_bare(row.get(run.text_column))
            needs_user = has_user or not writes_first(row.get("data_source"))
            messages, answer = check_row(row, where, run.text_column, needs_user=needs_user)
            problem = bare_problem(messages[-1]["content"]) if has_user else ""
            key = same_problem_key(problem) if has_user else where  # only its extra_info says what it asks
            answers.setdefault(key, set()).add(str(answer))
            overlaps.add(where, problem, key)
            how = {name: row.get(name) for name in ("agent_name", "data_source", "extra_info")}
            size, roles = (
                sum(len(each["content"].encode()) for each in messages),
                tuple(each["role"] for each in messages),
            )
            lengths.add(where, (messages, how), size, roles)  # a template may refuse an order of roles
    except DataError as error:
        yield fail(f"{split}: {error} -> Use data/prepare_jsonl.py, which writes verl's columns from any JSONL.")
        return
    of = _of(number, total)
    if is_train and (copies := number - len(answers)):
        yield warn(f"""{split}: {of} rows have {len(answers):,} different problems: {copies:,} rows repeat one
            -> Remove the copies, as data/prepare_*.py do; DAPO-Math-17k has each problem 100 times.""")
    if conflicts := sum(len(each) > 1 for each in answers.values()):
        yield warn(f"""{split}: {conflicts} problem(s) have different answers in different rows
            -> Remove them, as data/prepare_*.py do.""")
    yield from overlaps.findings(split)
    long, refused, is_all = lengths.long(), lengths.refused, number == (total or number)
    if refused:
        yield fail(f"""{split}: {lengths.some}{len(refused)} of {of} prompts cannot be rendered ({refused[0]})
            -> Leave these rows out, or merge their messages: their rollouts would raise an error.""")
    if long and count_as_verl:
        dropped = run.get("data.filter_overlong_prompts")
        cut = sum(count_as_verl(messages) <= limit for _, (messages, _) in long) if dropped else 0
        say = warn if dropped and len(long) < number and not cut else fail
        advice = "verl drops them."
        if not dropped:
            advice = """The run does not start with them. Raise data.max_prompt_length, or set
                data.filter_overlong_prompts=true."""
        elif cut:
            advice = f"""verl does not drop {cut} of them, because it does not count the interpreter's schema, and
                the run does not start with them. Raise data.max_prompt_length, or set
                multi_turn.tool_config_path to configs/tools/code_interpreter.yaml."""
        yield say(f"""{split}: {lengths.some}{len(long)} of {of} prompts are longer than
            data.max_prompt_length={limit} (the longest has {max(length for length, _ in long)} tokens, tools included)
            -> {advice}""")
    left = number - len(long) if run.get("data.filter_overlong_prompts") else number
    yield from _too_few(run, split, left, is_all)
    if tokenizer is not None:
        fit = f"{number - len(long) - len(refused):,} within" if long or refused else "all within"
        yield ok(f"{split}: {of} rows, {len(answers):,} problems; prompts: {fit} {limit} tokens, tools included")


def _is_bare(messages: Any) -> bool:
    """Return whether a prompt has only messages of the system."""
    found = messages if isinstance(messages, list) else []
    return bool(found) and all(isinstance(each, dict) and each.get("role") == "system" for each in found)


def _writes_first(run: Run, source: Any) -> bool:
    """Return whether the environment of a data source's rows writes the first user's message if a row has none."""
    try:
        domain = read_domains(run.config).get(str(source)) or of_whole_run(run.config)
        entries = domain.environment if isinstance(domain.environment, list) else [domain.environment]
        names = [str(each["name"] if isinstance(each, dict) else each) for each in entries]
        kinds = [load_object(BUILT_IN.get(name, name)) for name in names if name not in OF_SANDBOX]
    except Exception:  # of a table or of whoever wrote an environment; check_config or check_domains reports it
        return False
    return any(getattr(kind, "writes_first", False) for kind in kinds)


def _of(number: int, total: int | None) -> str:
    """Return `1,032 (of 17,917)` if the rows are a sample."""
    return f"{number:,}" if total in (None, number) else f"{number:,} (of {total:,})"


def _too_few(run: Run, split: str, left: int, is_all: bool) -> Iterator[Finding]:
    """Report a split with less than a batch left; `check_steps` counts the rows that exist, not those that are left."""
    there = count_rows(run.files(split))
    if split == "train" and is_all and there and left < run.batch <= there:
        yield fail(f"""{split}: {left} rows are left, fewer than a batch of {run.batch}, so no step would run
            -> Lower data.train_batch_size, add data, or raise the limit of tokens.""")


def _counters(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer", limit: int
) -> tuple[Callable[[Any], int], Callable[[Any], int]]:
    """Return two counters of tokens: of (messages, what the row says of its rollout), and of messages as verl's filter.

    The filter (rl_dataset.py:199, 0.9.1) counts the tools of the run's files.
    """
    of_files, kwargs = tool_schemas(run, tokenizer, of_files_only=True), template_kwargs(run)
    default = run.get(f"{ROLLOUT}.agent.default_agent_loop")
    lengths = PromptLengths(tokenizer, agent_loops(run), default, shown(run, tokenizer), of_files, kwargs, limit)
    as_verl = prompt_length(tokenizer, list(of_files.values()) or None, kwargs, limit)
    return lambda prompt: lengths(*prompt), as_verl
