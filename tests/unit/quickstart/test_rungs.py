"""What makes a published result belong to another task, or to other code."""

from pathlib import Path

import pytest

from verl_ext.quickstart import rungs

CODE = '"""Formulas."""\n\n\ndef half(x):\n    """x / 2."""\n    return x / 2\n'


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (CODE.replace("x / 2.", "Half of x."), True),
        (CODE.replace("Formulas.", "Halves."), True),
        (CODE.replace("    return", "    # half\n    return"), True),
        (CODE.replace('    """x / 2."""\n', ""), True),
        (CODE.replace("return x / 2", "return x / 2  # half"), True),
        (CODE.replace("return x / 2", "return x / 3"), False),
        (CODE.replace("half(x)", "half(x, y=1)"), False),
    ],
)
def test_code_is_other_code_if_it_does_something_else(tmp_path: Path, monkeypatch, other: str, same: bool) -> None:
    monkeypatch.setattr(rungs, "REPO", tmp_path)
    (tmp_path / "a.py").write_text(CODE)
    before = rungs.digest("*.py")
    (tmp_path / "a.py").write_text(other)
    assert (rungs.digest("*.py") == before) is same
