"""A run that no model wrote, and the viewer of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.view.synthetic import write_run
from verl_ext.view.app import create_app
from verl_ext.view.data import Run

PORT = 8400


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run_a")


@pytest.fixture
def viewer() -> Callable[..., TestClient]:
    """Return a client for the given folders that asks as a browser does. Errors of ours are raised, not answered."""

    def open_viewer(*folders: Path) -> TestClient:
        runs = [Run(folder, folder.name, number) for number, folder in enumerate(folders)]
        return TestClient(create_app(runs, PORT), base_url=f"http://127.0.0.1:{PORT}")

    return open_viewer


@pytest.fixture
def client(run_folder: Path, viewer: Callable[..., TestClient]) -> TestClient:
    return viewer(run_folder)


def charts_of(html: str) -> dict[str, dict]:
    found = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)]
    return {chart["title"]: chart for chart in found}
