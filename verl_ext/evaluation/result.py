"""The result of an evaluation, from its folder: `result.json` for programs, `result.md` for people."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_ext.episode import Episode, EpisodeKey, Reward, TokenRow, ToolUse
from verl_ext.evaluation import figures as evaluation
from verl_ext.evaluation.samples import Sample, read_dump
from verl_ext.evaluation.store import SETTINGS, flatten
from verl_ext.outcome import EVALUATION_FAILURES
from verl_ext.records import store
from verl_ext.rollout.tool_use import tool_metrics
from verl_ext.runs import durable, jsonl
from verl_ext.runs.folder import SAMPLES, sample_files


class NoSamples(ValueError):
    """There is no file of samples, or nothing in it that could be judged."""


def find_samples(path: Path) -> Path:
    """Return the samples that a path means: a JSONL file, the folder of an evaluation, or of validation dumps.

    For a folder of dumps these are those of the last step. For a run's folder they are the last validation (from its
    records, or else from verl's dumps), or else the last evaluation; for the quickstart's folder those after RL, or
    before, or those of its RL run.

    Raises:
        NoSamples: there are none of these.
    """
    if path.is_file():
        return path
    if not (found := sample_files(path)):
        raise NoSamples(
            f"No samples at {path}. Expected the folder of an evaluation, of a run with validations or evaluations, a "
            "file of samples or records, or a trainer.validation_data_dir with <step>.jsonl."
        )
    return found[-1]


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
        ValueError: a file has a row of another form; the message names the line.
    """
    settings = {"draws": draws, "seed": seed}
    file = find_samples(path)
    samples, about, tools = _judged_somewhere(file), _about(file), _tools(file)
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


def _judged_somewhere(file: Path) -> list[Sample]:
    samples = read_dump(file)
    if all(sample.failure for sample in samples):
        kinds = dict(Counter(sample.failure for sample in samples)) or "it is empty"
        raise NoSamples(f"No sample in {file} was judged: {kinds}. See the warnings that the evaluation printed.")
    return samples


def _about(file: Path) -> dict[str, Any]:
    """Return what the evaluation has noted about itself; {} for a validation dump."""
    noted = file.parent / SETTINGS
    return json.loads(noted.read_text()) if file.name == SAMPLES and noted.is_file() else {}


def _tools(file: Path) -> dict[str, float]:
    """Return `tool_metrics` of the samples that were judged; {} for a validation dump, which has no `tool_use`."""
    rows = map(_tool_row, store.read(file).to_pylist()) if file.suffix == ".parquet" else jsonl.read(file)
    last = {row.get("uid"): row for row in rows}.values()
    return tool_metrics([_episode(row) for row in last if row.get("tool_use") and not row.get("failure")])


def _episode(row: Mapping[str, Any]) -> Episode:
    """Return what `tool_metrics` needs of a row of `samples.jsonl`."""
    return Episode(
        EpisodeKey(str(row["uid"]), 0),
        rows=[TokenRow(model_spans=row["model_spans"])],
        finish_reason=row["finish_reason"],
        use=msgspec.convert(row["tool_use"], ToolUse),
        reward=Reward(None, {"acc": row["acc"]}),
    )


def _tool_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of records with the keys of `samples.jsonl` that `_episode` takes."""
    turns = [turn for turn in row["turns"] or () if turn["role"] == "model"]
    return {
        "uid": (row["uid"], row["session"]),
        "tool_use": json.loads(row["tool_use"] or "{}"),
        "acc": row["acc"],
        "failure": row["acc"] is None,
        "finish_reason": row["end_reason"],
        "model_spans": [(turn["start"], turn["start"] + turn["tokens"]) for turn in turns],
    }


def _comparison(
    file: Path, samples: Sequence[Sample], other: Path, settings: Mapping[str, int]
) -> tuple[dict[str, Any], str]:
    before = _judged_somewhere(other)
    difference = evaluation.compare(before, samples, **settings)
    if not difference:
        raise NoSamples(
            f"{file} and {other} have no judged problem in common. Problems are paired by data source and "
            "text: compare evaluations of the same data."
        )
    sides = evaluation.evaluate(before, **settings), evaluation.evaluate(samples, **settings)
    block = [f"## Compared with {other} (before)", *map(markdown, evaluation.comparison_tables(*sides, difference))]
    if unmatched := evaluation.unmatched_problems(difference):
        block.append(f"{unmatched} problems have judged samples on only one side and are not in the difference.")
    then, now = (flatten(_about(each).get("settings") or {}) for each in (other, file))
    differing = {key: [then.get(key), now.get(key)] for key in then | now if then.get(key) != now.get(key)}
    if differing:
        notes = [f"- {key}: {old!r} -> {new!r}" for key, (old, new) in differing.items()]
        block.append("\n".join(["Settings that differ:", *notes]))
    result = {"with": str(other), "before": evaluation.to_json(sides[0]), "difference": evaluation.to_json(difference)}
    return result | {"settings": differing}, "\n\n".join(block)


def _settings_table(about: Mapping[str, Any]) -> str:
    rows = [["setting", "value"], *([key, f"`{value}`"] for key, value in flatten(about["settings"]).items())]
    rows += [[key, f"`{about[key]}`"] for key in ("model", "server", "config", "overrides", "sandbox") if key in about]
    return markdown(rows)
