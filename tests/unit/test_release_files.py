"""Versions agree, and issue forms ask for what works."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
FORMS = sorted(path for path in (REPO / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_citation_and_changelog_name_the_version_of_the_package():
    version = importlib.metadata.version("verl-retool")
    newest = re.search(r"^## \[(.+?)\]", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (newest[1], loaded(REPO / "CITATION.cff")["version"]) == (version, version)


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
