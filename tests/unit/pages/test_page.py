"""A page of any room: what may run in it, what is escaped, and what a page that is one file leaves out."""

import base64
import hashlib
import html
import re
from pathlib import Path

import jinja2
import pytest

from verl_ext.pages import page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u202e\x1b[2J {{ 7*7 }}"


@pytest.fixture
def rendered(tmp_path: Path):
    """Return a function that renders the body of a page."""

    def render(body: str, *, as_file: bool = True, **values) -> str:
        text = '{% extends "base.html" %}{% block main %}' + body + "{% endblock %}"
        (tmp_path / "one.html").write_text(text, encoding="utf-8")
        return page.render(page.environment(tmp_path).get_template("one.html"), as_file=as_file, **values)

    return render


def test_the_policy_of_a_file_names_the_scripts_that_are_in_it_and_nothing_else(rendered) -> None:
    shown = rendered("")
    scripts = re.findall("<script>(.*?)</script>", shown, re.S)
    assert len(scripts) == len(page.SCRIPTS) == 3
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = html.unescape(re.search('Security-Policy" content="(.*?)"', shown)[1])
    sources = " ".join(f"'sha256-{each}'" for each in hashes)
    assert policy == (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    assert ["Permission is hereby granted" in script for script in scripts] == [True, False, False], "uPlot's licence"


@pytest.mark.parametrize("as_file", [True, False])
def test_text_is_escaped_and_what_hides_in_it_is_shown(rendered, as_file) -> None:
    shown = rendered('<p title="{{ text }}">{{ text }}</p>', as_file=as_file, text=HOSTILE)
    said = re.search('<p title="(.*?)">(.*?)</p>', shown, re.S)
    assert (
        said[1] == said[2]
        and "<" not in said[1]
        and html.unescape(said[1])
        == ("</script><script>alert(1)</script><img src=x onerror=alert(1)> <U+202E>␛[2J {{ 7*7 }}")
    )


def test_a_value_that_is_missing_is_an_error(rendered) -> None:
    with pytest.raises(jinja2.UndefinedError, match="'nothing' is undefined"):
        rendered("{{ nothing }}")


def test_a_file_has_no_controls_and_its_links_are_what_they_say(rendered) -> None:
    body = '<nav><a href="/x">away</a></nav><form></form><a class="dot" href="/y" aria-label="right">r</a><b>s</b>'
    assert '<span role="img" class="dot" aria-label="right">r</span><b>s</b>' in rendered(body)
    assert "away" not in rendered(body) and "<form" not in rendered(body)
    assert body in rendered(body, as_file=False)
    assert not re.findall(r' (?:src|href)="', re.sub("<script>.*?</script>", "", rendered(body), flags=re.S))
