"""Pages name only files, settings, metrics and headings that exist, stay within budgets, and quote the data."""

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
PAGES = sorted(
    path.relative_to(REPO) for path in [*REPO.glob("*.md"), REPO / "recipe/README.md", *REPO.glob("docs/**/*.md")]
)
OURS = ("tool", "turn", "finish", "failure", "filter_groups", "train")
METRIC = re.compile(rf"(?:{'|'.join(OURS)}|training|actor|critic|timing_s|perf|response_length|num_turns)/[\w/]+")
SETTING = re.compile(r"((?:algorithm|data|actor_rollout_ref|reward|trainer|retool|ray_kwargs)\.[a-z_.0-9]+)(?:=.*)?")
PATH = re.compile(r"(?:verl_ext|verl|scripts|recipe|docs|data|tests|configs)/[\w./*-]+")


def text_of(page: Path | str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


def code(page: Path | str) -> list[str]:
    """Return what stands between single back quotes."""
    return re.findall(r"`([^`\n]+)`", text_of(page))


def words_of_code(page: Path) -> list[str]:
    """What stands in blocks of code and between back quotes, word by word: `pytest tests/unit` has a path."""
    text = text_of(page)
    blocks, rest = re.findall(r"```(.*?)```", text, re.DOTALL), re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks += re.findall(r"^    \S.*", rest, re.MULTILINE)
    return [word for span in [*blocks, *re.findall(r"`([^`\n]+)`", rest)] for word in span.split()]


def logged() -> set[str]:
    keys = set()
    for name in ("rl_metrics.jsonl", "sft_metrics.jsonl"):
        for line in text_of(f"tests/data/{name}").splitlines():
            keys |= json.loads(line)["data"].keys()
    return keys


@pytest.fixture(scope="module")
def settings() -> list[dict]:
    """The composed runs of 32B, RL and SFT."""
    runs = []
    for run in ("qwen2-32b_dapo", "qwen2-32b_sft"):
        with initialize_config_dir(str(REPO / "configs"), version_base=None):
            config = compose(run, overrides=[f"hydra.searchpath=[file://{VERL}/trainer/config]"])
            runs.append(OmegaConf.to_container(config, resolve=False))
    return runs


def launcher_rows() -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text_of("docs/reference/recipes.md").splitlines()]
    return {row[0].strip("`"): row for row in rows if row[0].startswith("`run_")}


def test_every_launcher_is_in_the_table_and_the_other_way_round():
    assert sorted(launcher_rows()) == sorted(path.name for path in (REPO / "recipe" / "retool").glob("run_*.sh"))


def test_the_test_that_a_row_names_starts_that_launcher():
    """A name in the test's source: of the launcher, of its run, or, for the quickstart, in what it can make.

    A row may say `no: ` and which run, that a test starts, has all that is in it.
    """
    for name, (_, cpu_run) in launcher_rows().items():
        tests = re.findall(r"tests/e2e/\w+\.py", cpu_run)
        assert tests or cpu_run.startswith("no: "), name
        for test in tests:
            source = text_of(test)
            if test.endswith("test_quickstart.py"):
                source += text_of("verl_ext/quickstart/rungs.py")
            run = name.removeprefix("run_").removesuffix(".sh")
            assert f'"{run}"' in source or name in source, f"{test} does not start {name}"


def test_every_metric_in_the_pages_is_logged():
    found = {text for page in PAGES for text in code(page) if METRIC.fullmatch(text)}
    assert len(found) > 50
    known = logged() | {f"tool/malformed/{kind}" for kind in MALFORMED_KINDS}
    # What the recorded run did not log: the published run's name, and metrics of options.
    known |= {"perf/max_memory_allocated_gb", "failure/alarm", "filter_groups/surplus", "filter_groups/kept"}
    # newer than the recorded run
    known |= {"finish/timeout", "finish/agent_error", "tool/replays", "curriculum/left_out"}
    known |= {f"failure/{share}_{cause}" for share in ("share", "run_share") for cause in EXCLUSIONS}
    known |= {f"actor/{share}" for share in ("clipped_low", "clipped_high", "dropped", "not_finite")}
    known |= {f"actor/{SKIPPED}", f"train/{SKIPPED}", "training/off_policy/evicted_samples"}
    known |= {"critic/advantages"}  # verl logs its mean, max and min
    placeholders = {key for key in found if re.search(r"[A-Z]{3}", key)}  # finish/END
    assert {key for key in found - known - placeholders if not key.startswith("tool/error/")} == set()


