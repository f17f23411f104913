"""README is short; all pages name only files and settings that exist, and the guides only metrics that do."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl_ext.outcome import EXCLUSIONS
from verl_ext.protocols.base import MALFORMED_KINDS
from verl_ext.trainer.skipped_updates import SKIPPED

REPO = Path(__file__).resolve().parents[2]
VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
DOCS = ("diagnose.md", "launchers.md", "reproduce.md")
OURS = ("tool", "turn", "finish", "failure", "filter_groups", "train")
METRIC = re.compile(rf"(?:{'|'.join(OURS)}|training|actor|critic|timing_s|perf|response_length|num_turns)/[\w/]+")
SETTING = re.compile(r"((?:algorithm|data|actor_rollout_ref|reward|trainer|retool|ray_kwargs)\.[a-z_.0-9]+)(?:=.*)?")
FILE = re.compile(r"(?:scripts|recipe|docs|data|tests|configs)/[\w./-]+\.(?:sh|py|md|sbatch|yaml)")


def code(name: str) -> list[str]:
    """What stands between single back quotes."""
    return re.findall(r"`([^`\n]+)`", (REPO / "docs" / name).read_text(encoding="utf-8"))


def words_of_code(page: Path) -> list[str]:
    """What stands in blocks of code and between back quotes, word by word: `pytest tests/unit` has a path."""
    text = (REPO / page).read_text(encoding="utf-8")
    blocks, rest = re.findall(r"```(.*?)```", text, re.DOTALL), re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks += re.findall(r"^    \S.*", rest, re.MULTILINE)
    return [word for span in [*blocks, *re.findall(r"`([^`\n]+)`", rest)] for word in span.split()]


def logged() -> set[str]:
    keys = set()
    for name in ("rl_metrics.jsonl", "sft_metrics.jsonl"):
        for line in (REPO / "tests" / "data" / name).read_text(encoding="utf-8").splitlines():
            keys |= json.loads(line)["data"].keys()
    return keys


@pytest.fixture(scope="module")
def settings() -> list[dict]:
    """The runs of 32B, RL and SFT, as they are composed."""
    runs = []
    for run in ("qwen2-32b_dapo", "qwen2-32b_sft"):
        with initialize_config_dir(str(REPO / "configs"), version_base=None):
            config = compose(run, overrides=[f"hydra.searchpath=[file://{VERL}/trainer/config]"])
            runs.append(OmegaConf.to_container(config, resolve=False))
    return runs


def launcher_rows() -> dict[str, list[str]]:
    lines = (REPO / "docs" / "launchers.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `run_")]
    assert all(len(row) == 4 for row in cells)
    return {row[0].strip("`"): row for row in cells}


def test_every_launcher_is_in_the_table_and_the_other_way_round():
    assert sorted(launcher_rows()) == sorted(path.name for path in (REPO / "recipe" / "retool").glob("run_*.sh"))


def test_the_test_that_a_row_names_starts_that_launcher():
    """A name in the test's source: of the launcher, of its run, or, for the quickstart, in what it can make.

    A row may say `no: ` and which run, that a test starts, has all that is in it.
    """
    for name, (_, _, cpu_run, _) in launcher_rows().items():
        tests = re.findall(r"tests/e2e/\w+\.py", cpu_run)
        assert tests or cpu_run.startswith("no: "), name
        for test in tests:
            source = (REPO / test).read_text(encoding="utf-8")
            if test.endswith("test_quickstart.py"):
                source += (REPO / "verl_ext" / "quickstart" / "rungs.py").read_text(encoding="utf-8")
            run = name.removeprefix("run_").removesuffix(".sh")
            assert f'"{run}"' in source or name in source, f"{test} does not start {name}"


def test_every_metric_in_the_guides_is_logged():
    found = {text for name in DOCS for text in code(name) if METRIC.fullmatch(text)}
    assert len(found) > 30
    kinds = {f"tool/malformed/{kind}" for kind in MALFORMED_KINDS}
    missing = found - logged() - kinds
    # The published run's name; and what a run with bypass_mode logs (tests/e2e/test_failures.py), which these are not.
    elsewhere = {"perf/max_memory_allocated_gb", "actor/entropy_loss"}
    elsewhere |= {f"failure/share_{cause}" for cause in EXCLUSIONS} | {
        "failure/run_share_verifier_unknown",
        "failure/alarm",
    }
    elsewhere |= {"filter_groups/surplus", "filter_groups/kept"}
    elsewhere |= {f"actor/{SKIPPED}", f"train/{SKIPPED}", "actor/not_finite"}  # of an objective of ours
    assert {key for key in missing if not key.startswith("tool/error/")} - elsewhere == set()


def test_every_setting_in_the_guides_exists(settings):
    words = [word.lstrip("+") for page in NO_HISTORY for word in words_of_code(page)]
    found = {match[1] for word in words if (match := SETTING.fullmatch(word))}
    assert len(found) > 60
    for key in found:
        trees = settings
        for part in key.split("."):
            trees = [tree[part] for tree in trees if isinstance(tree, dict) and part in tree]
        assert trees, f"{key} is no setting of the 32B runs"


def test_every_file_in_the_guides_exists():
    text = "\n".join((REPO / "docs" / name).read_text(encoding="utf-8") for name in DOCS)
    files = set(FILE.findall(text)) - {"recipe/retool/run_NAME.sh"}
    assert len(files) > 10
    assert [name for name in sorted(files) if not (REPO / name).exists()] == []


PAGES = sorted(
    path.relative_to(REPO) for path in [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), REPO / "recipe/README.md"]
)
NO_HISTORY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it may name what is gone
PATH = re.compile(r"(?:verl_ext|verl|scripts|recipe|docs|data|tests|configs)/[\w./*-]+")


def test_readme_has_at_most_700_words():
    """Tables and code counted, as `wc -w` does."""
    assert len((REPO / "README.md").read_text(encoding="utf-8").split()) <= 700


@pytest.mark.parametrize("page", NO_HISTORY, ids=str)
def test_every_path_that_a_page_names_in_code_exists(page: Path):
    """From the repository's root; verl's from its package; `*` stands for some file."""
    named = {match[0] for text in words_of_code(page) for match in [PATH.match(text)] if match}
    if page.name == "README.md":
        assert len(named) > 10
    roots = {"verl": VERL.parent}
    missing = [path for path in sorted(named) if not list(roots.get(path.split("/")[0], REPO).glob(path.rstrip("/.")))]
    examples = re.compile(r".*NAME|.*/x/|.*\.parquet|.*my_task")
    assert [path for path in missing if not examples.match(path)] == []


@pytest.mark.parametrize("page", NO_HISTORY, ids=str)
def test_every_link_of_a_page_leads_to_a_file(page: Path):
    text = (REPO / page).read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (REPO / page.parent / target).exists()] == []


def test_readme_links_every_page_of_docs_or_a_page_that_does():
    linked = {"README.md"}
    for _ in range(2):
        for page in list(linked):
            text = (REPO / page).read_text(encoding="utf-8")
            found = [
                target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+\.md)\)", text) if "://" not in target
            ]
            linked |= {str((REPO / page).parent.joinpath(target).resolve().relative_to(REPO)) for target in found}
    assert sorted({str(page) for page in PAGES} - linked) == []


def test_every_word_of_the_glossary_is_used():
    """On another page, or in the docstring of a module."""
    rows = re.findall(r"^\| (?!word |-)(.*?) \|", (REPO / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word.strip("` )") for row in rows for word in re.split(r", (?:or )?| or | / | \(", row)]
    texts = [(REPO / page).read_text(encoding="utf-8") for page in NO_HISTORY if page.name != "glossary.md"]
    for path in REPO.glob("verl_ext/**/*.py"):
        texts.append(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    text = re.sub(r"\s+", " ", " ".join(texts))
    stems = {word: re.escape(word.replace("@k", "@").removesuffix("y")) for word in words}  # reply, replies; mean@30
    unused = [word for word, stem in stems.items() if not re.search(rf"\b{stem}", text, re.IGNORECASE)]
    assert len(words) > 70 and unused == []


def test_published_figures_of_the_guide_are_those_of_the_data():
    """The tables of docs/reproduce.md, cell by cell, in the data's own rounding."""
    text = (REPO / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = {name: {} for name in ("rl", "sft")}
    for name, steps in rows.items():
        for line in (REPO / "data" / "published" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            steps[entry["step"]] = entry["data"]
    losses = [f"{rows['sft'][step]['train/loss']:.3f}".lstrip("0") for step in (1, 2, 3, 4, 5, 151, 152)]
    assert f"| `train/loss` | {' | '.join(losses)} |" in text
    seconds = [f"{rows['sft'][step]['train/time(s)']:.1f}" for step in (1, 2, 3, 4, 5, 151, 152)]
    assert f"| seconds | {' | '.join(seconds)} |" in text
    for step, validated in ((1, 0), (5, 5), (10, 10)):
        data = rows["rl"][step]
        accuracy = f"{rows['rl'][validated]['val-core/aime_2025/acc/mean@30']:.3f}".lstrip("0")
        cells = [
            str(step),
            f"{data['critic/score/mean']:.3f}".lstrip("0"),
            accuracy + (" (step 0)" if validated == 0 else ""),
            f"{data['response_length/mean']:.0f}",
            f"{100 * data['response_length/clip_ratio']:.1f}%".removeprefix("0"),
            f"{data['num_turns/mean']:.1f}",
            *(f"{data[key]:.3f}".lstrip("0") for key in ("actor/entropy", "actor/grad_norm")),
            *(f"{data[f'timing_s/{part}']:.0f}" for part in ("step", "gen", "update_actor")),
        ]
        assert f"| {' | '.join(cells)} |" in text


def test_the_functions_of_verl_are_on_the_lines_that_readme_names():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    lines = (VERL / "trainer/ppo/core_algos.py").read_text(encoding="utf-8").splitlines()
    found = re.findall(r"`(\w+)` \((?:line )?(\d+)\)", text)
    assert [name for name, _ in found] == ["compute_grpo_outcome_advantage", "compute_policy_loss_vanilla", "agg_loss"]
    for name, number in found:
        assert lines[int(number) - 1].startswith(f"def {name}("), name


def test_the_line_of_verl_that_switches_traces_off_is_where_the_guide_says():
    text = (REPO / "recipe" / "README.md").read_text(encoding="utf-8")
    [(file, number)] = re.findall(r"`(trainer/ppo/v1/agent_loop_tq\.py):(\d+)`", text)
    line = (VERL / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]
    assert line.strip() == "trace_this_sample = False"
