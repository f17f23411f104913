"""Whether data files exist, are readable, have columns that fit each other, and suit the protocol and agent loops."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.peek import Sample, first_rows
from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.names import agent_loops
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.doctor.suggest import did_you_mean
from verl_ext.doctor.template import TAGS
from verl_ext.protocols.instructions import without_tool
from verl_ext.settings.domains import read_domains

if TYPE_CHECKING:
    import pyarrow as pa


PATTERNS = ("*", "[", "::")  # `datasets`, with which verl reads RL's files, takes them in a path for a pattern or chain
FIRST_ROWS = 64  # rows of a file that the quick part reads
QUICK_TESTS = 2**13  # characters of a file's tests that it reads: a tenth of a second
PARTS = {"system": "prompt", "user": "prompt", "assistant": "trace"}  # role -> what its messages are


def check_files(run: Run) -> Iterator[Finding]:
    """Check that each file can be read, has rows and the columns that verl needs; and that a split's files fit."""
    if not run.files("train"):
        yield fail("data.train_files names no file -> Set TRAIN_FILE of the launcher.")
    for split in ("train", "val"):
        samples: dict[Path, Sample] = {}
        for path in run.files(split):
            if problem := _why_not(run, split, path):
                yield problem
            else:
                samples[path] = run.sample(path)
        yield from _check_types(split, samples) if run.is_rl else ()


def _why_not(run: Run, split: str, path: Path) -> Finding | None:
    """Return what is wrong with a file as a whole."""
    from verl_ext.datasets.rows import DataError  # 0.3 s

    key, kinds = f"data.{split}_files", (".parquet", ".jsonl", ".json") if run.is_rl else (".parquet",)
    if not path.is_file():
        return fail(f"""{key}: {path} does not exist
            -> Create it with data/prepare_*.py (docs/guides/data.md), or set the launcher's TRAIN_FILE or VAL_FILE.""")
    if path.suffix not in kinds:
        return fail(f"{key} is {path}, expected a name that ends in {' or '.join(kinds)} -> Convert or rename it.")
    if run.is_rl and (found := [each for each in PATTERNS if each in str(path)]):
        return fail(f"""{key}: {path} contains {" and ".join(found)}, which `datasets` reads as a pattern, so that it
            finds no file -> Rename the file or its folder.""")
    try:
        found = run.sample(path)
    except DataError as error:
        return fail(f"{key}: {error} -> Recreate the file, or correct it.")
    if not found.rows:
        return fail(f"{key}: {path} has no rows -> Recreate the file.")
    if (text := run.text_column) not in found.columns.names:
        hint = did_you_mean(text, found.columns.names)
        return fail(f"""{key}: {path} has no column {text!r}; its columns are {", ".join(found.columns.names)}
            -> {hint} Set data.{"prompt_key" if run.is_rl else "messages_key"}, or rename the column.""")
    return None


def _check_types(split: str, samples: dict[Path, Sample]) -> Iterator[Finding]:
    """Check that `datasets` can join the files of a split: shared columns have one type."""
    seen: dict[str, tuple[Path, pa.DataType]] = {}
    for path, sample in samples.items():
        for column in sample.columns:
            first, kind = seen.setdefault(column.name, (path, column.type))
            if different := _difference(column.name, kind, column.type):
                yield fail(f"""data.{split}_files: {different} in {path}, but has another type in {first}: verl cannot
                    join them -> Write both with the same types: with data/prepare_*.py, or by casting the column in
                    pandas.""")
                return


def _difference(name: str, one: "pa.DataType", other: "pa.DataType") -> str:
    """Return `reward_model.ground_truth is int64` if two types of a column cannot be joined; "" if they can."""
    import pyarrow as pa

    if pa.types.is_struct(one) and pa.types.is_struct(other):
        pairs = (
            (each.name, one.field(each.name).type, each.type) for each in other if one.get_field_index(each.name) >= 0
        )
        return next(filter(None, (_difference(f"{name}.{field}", *types) for field, *types in pairs)), "")
    return "" if one == other or _is_null(one) or _is_null(other) else f"{name} is {other}"


