"""The cost table of the environments, from a real sandbox, a real server and one episode of each length."""

import sys

from scripts.bench import environments


def test_each_line_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["environments", "--episodes", "1"])
    environments.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert lines[0] == "| environment, call | episode with one call | later call |"
    measured = {line.split(" | ")[0].removeprefix("| "): float(line.split(" | ")[1]) for line in lines[1:]}
    assert len(measured) == 10 and measured["math_tools, plot"] > measured["search, read"] >= 0