def test_every_setting_in_the_pages_exists(settings):
    words = [word.lstrip("+") for page in PAGES for word in words_of_code(page)]
    found = {match[1] for word in words if (match := SETTING.fullmatch(word))}
    assert len(found) > 60
    for key in found:
        trees = settings
        for part in key.split("."):
            trees = [tree[part] for tree in trees if isinstance(tree, dict) and part in tree]
        assert trees, f"{key} is no setting of the 32B runs"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_path_that_a_page_names_in_code_exists(page: Path):
    """Paths start at the repository's root, verl's at its package; `*` stands for some file."""
    named = {match[0] for text in words_of_code(page) for match in [PATH.match(text)] if match}
    roots = {"verl": VERL.parent}
    missing = [path for path in sorted(named) if not list(roots.get(path.split("/")[0], REPO).glob(path.rstrip("/.")))]
    examples = re.compile(r".*NAME|.*/x/|.*\.parquet|.*my_task|docs outputs")
    assert [path for path in missing if not examples.match(path)] == []


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as code hosts make them."""
    found = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        there = (REPO / page.parent / path).resolve() if path else REPO / page
        if "://" not in target and (not there.exists() or (anchor and anchor not in headings(there))):
            broken.append(target)
    assert broken == []


def test_readme_links_every_page_or_a_page_that_does():
    linked = {"README.md"}
    for _ in range(2):
        for page in list(linked):
            found = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+\.md)[^)]*\)", text_of(page))]
            near = [(REPO / page).parent.joinpath(target).resolve() for target in found if "://" not in target]
            linked |= {str(path.relative_to(REPO)) for path in near}
    unlinked = {str(page) for page in PAGES} - linked - {"recipe/README.md"}
    assert sorted(page for page in unlinked if not page.startswith("docs/upstream/")) == []  # those are for verl


def test_every_page_is_within_its_budget(load_script):
    assert load_script("docs_words").main() == 0


def test_a_long_page_has_contents():
    long = [page for page in PAGES if len(text_of(page).split()) > 800 and page.name != "settings.md"]
    assert long and [page for page in long if not re.search(r"\]\(#", text_of(page))] == []


def test_the_page_of_settings_and_the_picture_are_what_their_scripts_write(load_script):
    settings, system = load_script("settings_page"), load_script("draw_system")
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run python scripts/settings_page.py"
    assert system.OUT.read_text(encoding="utf-8") == system.draw(), "run python scripts/draw_system.py"


def test_every_word_of_the_glossary_is_used():
    """On another page, or in the docstring of a module."""
    rows = re.findall(r"^\| (?!Word |-)(.*?) \|", text_of("docs/reference/glossary.md"), re.MULTILINE)
    words = [word.strip("` ") for row in rows for word in row.split(", ")]
    texts = [text_of(page) for page in PAGES if page.name != "glossary.md"]
    for path in REPO.glob("verl_ext/**/*.py"):
        texts.append(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    text = re.sub(r"\s+", " ", " ".join(texts))
    stems = {word: re.escape(word.removesuffix("y")) for word in words}  # reply, replies
    unused = [word for word, stem in stems.items() if not re.search(rf"\b{stem}", text, re.IGNORECASE)]
    assert len(words) > 20 and unused == []


def test_published_figures_of_the_tutorial_are_those_of_the_data():
    """The table of docs/tutorials/train-32b.md against data/published, in the table's own rounding."""
    text = text_of("docs/tutorials/train-32b.md")
    rows: dict[str, dict[int, dict]] = {name: {} for name in ("rl", "sft")}
    for name, steps in rows.items():
        for line in text_of(f"data/published/{name}.jsonl").splitlines():
            entry = json.loads(line)
            steps[entry["step"]] = entry["data"]
    for step in (1, 152):
        assert re.search(rf"\| SFT step {step}\b.*`train/loss` {rows['sft'][step]['train/loss']:.2f}", text)
    before = rows["rl"][0]
    validation = "val-core/aime_2025/acc"
    assert f"mean@30 {before[f'{validation}/mean@30']:.0%}" in text
    assert (
        f"best@30 {before[f'{validation}/best@30/mean']:.0%}, maj@30 {before[f'{validation}/maj@30/mean']:.0%}" in text
    )
    for step in (1, 5, 10):
        data = rows["rl"][step]
        row = next(line for line in text.splitlines() if line.startswith(f"| RL step {step} |"))
        assert f"score {data['critic/score/mean']:.2f}" in row
        assert f"{data['response_length/mean']:,.0f} tokens" in row
        assert f"{data['timing_s/step'] / 60:.0f} minutes" in row
        if step > 1:
            assert f"mean@30 {data[f'{validation}/mean@30']:.0%}" in row


def test_the_functions_of_verl_are_on_the_lines_that_the_method_names():
    lines = (VERL / "trainer/ppo/core_algos.py").read_text(encoding="utf-8").splitlines()
    found = re.findall(r"`(\w+)` \(line\s+(\d+)\)", text_of("docs/explanation/method.md"))
    assert [name for name, _ in found] == ["compute_grpo_outcome_advantage", "compute_policy_loss_vanilla", "agg_loss"]
    for name, number in found:
        assert lines[int(number) - 1].startswith(f"def {name}("), name