def _is_null(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_null(kind) or (pa.types.is_list(kind) and _is_null(kind.value_type))


def check_protocol(run: Run) -> Iterator[Finding]:
    """Check that the first rows' prompts, and traces of SFT, are written for the tool protocol of the run."""
    setting = "retool.protocol" if run.is_rl else "data.retool.protocol"
    key = run.text_column
    loops = agent_loops(run) if run.is_rl else {}
    domains = read_domains(run.config) if run.is_rl else {}
    default_loop = run.get(f"{ROLLOUT}.agent.default_agent_loop")
    for split, path in run.all_files():
        rows, seen = 0, Counter()  # (part, protocol) -> rows with its tag, but not their own protocol's
        for row in first_rows(path, [key, "agent_name", "data_source"], FIRST_ROWS):
            own = loops.get(row.get("agent_name") or default_loop) if run.is_rl else run.protocol
            messages = row.get(key)
            if own == "":
                own = domains.get(str(row.get("data_source")), run).protocol
            if own is None or not isinstance(messages, list):
                continue
            rows += 1
            texts: dict[str, str] = dict.fromkeys(PARTS.values(), "")
            for message in messages:
                if isinstance(message, dict) and (part := PARTS.get(str(message.get("role")))):
                    said = str(message.get("content"))
                    texts[part] += f" {without_tool(said) if own == 'text' and part == 'prompt' else said}"
            seen.update(
                (part, name)
                for part, text in texts.items()
                for name, tag in TAGS.items()
                if tag in text and (own not in TAGS or TAGS[own] not in text)
            )
        for (part, name), number in seen.items():
            text = f"""{split}: {number} of the first {rows} {part}s of {path.name} contain {TAGS[name]}, the tag of the
                protocol {name}, but not the tag of {setting}={run.protocol}"""
            if run.protocol == "text":  # of a trace, check_rows reports the call
                if 2 * number > rows and part == "prompt":
                    yield fail(f"""{split}: {number} of the first {rows} prompts of {path.name} contain {TAGS[name]},
                        but with {setting}=text the model has no tool -> Leave this instruction out of the data.""")
            elif 2 * number > rows and part == "prompt":
                yield fail(f"{text} -> Set {setting}={name}, or recreate the data with --protocol {run.protocol}.")
            elif 2 * number > rows:  # RetoolSFTDataset rewrites them
                yield warn(f"{text}; their calls will be rewritten -> If you do not want this, set {setting}={name}.")


def check_agent_names(run: Run) -> Iterator[Finding]:
    """Check that the agent loops that the data name are registered."""
    loops = agent_loops(run)
    for split, path in run.all_files() if run.is_rl else ():
        names = Counter(row.get("agent_name") for row in first_rows(path, ["agent_name"], None))
        for name, number in names.items():
            if name is not None and name not in loops:
                yield fail(f"""{split}: agent_name is {name!r} in {number} rows of {path.name}, which
                    {run.get(f"{ROLLOUT}.agent.agent_loop_config_path")} does not register
                    -> {did_you_mean(str(name), loops)} Choose one of {", ".join(sorted(loops))}.""")


def check_code_tests(run: Run, *, is_quick: bool = False) -> Iterator[Finding]:
    """Check that the rows for the verifier of code have tests, and that these need only calls with plain data.

    Args:
        is_quick: look at some rows only.
    """
    if not run.has_own_reward:
        return
    from verl_ext.reward.verifiers import Verifiers  # 0.1 s
    from verl_ext.reward.verifiers.code import CodeVerifier, refused_tests

    try:
        verifiers = Verifiers.of_run(run.config)
    except Exception:  # from whatever a verifier's author wrote; check_verifiers reports it
        return
    for split, path in run.all_files():
        number, size, refused, broken = 0, 0, [], []
        for where, row in _scored_rows(run, path, is_quick):
            kind = verifiers.find_class(str(row.get("data_source") or ""), str(row.get("ability") or ""))
            if not (isinstance(kind, type) and issubclass(kind, CodeVerifier)) or (is_quick and size > QUICK_TESTS):
                continue
            model = row.get("reward_model")
            truth = model.get("ground_truth") if isinstance(model, dict) else model
            number, size = number + 1, size + len(str(truth))
            try:
                refused += [f"{where.rpartition(', ')[2]}: {why}" for why in refused_tests(truth)[:1]]
            except ValueError as error:
                broken.append(f"{where.rpartition(', ')[2]}: {error}")
        of = f"{number} rows {'in a sample ' * is_quick}of {path.name}"
        if broken:
            yield fail(f"""{split}: {len(broken)} of {of} for the verifier of code would stop the run ({broken[0]})
                -> Correct these rows, or leave them out.""")
        if refused:
            yield fail(f"""{split}: {len(refused)} of {of} have tests that need more than calls with plain data
                ({refused[0]}), so that no response to them would be trained on
                -> Leave out the rows for which verl_ext.reward.verifiers.code.refused_tests gives a reason.""")
        if number and not broken and not refused:
            yield ok(f"{split}: the tests of {of} can judge a program")


def _scored_rows(run: Run, path: Path, is_quick: bool) -> Iterable[tuple[str, dict[str, Any]]]:
    """Return (where, row) with what chooses a verifier and what it gets; of a sample, in a random order, if quick."""
    if not is_quick:
        rows = first_rows(path, ["data_source", "ability", "reward_model"], None)
        return ((f"row {number}", row) for number, row in enumerate(rows))
    from verl_ext.datasets.rows import DataError  # 0.3 s

    with suppress(DataError, OSError):  # check_files reports them
        rows = run.sample(path).rows
        return random.Random(0).sample(rows, len(rows))
    return []
