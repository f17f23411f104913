"""scripts/screenshots.py: the pictures of the documentation."""

import sys

import pytest

from tests.unit.report.runs import add_evaluation, add_training
from tests.unit.view import chromium
from tests.unit.view.synthetic import write_run

pytestmark = pytest.mark.timeout(120)


@pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here: apt-get install chromium")
def test_the_report_and_a_group_are_taken(load_script, tmp_path, monkeypatch, capsys):
    quickstart = tmp_path / "quickstart"
    add_evaluation(quickstart)
    add_training(quickstart)
    write_run(quickstart / "rl")
    monkeypatch.setattr(sys, "argv", ["screenshots.py", str(quickstart), "--out", str(tmp_path)])
    load_script("screenshots").main()
    for name in ("report.png", "view.png"):
        assert int.from_bytes((tmp_path / name).read_bytes()[16:20]) == 2400, "PNG's width, in pixels"
    assert "report.png: 2400 x 3280" in capsys.readouterr().out


def test_a_folder_without_a_run_is_named(load_script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["screenshots.py", str(tmp_path)])
    monkeypatch.setattr(chromium, "PROGRAM", "chromium")
    with pytest.raises(SystemExit, match=f"screenshots: No run at {tmp_path}"):
        load_script("screenshots").main()
