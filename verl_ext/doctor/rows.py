"""The data: there, of the right form, without duplicates or evaluation problems, and short enough."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.peek import first_rows
from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.names import agent_loops, did_you_mean
from verl_ext.doctor.run import ROLLOUT, Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHOWN = 3
FIRST_ROWS = 64  # of a file, that the quick part reads
TAGS = {"code": "<code>", "hermes": "<tool_call>"}  # of a call; prompts that ask for calls of one protocol have its tag
PARTS = {"system": "prompt", "user": "prompt", "assistant": "trace"}  # role -> what its messages are


def check_files(run: Run) -> Iterator[Finding]:
    for split, path in run.all_files():
        if not path.is_file():
            yield fail(f"""data.{split}_files: {path} does not exist
                -> Make it with data/prepare_*.py (recipe/README.md), or set TRAIN_FILE or VAL_FILE of the launcher.""")
    if not run.files("train"):
        yield fail("data.train_files names no file -> Set TRAIN_FILE of the launcher.")


def check_protocol(run: Run) -> Iterator[Finding]:
    """Whether the first rows' prompts, and traces of SFT, are written for the tool protocol of the run."""
    setting = "retool.protocol" if run.is_rl else "data.retool.protocol"
    key = run.get("data.prompt_key", "prompt") if run.is_rl else run.get("data.messages_key", "messages")
    loops = agent_loops(run) if run.is_rl else {None: run.protocol}
    default_loop = run.get(f"{ROLLOUT}.agent.default_agent_loop")
    for split, path in run.all_files():
        rows, seen = 0, Counter()  # (part, protocol) -> rows that have its tag, and not that of their own
        for row in first_rows(path, [key, "agent_name"], FIRST_ROWS):
            own, messages = loops.get(row.get("agent_name") or default_loop if run.is_rl else None), row.get(key)
            if own not in TAGS or not isinstance(messages, list):
                continue
            rows += 1
            texts: dict[str, str] = dict.fromkeys(PARTS.values(), "")
            for message in messages:
                if part := PARTS.get(message.get("role")):
                    texts[part] += f" {message.get('content')}"
            seen.update(
                (part, name)
                for part, text in texts.items()
                for name, tag in TAGS.items()
                if tag in text and TAGS[own] not in text
            )
        for (part, name), number in seen.items():
            text = f"""{split}: {number} of the first {rows} {part}s of {path.name} have {TAGS[name]}, the tag of the
                protocol {name}, and not that of {setting}={run.protocol}"""
            if 2 * number > rows and part == "prompt":
                yield fail(f"{text} -> Set {setting}={name}, or make the data anew with --protocol {run.protocol}.")
            elif 2 * number > rows:  # RetoolSFTDataset writes them anew
                yield warn(f"{text}; their calls are rewritten -> If that is not meant: {setting}={name}.")


def check_agent_names(run: Run) -> Iterator[Finding]:
    """Whether the agent loops that the data name are registered."""
    loops = agent_loops(run)
    for split, path in run.all_files() if run.is_rl else ():
        names = Counter(row.get("agent_name") for row in first_rows(path, ["agent_name"], None))
        for name, number in names.items():
            if name is not None and name not in loops:
                yield fail(f"""{split}: agent_name is {name!r} in {number} rows of {path.name}, which
                    {run.get(f"{ROLLOUT}.agent.agent_loop_config_path")} does not register
                    -> {did_you_mean(str(name), loops)} There are {", ".join(sorted(loops))}.""")


