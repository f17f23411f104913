"""The command of the GPU acceptance: its options and exit status, and a table that loses no row of an earlier run."""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import __main__ as command
from tests.gpu import stages as listed
from tests.gpu.report import exit_status, record
from tests.gpu.stage import Result, Row, Stage


def two_rows(context):
    yield Row("first", "1", "1", True)
    yield Row("told", "", "2")


def wrong(context):
    yield Row("first", "1", "2", False)


# The table, and the exit status ---------------------------------------------------------------------------------------


def result(name: str, ok: bool | None = True, *, not_run: str = "", options: str = "", at: str = "") -> Result:
    rows = [] if not_run else [Row(f"{name} seen at {at}", "1", "1", ok)]
    return Result(name, rows, not_run, options=options, at=at)


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([result("a"), result("b", None)], 0),
        ([result("a"), result("b", False), result("c", not_run="no vllm")], 1),
        ([result("a"), Result("b", error="it has no row")], 1),
        ([result("a"), result("b", not_run="no vllm")], 3),
        ([result("a", not_run="no vllm")], 3),
    ],
)
def test_exit_status_tells_a_failure_from_a_stage_that_did_not_run(results, status):
    assert exit_status(results) == status


def rows_of(out: Path) -> list[str]:
    """What `acceptance.md` has in its first table: stage and what was seen."""
    lines = (out / "acceptance.md").read_text().split("\n\n")[0].splitlines()[2:]
    return [" / ".join(cell.strip() for cell in line.split("|")[1:3]) for line in lines]


def test_a_stage_that_runs_alone_replaces_its_own_rows_and_no_others(tmp_path):
    order = ["machine", "sft", "rl"]
    for name in ("sft", "machine", "rl"):
        record(result(name, at="monday"), tmp_path, order)
    record(result("sft", at="tuesday"), tmp_path, order)
    assert rows_of(tmp_path) == [
        "machine / machine seen at monday",
        "sft / sft seen at tuesday",
        "rl / rl seen at monday",
    ]
    seen = [line for line in (tmp_path / "acceptance.md").read_text().splitlines() if line.endswith("| 0 |")]
    assert seen == ["| machine | monday | 0 |", "| sft | tuesday | 0 |", "| rl | monday | 0 |"]


def test_other_options_have_rows_of_their_own(tmp_path):
    for options in ("", "--device cpu", "--shape Qwen/Qwen3-0.6B"):
        record(result("sft_step", options=options), tmp_path, ["sft_step"])
    assert [row.split(" / ")[0] for row in rows_of(tmp_path)] == [
        "sft_step",
        "sft_step --device cpu",
        "sft_step --shape Qwen/Qwen3-0.6B",
    ]


def test_a_stage_that_does_not_run_keeps_the_rows_of_the_day_it_did(tmp_path):
    for each in (result("sft", at="monday"), result("sft", not_run="no verl"), result("rl", not_run="no vllm")):
        record(each, tmp_path, ["sft", "rl"])
    assert rows_of(tmp_path) == ["sft / sft seen at monday", "rl / not run"]
    record(result("rl", at="tuesday"), tmp_path, ["sft", "rl"])
    assert rows_of(tmp_path) == ["sft / sft seen at monday", "rl / rl seen at tuesday"]


def test_rows_outlive_a_crash_while_they_are_written(tmp_path, monkeypatch):
    record(result("machine", at="monday"), tmp_path, ["machine"])
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupts)
        with pytest.raises(KeyboardInterrupt):
            record(result("sft"), tmp_path, ["machine", "sft"])
    assert {name: (tmp_path / name).read_text() for name in before} == before


def interrupts(*arguments):
    raise KeyboardInterrupt


@pytest.fixture
def two_stages(monkeypatch, tmp_path) -> list[Stage]:
    """Instead of the real ones, without what `prepare` does to this process."""
    found = [Stage("one", "first", (), two_rows), Stage("two", "second", (), two_rows)]
    monkeypatch.setattr(listed, "STAGES", found)
    monkeypatch.setattr(command, "prepare", lambda out, wheels: out / "site")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


