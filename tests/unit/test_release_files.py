"""Versions agree, and what the code host reads (workflows, issue forms) names only what is here."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPO / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (REPO / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PATH = re.compile(r"(?<![\w/.])(?:\.ci|configs|data|docs|requirements|scripts|tests)/[\w./-]+")
COMMIT = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(path: Path) -> dict[str, dict]:
    return loaded(path)["jobs"]


def strings(node: Any) -> list[str]:
    """Every text in a YAML document, without its keys."""
    if isinstance(node, dict):
        return [text for value in node.values() for text in strings(value)]
    if isinstance(node, list):
        return [text for value in node for text in strings(value)]
    return [node] if isinstance(node, str) else []


def test_citation_and_changelog_name_the_version_of_the_package():
    version = importlib.metadata.version("verl-retool")
    newest = re.search(r"^## \[(.+?)\]", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (newest[1], loaded(REPO / "CITATION.cff")["version"]) == (version, version)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_file_that_a_workflow_names_exists(workflow: Path):
    named = {path for text in strings(jobs(workflow)) for path in PATH.findall(text)}
    assert [path for path in sorted(named) if not (REPO / path).exists()] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_pinned_actions_for_a_limited_time(workflow: Path):
    for name, job in jobs(workflow).items():
        assert job["timeout-minutes"] <= 240, name
        assert [
            step["uses"] for step in job["steps"] if not COMMIT.fullmatch(step.get("uses", "a/b@" + "0" * 40))
        ] == []


def test_only_the_job_that_publishes_can_ask_for_an_upload_token():
    rights = {job: settings["permissions"] for path in WORKFLOWS for job, settings in jobs(path).items()}
    assert len(rights) >= 5
    assert [job for job, granted in rights.items() if "id-token" in granted] == ["publish"]
    assert all(loaded(path)["permissions"] == {} for path in WORKFLOWS), "jobs ask for what they need"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_can_be_filled_in(form: Path):
    fields = [field for field in loaded(form)["body"] if field["type"] != "markdown"]
    assert any(field.get("validations", {}).get("required") for field in fields)
    for key in (lambda field: field["id"], lambda field: field["attributes"]["label"]):
        assert len({key(field) for field in fields}) == len(fields), "two fields are called the same"


def test_the_form_of_a_wrong_verdict_asks_for_a_program_that_works(capsys: pytest.CaptureFixture):
    fields = {
        field["id"]: field["attributes"] for field in loaded(REPO / ".github/ISSUE_TEMPLATE/wrong_verdict.yml")["body"]
    }
    program = re.search(r"`(from .*?)`", fields["got"]["description"])[1]
    exec(program, {"ANSWER": fields["answer"]["placeholder"], "GROUND_TRUTH": fields["gold"]["placeholder"]})
    assert "verdict='correct'" in capsys.readouterr().out


def test_the_hooks_of_pre_commit_are_linters_of_the_tests():
    hooks = [hook for repo in loaded(REPO / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    script = (REPO / "scripts/test.sh").read_text(encoding="utf-8")
    assert len(hooks) == 4 and all(hook["entry"].split()[0].startswith(".venv/bin/") for hook in hooks)
    assert [hook["entry"] for hook in hooks if hook["entry"].split(" --")[0] not in script] == []
