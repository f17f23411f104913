"""Loading what a YAML names."""

import sys

from verl_ext.settings.objects import load_object


def test_a_file_imports_what_stands_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("ANSWER = 6 * 7\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('an installed module is taken first')\n")
    (tmp_path / "mine.py").write_text("import json\nfrom beside_it import ANSWER\ndef solve(): return ANSWER\n")
    assert load_object(f"{tmp_path}/mine.py:solve")() == 42
