"""The servers of a run in its ledger, on made-up journals."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.events import Ended, EndedCounts
from verl_ext.ledger.prompts import PromptLedger
from verl_ext.ledger.servers import FILE, ServerJournal, read_servers


def command(folder: Path) -> subprocess.CompletedProcess:
    """Run the ledger's command on a run that drew no prompt."""
    PromptLedger(folder).on_ended(Ended(1))
    arguments = [sys.executable, "-m", "verl_ext.ledger", str(folder)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


def servers(folder: Path, *events: tuple[str, str]) -> None:
    journal = ServerJournal(folder)
    for event, server in events:
        journal.note(event, server, "")


def test_the_command_covers_servers_that_died_and_were_replaced(tmp_path: Path):
    assert "servers" not in command(tmp_path).stdout
    servers(tmp_path, ("run", ""), ("started", "a"), ("started", "b"), ("died", "a"), ("start_failed", "in place of a"))
    servers(
        tmp_path, ("replaced", "c"), ("removed", "b"), ("started", "b"), ("run", ""), ("started", "a")
    )  # a resume: c and b ended with the process
    shown = command(tmp_path)
    assert shown.returncode == 0, shown.stdout
    assert "servers: 5 started, 1 died, 1 of these replaced, 1 removed, 1 failed to start" in shown.stdout
    assert read_servers(tmp_path).alive == {"a"}


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([("started", "a"), ("died", "a"), ("died", "a")], "1 servers died, left or started twice: a."),
        ([("started", "a"), ("removed", "a"), ("died", "a")], "1 servers died, left or started twice: a."),
        ([("died", "x")], "1 servers died, left or started twice: x."),
        ([("started", "a"), ("replaced", "a")], "1 servers died, left or started twice: a."),
        ([("started", "a"), ("replaced", "b")], "1 servers replaced one although none had died: b."),
        (
            [
                ("started", "a"),
                ("died", "a"),
                ("run", ""),
                ("started", "a"),
                ("replaced", "b"),
            ],  # that of an older start
            "1 servers replaced one although none had died: b.",
        ),
    ],
)
def test_servers_that_do_not_add_up_are_reported(tmp_path: Path, events: list, fault: str):
    servers(tmp_path, ("run", ""), *events)
    assert fault in read_servers(tmp_path).faults()
    shown = command(tmp_path)
    assert shown.returncode == 1 and fault in shown.stdout and "The books balance" not in shown.stdout


def test_a_start_of_the_run_after_a_half_written_line_begins_a_new_one(tmp_path: Path):
    servers(tmp_path, ("run", ""), ("started", "a"))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at": 1, "event": "di')  # power went off
    ServerJournal(tmp_path).begin(["b"])
    assert read_servers(tmp_path).alive == {"b"}


def test_an_unknown_event_is_not_a_server(tmp_path: Path):
    servers(tmp_path, ("exploded", "a"))
    with pytest.raises(ValueError, match="an object with `event`"):
        read_servers(tmp_path)


def test_a_request_cannot_have_been_lost_with_a_server_that_the_run_never_had(tmp_path: Path):
    servers(tmp_path, ("run", ""), ("started", "a"), ("died", "a"), ("run", ""), ("started", "b"))
    PromptLedger(tmp_path).on_ended(Ended(1, EndedCounts(lost={"a": 2})))
    assert command(tmp_path).returncode == 0
    PromptLedger(tmp_path).on_ended(Ended(2, EndedCounts(lost={"x": 1})))
    shown = command(tmp_path)
    assert shown.returncode == 1
    assert "requests lost 1 servers that the run never had: x." in shown.stdout
