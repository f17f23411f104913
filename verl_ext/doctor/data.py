"""The data: there, of the right form, without duplicates or evaluation problems, and short enough."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.names import agent_loops, did_you_mean
from verl_ext.doctor.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

topic = Topic("data")
MAX_SHOWN = 3
FIRST_ROWS = 64  # of a file, that the quick part reads
TAGS = {"code": "<code>", "hermes": "<tool_call>"}  # of a call; prompts that ask for calls of one protocol have its tag


def check_files(run: Run) -> Iterator[Finding]:
    for split in ("train", "val"):
        for path in run.files(split):
            if path.is_file():
                continue
            yield topic.fail(
                f"data.{split}_files: {path} does not exist",
                "Make it with data/prepare_*.py (recipe/README.md), or set TRAIN_FILE or VAL_FILE of the launcher.",
            )
        if split == "train" and not run.files(split):
            yield topic.fail("data.train_files names no file", "Set TRAIN_FILE of the launcher.")


def check_protocol(run: Run) -> Iterator[Finding]:
    """Whether the first rows' prompts, and traces of SFT, are written for the tool protocol of the run."""
    setting = "retool.protocol" if run.is_rl else "data.retool.protocol"
    key = run.get("data.prompt_key", "prompt") if run.is_rl else run.get("data.messages_key", "messages")
    loops = agent_loops(run) if run.is_rl else {}
    default_loop = run.get("actor_rollout_ref.rollout.agent.default_agent_loop")
    for split in ("train", "val"):
        for path in run.files(split):
            seen: Counter[str] = Counter()  # "prompt <code>", "trace <code>", ...; "prompt" and "trace" with another's
            for row in first_rows(path, [key, "agent_name"]):
                own = loops.get(row.get("agent_name") or default_loop) if run.is_rl else run.protocol
                messages = row.get(key)
                if own not in TAGS or not isinstance(messages, list):
                    continue
                for part, wanted in (("prompt", ("system", "user")), ("trace", ("assistant",))):
                    text = " ".join(str(m.get("content")) for m in messages if m.get("role") in wanted)
                    if others := [tag for name, tag in TAGS.items() if name != own and tag in text]:
                        seen[f"{part} {others[0]}"] += TAGS[own] not in text
                seen["rows"] += 1
            for what, number in seen.items():
                part, _, tag = what.partition(" ")
                if part == "rows" or 2 * number <= seen["rows"]:
                    continue
                name = next(name for name, each in TAGS.items() if each == tag)
                text = (
                    f"{split}: {number} of the first {seen['rows']} {part}s of {path.name} have {tag}, the tag of the "
                )
                text += f"protocol {name}, and not that of {setting}={run.protocol}"
                if part == "prompt":
                    yield topic.fail(
                        text, f"Set {setting}={name}, or make the data anew with --protocol {run.protocol}."
                    )
                else:  # RetoolSFTDataset writes them anew
                    yield topic.warn(f"{text}; their calls are rewritten", f"If that is not meant: {setting}={name}.")


def check_agent_names(run: Run) -> Iterator[Finding]:
    """Whether the agent loops that the data name are registered."""
    if not run.is_rl:
        return
    loops = agent_loops(run)
    for split in ("train", "val"):
        for path in run.files(split):
            names = Counter(row.get("agent_name") for row in first_rows(path, ["agent_name"], most=None))
            unknown = {name: number for name, number in names.items() if name is not None and name not in loops}
            for name, number in unknown.items():
                yield topic.fail(
                    f"{split}: agent_name is {name!r} in {number} rows of {path.name}, which "
                    f"{run.get('actor_rollout_ref.rollout.agent.agent_loop_config_path')} does not register",
                    did_you_mean(str(name), loops) + f" There are {', '.join(sorted(loops))}.",
                )


