"""Random, hostile conversations with a real vLLM: the gateway records what the engine sampled, each turn once."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import REPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_records_of_hostile_conversations_are_exact():
    command = [sys.executable, "-m", "scripts.studies.gateway_exactness", "--conversations", "40"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    recorded, did, verdict = result.stdout.splitlines()[-3:]
    assert verdict.startswith("exact: ")
    for what in ("turns that extend", "forks by history", "undelivered", "joined"):
        assert f" {what} " in recorded, "the conversations were not hostile"
    for what in ("answers by a stream", "Anthropic's format", "hang-ups", "failures of the servers", "turns continued"):
        assert what in did
