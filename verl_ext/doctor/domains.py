"""Whether the domains of a run can be played and scored: an episode of each is opened, some answers are scored."""

import asyncio
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.rows import DataError
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

SCORED = 20  # rows of a domain whose right and empty answers are scored
SHOWN = 300  # characters of a first prompt, of its beginning and of its end
OPEN_S = 60.0


def check_sources_of_rows(run: Run) -> Iterator[Finding]:
    """Check that the table of domains names the data sources of a sample of the rows."""
    try:
        domains = read_domains(run.config) if run.is_rl else {}
    except ValueError:  # check_config reports it
        return
    for split in ("train", "val") if domains else ():
        sources = [str(row.get("data_source")) for _, row in _rows(run, split)]
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
    for where, row in [*_rows(run, "train"), *_rows(run, "val")]:
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
        protocol = make_protocol(
            loop or domain.protocol, tokenizer, template_kwargs(run), max_parallel_calls=ANY_NUMBER
        )
        try:
            environments = Environments(domain.environment, run.config, tools if protocol.call_ends_turn else ())
            opening = asyncio.run(_open(environments, row, run.text_column))
        except Exception as error:  # whatever an environment's author wrote
            yield fail(f"""{what}: an episode of {where} could not be opened: {type(error).__name__}: {error}
                -> Correct retool.environment or the row, or start what it needs.""")
            continue
        prompt = render(tokenizer, opening.messages, template_kwargs(run), tools=protocol.schemas(opening.tools))
        yield ok(f"{what}: an episode in {domain.environment} begins with\n{_shortened(prompt)}")
        if run.has_own_reward:
            yield from _check_scores(run, what, rows[name][:SCORED])


async def _open(environments: Any, row: Mapping[str, Any], prompt_key: str) -> Any:
    environment = environments.make()
    try:
        async with asyncio.timeout(OPEN_S):
            return await environment.open({**row, "raw_prompt": row[prompt_key], "uid": "doctor", "session_id": 0})
    finally:
        await environment.close()


def _check_scores(run: Run, what: str, rows: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Check that the right answer of each row scores 1 and an empty one 0, where the verifier can write an answer."""
    from verl_ext.reward.verifiers import Verifiers, entries_of

    verifiers = Verifiers(run.config, entries_of(run.config))
    wrong, tried = [], 0

    async def score() -> None:
        nonlocal tried
        for where, row in rows:
            verifier = verifiers.find(str(row.get("data_source") or ""), str(row.get("ability") or ""))
            truth = (row.get("reward_model") or {}).get("ground_truth")
            gold = (row.get("extra_info") or {}).get("gold_response")
            if gold is None and hasattr(verifier, "gold"):
                gold = verifier.gold(truth)
            if gold is None:
                continue
            tried += 1
            sample = {**row, "raw_prompt": row.get(run.text_column)}
            for text, expected in ((gold, 1.0), ("", 0.0)):
                found = await verifier.verify(text, truth, sample)
                if found.acc != expected:
                    wrong.append(f"{where}: {text!r:.80} scores {found.acc} ({found.verdict}), expected {expected:g}")

    try:
        asyncio.run(score())
    except Exception as error:  # of a verifier
        yield fail(f"{what}: a verifier raised {type(error).__name__}: {error} -> Correct the row or the verifier.")
        return
    if wrong:
        yield warn(f"""{what}: of the right and the empty answers of {tried} rows, {len(wrong)} are scored wrongly
            ({wrong[0]}) -> Correct the ground truths, or choose another verifier for the domain.""")
    elif tried:
        yield ok(f"{what}: the right answers of {tried} rows score 1, empty ones 0")
    else:
        yield ok(f"""{what}: no right answers were tried, because its verifier cannot write one and the rows have no
            extra_info.gold_response""")


def _rows(run: Run, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in run.files(split):
        try:
            yield from run.sample(path).rows
        except (DataError, OSError):  # check_files reports it
            continue


def _shortened(text: str) -> str:
    if (cut := len(text) - 2 * SHOWN) > 0:
        text = f"{text[:SHOWN]}\n[... {cut} characters ...]\n{text[-SHOWN:]}"
    return textwrap.indent(text, "| ", lambda line: True)
