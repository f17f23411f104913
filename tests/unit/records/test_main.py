"""`retool records`."""

import json
import subprocess
import sys

import pytest

from tests.unit.records.test_store import ROW
from verl_ext.records import store
from verl_ext.records.__main__ import main


def test_show_prints_a_line_a_row(tmp_path, capsys):
    for step in (1, 2):
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [ROW | {"step": step}])
    main(["show", str(tmp_path), "--step", "2"])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["step"] == 2 and json.loads(line)["turns"] == ROW["turns"]


def test_show_ends_without_an_error_if_its_reader_has_enough(tmp_path):
    many = [ROW | {"prompt": "a" * 2000, "session": session} for session in range(200)]  # more than a pipe holds
    store.write(store.path_of(tmp_path, "trajectories", 1), "trajectories", many)
    command = [sys.executable, "-m", "verl_ext.records", "show", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["session"] == 0
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_show_takes_the_quickstarts_folder_and_says_what_is_not_there(tmp_path, capsys):
    run = tmp_path / "rl"
    store.write(store.path_of(run, "trajectories", 1), "trajectories", [ROW])

    def said(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["show", *map(str, arguments)])
        return ended.value.code

    main(["show", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["uid"] == "u1"
    assert said(run, "--step", 7) == f"{run} has no records of the kind trajectories of step 7. It has steps 1 to 1."
    assert said(run, "--kind", "tokens") == f"{run} has no records of the kind tokens (retool.recorder)."
    assert said(tmp_path / "misspelt").startswith(f"No run at {tmp_path / 'misspelt'}")
