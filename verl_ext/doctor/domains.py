"""Whether the domains of a run can be played and scored: an episode of each is opened, some answers are scored."""

import asyncio
import textwrap
from collections.abc import Coroutine, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from verl_ext.datasets.peek import first_rows
from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.names import agent_loops
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.doctor.template import load_tools, template_kwargs
from verl_ext.protocols.base import render
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.trace import ANY_NUMBER
from verl_ext.settings.domains import check_sources, of_whole_run, read_domains

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

SCORED = 20  # rows of a domain whose right and empty answers are scored
SHOWN = 300  # characters of a first prompt, of its beginning and of its end
OPEN_S = 60.0
SCORE_S = 300.0  # of an answer
AT_ONCE = 4  # rows whose answers are scored


def check_sources_of_rows(run: Run) -> Iterator[Finding]:
    """Check that the table of domains names the data source of every row."""
    try:
        domains = read_domains(run.config) if run.is_rl else {}
    except ValueError:  # check_config reports it
        return
    for split in ("train", "val") if domains else ():
        rows = chain.from_iterable(first_rows(path, ["data_source"], None) for path in run.files(split))
        sources = [str(row.get("data_source")) for row in rows]
        try:
            check_sources(run.config, split, sources)
        except ValueError as error:
            yield fail(f"{error} -> Correct retool.domains or the files.")


def check_domains(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """Open an episode of each domain and show its first prompt; score right and empty answers. Imports verl."""
    if not run.is_rl:
        return
    from verl_ext.environments.by_name import Environments

    domains = read_domains(run.config) or {None: of_whole_run(run.config)}
    rows: dict[str | None, list[tuple[str, Mapping[str, Any]]]] = {name: [] for name in domains}
    for where, row in [*run.rows("train"), *run.rows("val")]:
        rows.get(row.get("data_source") if None not in rows else None, []).append((where, row))
    tools, loops = load_tools(run), agent_loops(run)
    for name, domain in domains.items():
        what = f"domain {name}" if name else "the data"
        if not rows[name]:
            continue  # check_files or check_sources reports it
        where, row = rows[name][0]
        loop = loops.get(row.get("agent_name") or run.get(f"{ROLLOUT}.agent.default_agent_loop"))
        if loop is None:  # one of verl's own, which knows no environments
            continue
        name_of_protocol = loop or domain.protocol or run.protocol
        protocol = make_protocol(name_of_protocol, tokenizer, template_kwargs(run), max_parallel_calls=ANY_NUMBER)
        try:
            environments = Environments(domain.environment, run.config, tools if protocol.call_ends_turn else ())
            opening = asyncio.run(_closed(run, _open(environments, row, run.text_column)))
        except Exception as error:  # whatever an environment's author wrote
            yield fail(f"""{what}: an episode of {where} could not be opened: {type(error).__name__}: {error}
                -> Correct retool.environment or the row, or start what it needs.""")
            continue
        prompt = render(
            tokenizer, protocol.prompt(opening.messages), template_kwargs(run), tools=protocol.schemas(opening.tools)
        )
        yield ok(f"{what}: an episode in {domain.environment} begins with\n{_shortened(prompt)}")
        if run.has_own_reward:
            yield from _check_scores(run, environments, what, rows[name][:SCORED])


async def _closed(run: Run, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` gives; then close the connections to the sandbox, which belong to this event loop."""
    from verl_ext.environments.shared_client import shared_client

    try:
        return await work
    finally:
        await shared_client(run.config.retool.sandbox).aclose()


async def _open(environments: Any, row: Mapping[str, Any], prompt_key: str) -> Any:
    environment = environments.make()
    try:
        async with asyncio.timeout(OPEN_S):
            return await environment.open(_task(row, prompt_key))
    finally:
        await environment.close()


def _task(row: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    return {**row, "raw_prompt": row[prompt_key], "uid": "doctor", "session_id": 0}


def _check_scores(
    run: Run, environments: Any, what: str, rows: list[tuple[str, Mapping[str, Any]]]
) -> Iterator[Finding]:
    """Check that what is right for a row scores 1, and nothing at all less: by its environment, or else verifier."""
    from verl_ext.environments.validation import Validator
    from verl_ext.reward.verifiers import Verifiers

    async def check() -> list[Any]:
        verifiers = Verifiers.of_run(run.config)
        validator = Validator({None: environments}, verifiers, prompt_key=run.text_column, row_s=SCORE_S)
        return [each async for each in validator.check_all(rows, at_once=AT_ONCE)]

    checked = asyncio.run(_closed(run, check()))
    if raised := [each for each in checked if each.error]:
        yield fail(f"""{what}: scoring {raised[0].where} raised {raised[0].error} -> Correct the row or what scores it,
            or start what it needs.""")
    elif wrong := [f"{each.where}: {each.wrong[0]}" for each in checked if each.wrong]:
        yield warn(f"""{what}: of the right and the empty answers of {len(rows)} rows, {len(wrong)} are scored wrongly
            ({wrong[0]}) -> Correct the ground truths or tests, or choose another verifier for the domain.
            retool environments validate names all such rows of a file.""")
    elif tried := sum("right" in each.scores for each in checked):
        yield ok(f"{what}: the right answers of {tried} rows score 1, empty ones less")
    else:
        yield ok(f"""{what}: empty answers of {len(rows)} rows score less than 1; no right ones were tried, because the
            rows have neither extra_info.gold_response nor extra_info.gold_calls, nor a task with a solution""")


def _shortened(text: str) -> str:
    if (cut := len(text) - 2 * SHOWN) > 0:
        text = f"{text[:SHOWN]}\n[... {cut} characters ...]\n{text[-SHOWN:]}"
    return textwrap.indent(text, "| ", lambda line: True)