def test_one_stage_run_after_the_others_leaves_their_rows_with_date_and_commit(two_stages, tmp_path, capsys):
    arguments, days = ["--device=cpu", f"--out={tmp_path}"], [time.strftime("%Y-%m-%d")]
    assert command.main(arguments) == 0
    two_stages[1] = Stage("two", "second", ("no-such-package",), two_rows)
    two_stages[0] = Stage("one", "first", (), wrong)
    assert command.main(["one", *arguments]) == 1
    assert command.main(["two", *arguments]) == 3
    days.append(time.strftime("%Y-%m-%d"))  # it may have been midnight meanwhile
    printed = capsys.readouterr().out
    assert (
        "0 passed, 0 failed, 1 not run (two --device cpu)" in printed and "no-such-package is not installed" in printed
    )
    one, two = json.loads((tmp_path / "acceptance.json").read_text())
    assert [row["ok"] for row in one["rows"]] == [False] and [row["ok"] for row in two["rows"]] == [True, None]
    for each in (one, two):
        assert each["at"][:10] in days and ", commit " in each["at"]


def test_a_command_that_is_broken_off_leaves_the_rows_of_the_stages_before(two_stages, tmp_path, monkeypatch):
    arguments = ["--device=cpu", f"--out={tmp_path}"]
    assert command.main(arguments) == 0
    two_stages[:] = [Stage("one", "first", (), wrong), Stage("two", "second", (), wrong)]
    lines = iter(["", KeyboardInterrupt])
    monkeypatch.setattr(command, "table_line", lambda row: next(lines) and interrupts())
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    one, two = json.loads((tmp_path / "acceptance.json").read_text())
    assert [row["ok"] for row in one["rows"]] == [False] and [row["ok"] for row in two["rows"]] == [True, None]


def sleeps(context):
    yield Row("first", "1", "1", True)
    time.sleep(60)


def test_all_stages_together_end_after_the_minutes_of_the_command(two_stages, tmp_path):
    assert command.parse([], ["one"]).minutes == 30
    two_stages[0] = Stage("one", "first", (), sleeps)
    assert command.main(["--device=cpu", f"--out={tmp_path}", "--minutes=0.048"]) == 1
    one, two = json.loads((tmp_path / "acceptance.json").read_text())
    assert "not done after 2 s" in one["error"] and [row["what"] for row in one["rows"]] == ["first"]
    assert two["not_run"] == "0.048 minutes were over; run it alone"


def test_results_that_cannot_be_read_are_said_before_a_stage_runs_and_are_left(two_stages, tmp_path, capsys):
    (tmp_path / "acceptance.json").write_text("[{")
    with pytest.raises(SystemExit, match="acceptance.json: JSONDecodeError.*Move the file away"):
        command.main(["--device=cpu", f"--out={tmp_path}"])
    assert (tmp_path / "acceptance.json").read_text() == "[{" and "== one" not in capsys.readouterr().out


# Options --------------------------------------------------------------------------------------------------------------


def test_an_unknown_stage_is_refused_with_the_names_that_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["machin"])
    assert stop.value.code == 2
    assert "no such stage: machin. There are machine, log_probs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape=Qwen/Qwen3-0.6B"], "--shape is an option of sft_step and actor_step; name no other stage"),
        (["sft_step", "machine", "--keep-logits"], "--keep-logits is an option of sft_step and actor_step"),
        (["sft", "--run=outputs/quickstart"], "--run is an option of evaluation"),
        (["sft_step", "--tokens=-1"], "--tokens is -1: expected at least 1"),
    ],
)
def test_an_option_of_a_stage_that_does_not_run_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_options_are_noted_as_they_are_typed():
    arguments = "sft_step --device cpu --shape a/b --tokens 40 --no-checkpointing --keep-logits"
    assert f"sft_step {command.written(command.parse(arguments.split(), ['sft_step']))}" == arguments
    assert command.written(command.parse(["sft_step"], ["sft_step"])) == ""


# The wheels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "stops"), [(0, False), (3, False), (1, True), (2, True)])
def test_wheels_that_could_not_be_installed_stop_the_command_and_missing_ones_do_not(
    status, stops, tmp_path, monkeypatch
):
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=lambda _: SimpleNamespace(returncode=status)))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if stops:
        with pytest.raises(SystemExit, match=f"were not installed .exit status {status}."):
            command.prepare(tmp_path, tmp_path / "wheels")
    else:
        assert command.prepare(tmp_path, tmp_path / "wheels") == tmp_path / "site"