def first_rows(path: Path, columns: list[str], *, most: int | None = FIRST_ROWS) -> Iterator[dict[str, Any]]:
    """Some columns of the first rows (None: of all) of parquet or JSONL; none of a file that cannot be read so."""
    if not path.is_file():
        return
    if path.suffix != ".parquet":
        with path.open(encoding="utf-8") as lines:
            for line in islice(lines, most):
                try:
                    row = json.loads(line)
                except ValueError:  # told when all rows are read
                    return
                if isinstance(row, dict):
                    yield row
        return
    import pyarrow.parquet  # 0.3 s

    try:
        table = pyarrow.parquet.ParquetFile(path)
        there = [name for name in columns if name in table.schema_arrow.names]
        batches = table.iter_batches(batch_size=most or 65536, columns=there) if there else ()
        for batch in islice(batches, most and 1):
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid:
        return


def check_rows(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """Reads every row; quiet about files that `check_files` misses."""
    check = _check_problems if run.is_rl else _check_traces
    for split in ("train", "val"):
        files = [path for path in run.files(split) if path.is_file()]
        if files:
            yield from check(run, tokenizer, split, files)


def _check_traces(run: Run, tokenizer: "PreTrainedTokenizerBase", split: str, files: list[Path]) -> Iterator[Finding]:
    """As RetoolSFTDataset reads them: rows that are no trace, or too long."""
    from omegaconf import OmegaConf

    from verl_ext.datasets.sft import RetoolSFTDataset

    lenient = {"retool": {"protocol": run.protocol, "bad_rows": "drop"}, "truncation": "drop"}
    config = OmegaConf.merge(run.config.data, lenient)
    try:
        dataset = RetoolSFTDataset([str(path) for path in files], tokenizer, config)
    except (ValueError, KeyError) as error:
        yield topic.fail(
            f"{split}: {error if isinstance(error, ValueError) else f'no column {error}'}",
            "data/prepare_retool_sft.py writes the right form.",
        )
        return
    long = [reason for _, reason in dataset.dropped if "data.max_length" in reason]
    bad = [(row, reason) for row, reason in dataset.dropped if reason not in long]
    whole = len(dataset) + len(dataset.dropped)
    say = topic.warn if run.get("data.retool.bad_rows") == "drop" else topic.fail
    if bad:
        shown = "; ".join(f"row {row}: {reason}" for row, reason in bad[:MAX_SHOWN])
        yield say(
            f"{split}: {len(bad)} of {whole} rows are no traces ({shown})",
            "Correct them, or set data.retool.bad_rows=drop.",
        )
    if long:
        say = topic.fail if run.get("data.truncation") == "error" else topic.warn
        yield say(
            f"{split}: {len(long)} of {whole} traces are longer than data.max_length={run.get('data.max_length')} "
            f"({long[0]})",
            "Raise data.max_length, or set data.truncation=drop.",
        )
    texts = Counter("".join(part for each in segments for part in each.parts) for segments in dataset.segments)
    if (copies := len(dataset) - len(texts)) > 0:
        yield topic.warn(
            f"{split}: {copies} of {whole} traces are there before, word for word",
            "data/prepare_retool_sft.py drops them.",
        )
    yield topic.ok(f"{split}: {len(dataset)} of {whole} rows are traces of the protocol {run.protocol}")


def _check_problems(run: Run, tokenizer: "PreTrainedTokenizerBase", split: str, files: list[Path]) -> Iterator[Finding]:
    from verl_ext.datasets.problems import evaluation_problems
    from verl_ext.datasets.rows import DataError, field, read_rows
    from verl_ext.datasets.text import bare_problem, same_problem_key

    prompt_key = run.get("data.prompt_key", "prompt")
    measure = _PromptLength(run, tokenizer)
    answers: dict[str, set[str]] = {}
    rows, long, longest, overlaps = 0, 0, 0, []
    evaluation = evaluation_problems([])
    is_train = split == "train"
    held_out = _held_out(run) if is_train else set()
    try:
        for path in files:
            for where, row in read_rows(str(path)):
                rows += 1
                messages = field(row, prompt_key, where, list)
                for number in range(len(messages)):
                    field(row, f"{prompt_key}.{number}.role", where)
                    field(row, f"{prompt_key}.{number}.content", where)
                field(row, "data_source", where)
                answer = field(row, "reward_model.ground_truth", where, (str, int, float, list))
                if not messages or messages[-1]["role"] != "user":
                    raise DataError(f"{where}, column {prompt_key}: the last message is not the user's.")
                problem = bare_problem(messages[-1]["content"])
                key = same_problem_key(problem)
                answers.setdefault(key, set()).add(str(answer))
                if is_train and (key in held_out or evaluation.find_overlap(problem)):
                    overlaps.append(where)
                length = measure(messages)
                longest, long = max(longest, length), long + (length > measure.limit)
    except DataError as error:
        yield topic.fail(f"{split}: {error}", "data/prepare_jsonl.py writes verl's columns from any JSONL.")
        return
    if not rows:
        yield topic.fail(f"{split}: {', '.join(map(str, files))} has no row", "Make it anew.")
        return
    if is_train and (copies := rows - len(answers)):
        yield topic.warn(
            f"{split}: {rows:,} rows are {len(answers):,} different problems: {copies:,} are there before",
            "The prepare scripts of data/ keep each once; DAPO-Math-17k has each 100 times.",
        )
    if conflicts := sum(len(each) > 1 for each in answers.values()):
        yield topic.warn(
            f"{split}: {conflicts} problem(s) are there with different answers", "data/prepare_*.py drop them."
        )
    if overlaps:
        yield topic.warn(
            f"{split}: {len(overlaps)} problem(s) are also in AIME 2024, AIME 2025 or data.val_files ({overlaps[0]})",
            "data/prepare_*.py drop them (--evaluation adds files).",
        )
    if long:
        dropped = run.get("data.filter_overlong_prompts")
        say = topic.warn if dropped and long < rows else topic.fail
        yield say(
            f"{split}: {long} of {rows} prompts are longer than data.max_prompt_length={measure.limit} (the longest "
            f"has {longest} tokens, tools included)",
            "verl drops them, by their length without the tools."
            if dropped
            else "Raise it, or filter_overlong_prompts=true.",
        )
    fit = f"all within {measure.limit} tokens" if not long else f"{rows - long:,} within {measure.limit} tokens"
    yield topic.ok(f"{split}: {rows:,} rows, {len(answers):,} problems; prompts: {fit}, tools included")


class _PromptLength:
    """Tokens of a prompt as the rollout renders it; 0 where its characters alone show that it fits."""

    def __init__(self, run: Run, tokenizer: "PreTrainedTokenizerBase"):
        from verl_ext.doctor.template import protocol_of, tool_schemas

        self.limit = run.get("data.max_prompt_length")
        self._tokenizer = tokenizer
        self._kwargs = run.get("data.apply_chat_template_kwargs", {})
        self._schemas = protocol_of(run, tokenizer).schemas(tool_schemas(run))
        around = len(self._render([{"role": "user", "content": ""}]).encode())
        self._surely_fits = self.limit - around  # bytes: no text has more tokens than bytes

    def __call__(self, messages: list[dict[str, Any]]) -> int:
        if len(messages) == 1 and len(messages[0]["content"].encode()) <= self._surely_fits:
            return 0
        return len(self._tokenizer(self._render(messages), add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=self._schemas, add_generation_prompt=True, tokenize=False, **self._kwargs
        )


def _held_out(run: Run) -> set[str]:
    """Keys of the validation files' problems; of files that cannot be read none (told for themselves)."""
    from verl_ext.datasets.problems import read_problems
    from verl_ext.datasets.rows import DataError
    from verl_ext.datasets.text import same_problem_key

    keys = set()
    for path in run.files("val"):
        if path.is_file():
            try:
                keys |= {same_problem_key(problem.text) for problem in read_problems(str(path))}
            except DataError:
                continue
    return keys
