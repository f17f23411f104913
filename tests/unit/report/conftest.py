"""A quickstart to report on."""

import pytest


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "quickstart"
    run.mkdir()
    return run
