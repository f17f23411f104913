"""The result of an evaluation, from its folder: `result.json` for programs, `result.md` for people."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_ext.episode import AgentUse, Episode, EpisodeKey, Reward, TokenRow, ToolUse
from verl_ext.evaluation import figures as evaluation
from verl_ext.evaluation.samples import NoSamples, Sample, failure_of, find_samples, sample_of
from verl_ext.evaluation.store import flatten
from verl_ext.outcome import EVALUATION_FAILURES
from verl_ext.records import store
from verl_ext.rollout.tool_use import agent_metrics, tool_metrics
from verl_ext.runs import durable
from verl_ext.runs.folder import FOLDER, SETTINGS


def make_result(
    path: Path, *, compared_with: Path | None = None, draws: int = 10_000, seed: int = 0
) -> tuple[dict[str, Any], str]:
    """Return (result as plain JSON, result as Markdown) of the samples at `path`, see `find_samples`.

    Args:
        compared_with: other samples to compare with: differences are `path` minus these.
        draws: number of bootstrap resamples.
        seed: the bootstrap's seed.
    Raises:
        NoSamples: none were judged, or the two sides have no problem in common.
        Unreadable: a file is no file of records; the message names it.
    """
    settings = {"draws": draws, "seed": seed}
    file = find_samples(path)
    rows, about = store.read(file).to_pylist(), _about(file)
    samples, tools = _judged_somewhere(file, rows), _tools(rows)
    figures, curves = evaluation.evaluate(samples, **settings), evaluation.by_k(samples, **settings)
    failed = Counter(sample.failure for sample in samples if sample.failure)
    wanted = about.get("samples") or len(samples)
    judged = len(samples) - failed.total()
    result = about | {
        "samples": {"file": str(file), "wanted": wanted, "judged": judged, "missing": wanted - len(samples)}
        | {kind: failed[kind] for kind in EVALUATION_FAILURES},
        "figures": evaluation.to_json(figures),
        "by_k": evaluation.to_json(curves),
        "tools": tools,
    }
    blocks = [f"# {about.get('title') or file}"]
    if judged < wanted:
        counts = ", ".join(f"{kind} {failed[kind]}" for kind in EVALUATION_FAILURES if failed[kind])
        blocks.append(
            f"**{wanted - judged} of {wanted} samples are not judged** (not taken {wanted - len(samples)}"
            f"{'; ' + counts if counts else ''}). They are in no figure; the same command tries them again."
        )
    if short := figures["overall"].num_problems_short:
        blocks.append(f"{short} problems have fewer than k judged samples; best@k and maj@k use those that they have.")
    accuracy, behaviour = evaluation.evaluation_tables(figures)
    by_size = [["acc by k, 95% interval", "k", "pass@k", "maj@k"]]
    for group, curve in curves.items():
        if evaluation.is_shown(group, figures[group].data_sources):
            for k, best in curve["pass@k"].items():
                by_size.append([group, str(k), *map(evaluation.format_estimate, (best, curve["maj@k"][k]))])
    blocks += map(markdown, (accuracy, by_size, behaviour))
    if compared_with is not None:
        comparison, block = _comparison(file, samples, find_samples(compared_with), settings)
        result["comparison"] = comparison
        blocks.append(block)
    if tools:
        blocks.append(markdown([["tool metric, all sets", "value"], *([k, f"{v:.4g}"] for k, v in tools.items())]))
    if about:
        blocks.append(_settings_table(about))
    return result, "\n\n".join(blocks) + "\n"


def write_result(folder: Path, result: Mapping[str, Any], text: str) -> None:
    """Write `result.json` and `result.md`; each appears when it is complete."""
    durable.write_text(folder / "result.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
    durable.write_text(folder / "result.md", text)


def markdown(table: list[list[str]]) -> str:
    """Format rows of cells, the first of them titles, as a Markdown table that is also aligned as text. Cells are
    escaped, so that no content ends its cell or row."""
    table = [[" ".join(cell.replace("|", "\\|").split("\n")) for cell in row] for row in table]
    widths = [max(3, *map(len, column)) for column in zip(*table, strict=True)]
    lines = evaluation.aligned(table, widths, " | ")
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def _judged_somewhere(file: Path, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    samples = [sample_of(row) for row in rows]
    if all(sample.failure for sample in samples):
        kinds = dict(Counter(sample.failure for sample in samples)) or "it is empty"
        raise NoSamples(f"No sample in {file} was judged: {kinds}. See the warnings that the evaluation printed.")
    return samples


def _about(file: Path) -> dict[str, Any]:
    """Return what an evaluation has noted about itself; {} for the records of a validation."""
    records = file.resolve().parent.parent
    noted = records.parent / SETTINGS
    return json.loads(noted.read_text()) if records.name == FOLDER and noted.is_file() else {}


def _tools(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return `tool_metrics` and `agent_metrics` of the samples that were judged; {} if they note no use of tools, as
    imported ones."""
    noted = [row for row in rows if row["tool_use"] not in (None, "{}") and not failure_of(row)]
    episodes = [_episode(row) for row in noted]
    return tool_metrics(episodes) | agent_metrics(episodes)


def _episode(row: Mapping[str, Any]) -> Episode:
    """Return what the metrics need of a row of the records."""
    spans: dict[int, list[tuple[int, int]]] = {0: []}  # by the row of the episode
    for turn in row["turns"]:
        if turn["role"] == "model":
            spans.setdefault(turn.get("row") or 0, []).append((turn["start"], turn["start"] + turn["tokens"]))
    return Episode(
        EpisodeKey(row["uid"], row["session"]),
        rows=[TokenRow(model_spans=spans[number]) for number in sorted(spans)],
        finish_reason=row["end_reason"],
        use=msgspec.json.decode(row["tool_use"], type=ToolUse),
        agent=msgspec.json.decode(row["agent"], type=AgentUse) if row.get("agent") else None,
        reward=Reward(None, {"acc": row["acc"]}),
    )


def _comparison(
    file: Path, samples: Sequence[Sample], other: Path, settings: Mapping[str, int]
) -> tuple[dict[str, Any], str]:
    before = _judged_somewhere(other, store.read(other).to_pylist())
    difference = evaluation.compare(before, samples, **settings)
    if not difference:
        raise NoSamples(
            f"{file} and {other} have no judged problem in common. Problems are paired by data source and "
            "text: compare evaluations of the same data."
        )
    one, two = (evaluation.evaluate(side, **settings) for side in evaluation.paired(before, samples))
    block = [f"## Compared with {other} (before)", *map(markdown, evaluation.comparison_tables(one, two, difference))]
    if unmatched := evaluation.unmatched_problems(difference):
        block.append(f"{unmatched} problems have judged samples on only one side and are not in the difference.")
    then, now = (flatten(_about(each).get("settings") or {}) for each in (other, file))
    differing = {key: [then.get(key), now.get(key)] for key in then | now if then.get(key) != now.get(key)}
    if differing:
        notes = [f"- {key}: {old!r} -> {new!r}" for key, (old, new) in differing.items()]
        block.append("\n".join(["Settings that differ:", *notes]))
    figures = evaluation.to_json({"before": one, "after": two, "difference": difference})
    return {"with": str(other)} | figures | {"settings": differing}, "\n\n".join(block)


def _settings_table(about: Mapping[str, Any]) -> str:
    rows = [["setting", "value"], *([key, f"`{value}`"] for key, value in flatten(about["settings"]).items())]
    rows += [[key, f"`{about[key]}`"] for key in ("model", "server", "config", "overrides", "sandbox") if key in about]
    return markdown(rows)