def check_rows(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """Reads every row; quiet about files that `check_files` misses."""
    check = _check_problems if run.is_rl else _check_traces
    for split in ("train", "val"):
        if files := [path for path in run.files(split) if path.is_file()]:
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
        what = error if isinstance(error, ValueError) else f"no column {error}"
        yield fail(f"{split}: {what} -> data/prepare_retool_sft.py writes the right form.")
        return
    long = [reason for _, reason in dataset.dropped if "more than data.max_length" in reason]
    bad = [f"row {row}: {reason}" for row, reason in dataset.dropped if reason not in long]
    whole = len(dataset) + len(dataset.dropped)
    if bad:
        say = warn if run.get("data.retool.bad_rows") == "drop" else fail
        yield say(f"""{split}: {len(bad)} of {whole} rows are no traces ({"; ".join(bad[:MAX_SHOWN])})
            -> Correct them, or set data.retool.bad_rows=drop.""")
    if long:
        say = fail if run.get("data.truncation") == "error" else warn
        yield say(f"""{split}: {len(long)} of {whole} traces are longer than data.max_length={run.longest} ({long[0]})
            -> Raise data.max_length, or set data.truncation=drop.""")
    texts = {"".join(part for each in segments for part in each.parts) for segments in dataset.segments}
    if copies := len(dataset) - len(texts):
        yield warn(f"""{split}: {copies} of {whole} traces are there before, word for word
            -> data/prepare_retool_sft.py drops them.""")
    yield ok(f"{split}: {len(dataset)} of {whole} rows are traces of the protocol {run.protocol}")


def _check_problems(run: Run, tokenizer: "PreTrainedTokenizerBase", split: str, files: list[Path]) -> Iterator[Finding]:
    from verl_ext.datasets.problems import check_row, evaluation_problems, read_problems
    from verl_ext.datasets.rows import DataError, read_rows
    from verl_ext.datasets.text import bare_problem, same_problem_key

    prompt_key, limit = run.get("data.prompt_key", "prompt"), run.get("data.max_prompt_length")
    length_of, length_for_verl = (_prompt_length(run, tokenizer, limit, as_verl=each) for each in (False, True))
    answers: dict[str, set[str]] = {}
    rows, cut, long, overlaps, refused = 0, 0, [], [], []
    evaluation, is_train = evaluation_problems([]), split == "train"
    held_out: set[str] = set()  # problems of the validation files
    for path in filter(Path.is_file, run.files("val") if is_train else []):
        with suppress(DataError):  # told where that file's turn comes
            held_out |= {same_problem_key(each.text) for each in read_problems(str(path))}
    try:
        for where, row in (each for path in files for each in read_rows(str(path))):
            rows += 1
            messages, answer = check_row(row, where, prompt_key)
            problem = bare_problem(messages[-1]["content"])
            key = same_problem_key(problem)
            answers.setdefault(key, set()).add(str(answer))
            if is_train and (key in held_out or evaluation.find_overlap(problem)):
                overlaps.append(where)
            try:
                length = length_of(messages)
            except ValueError as error:
                refused.append(f"{where}: {error}")
                continue
            if length > limit:
                long.append(length)
                cut += length_for_verl(messages) <= limit
    except DataError as error:
        yield fail(f"{split}: {error} -> data/prepare_jsonl.py writes verl's columns from any JSONL.")
        return
    if not rows:
        yield fail(f"{split}: {', '.join(map(str, files))} has no row -> Make it anew.")
        return
    if is_train and (copies := rows - len(answers)):
        yield warn(f"""{split}: {rows:,} rows are {len(answers):,} different problems: {copies:,} are there before
            -> The prepare scripts of data/ keep each once; DAPO-Math-17k has each 100 times.""")
    if conflicts := sum(len(each) > 1 for each in answers.values()):
        yield warn(f"""{split}: {conflicts} problem(s) are there with different answers
            -> data/prepare_*.py drop them.""")
    if overlaps:
        yield warn(f"""{split}: {len(overlaps)} problem(s) are also in AIME 2024, AIME 2025 or data.val_files
            ({overlaps[0]}) -> data/prepare_*.py drop them (--evaluation adds files).""")
    if refused:
        yield fail(f"""{split}: {len(refused)} of {rows} prompts cannot be rendered ({refused[0]})
            -> Leave these rows out, or join their messages; their rollouts would raise.""")
    if long:
        dropped = run.get("data.filter_overlong_prompts")
        say = warn if dropped and len(long) < rows and not cut else fail
        advice = "verl drops them."
        if not dropped:
            advice = "Raise it, or filter_overlong_prompts=true."
        elif cut:
            advice = f"""verl does not drop {cut} of them, as it does not count the interpreter's schema: a rollout
                would cut their heads off. Raise it, or set multi_turn.tool_config_path to
                configs/tools/code_interpreter.yaml."""
        yield say(f"""{split}: {len(long)} of {rows} prompts are longer than data.max_prompt_length={limit} (the longest
            has {max(long)} tokens, tools included) -> {advice}""")
    fit = f"{rows - len(long) - len(refused):,} within" if long or refused else "all within"
    yield ok(f"{split}: {rows:,} rows, {len(answers):,} problems; prompts: {fit} {limit} tokens, tools included")


def _prompt_length(
    run: Run, tokenizer: "PreTrainedTokenizerBase", limit: int, *, as_verl: bool
) -> Callable[[list[dict[str, Any]]], int]:
    """Counts the tokens of a prompt as the rollout renders it; 0 where its bytes alone show that it fits.

    Args:
        as_verl: as verl's filter counts them (rl_dataset.py:199, 0.9.1), with the tools of the run's files alone.
    """
    from verl_ext.doctor.template import load_tools, protocol_of, template_kwargs, tool_schemas
    from verl_ext.protocols.base import render

    schemas, kwargs = tool_schemas(run), template_kwargs(run)
    if as_verl:
        schemas = {tool.name: schemas[tool.name] for tool in load_tools(run)}
    schemas = protocol_of(run, tokenizer).schemas(schemas)

    empty = [{"role": "user", "content": ""}]
    room = limit - len(render(tokenizer, empty, kwargs, tools=schemas).encode())  # no text has more tokens than bytes

    def length(messages: list[dict[str, Any]]) -> int:
        if len(messages) == 1 and len(messages[0]["content"].encode()) <= room:
            return 0
        return len(tokenizer.encode(render(tokenizer, messages, kwargs, tools=schemas), add_special_tokens=False))

    return length
