"""The bench of the check of traces, with a real sandbox."""

import os
import re
from unittest import mock

from scripts.bench import traces


def test_each_line_is_measured(capsys):
    with mock.patch.dict(os.environ):
        traces.main(["--traces", "40"])
    out = capsys.readouterr().out
    assert re.findall(r"^kept +(\d+)", out, re.MULTILINE) == ["100", "40", "40"]
    assert len(re.findall(r": [\d,]+ a minute .* own CPU [\d.]+ s: [\d,]+ a minute", out)) == 3
