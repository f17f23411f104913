"""In every environment a trace has the same tokens and mask in SFT as in a rollout."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.environments.openenv_server import Server
from verl_ext.doctor.agreement import check_agreement
from verl_ext.doctor.finding import Level
from verl_ext.doctor.run import Run
from verl_ext.environments import by_name
from verl_ext.settings import REPO, compose_run

OWN = """
from verl_ext.environments.base import Environment, tool

class Own(Environment):
    @tool
    def weigh(self, things: list[str], unit: str = "kg", exact: bool | None = None) -> str:
        '''Weigh things.

        Args:
            things: what to weigh.
            unit: of the weight.
            exact: whether to be exact.
        '''
        return "3"
"""
# Settings of the environments that need some.
SETTINGS: dict[str, dict[str, Any]] = {
    "repository": {"folder": "."},
    "search": {"corpus": "corpus.jsonl"},
    "mcp": {"command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))], "tools": ["look"]},
    "openenv": {"url": "of the server"},
}
WITHOUT_TOOLS = {"skyrl_gym", "user"}


def environments() -> list[Any]:
    built_in = [each for each in by_name.BUILT_IN if each not in WITHOUT_TOOLS]
    return [
        *by_name.OF_SANDBOX,
        *({"name": name, **SETTINGS.get(name, {})} for name in built_in),
        "own.py:Own",
        ["notebook", "own.py:Own"],
    ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server()
    yield server.url
    server.stop()


@pytest.mark.parametrize("environment", environments(), ids=str)
def test_sft_has_the_tokens_of_a_rollout(environment, url, qwen_tokenizer, tmp_path, monkeypatch):
    if isinstance(environment, dict) and environment["name"] == "mcp":
        pytest.importorskip("mcp")
    if isinstance(environment, dict) and "url" in environment:
        environment = environment | {"url": url}
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "title": "A", "text": "B"}) + "\n")
    config = compose_run("tiny_dapo", ["retool.protocol=hermes", "actor_rollout_ref.model.path=x"])
    OmegaConf.set_struct(config, False)
    config.retool.domains = {"bare": {"protocol": "code"}, "rich": {"environment": environment}}
    config.actor_rollout_ref.rollout.agent.agent_loop_config_path = None
    monkeypatch.chdir(tmp_path)
    run = Run("nobody_dapo", config, folder=REPO)
    findings = [each for each in check_agreement(run, qwen_tokenizer) if each.level != Level.WARN]
    assert {each.level for each in findings} == {Level.OK}, findings
    named = [each.message for each in findings if "of domain rich" in each.message]
    assert len(named) == (environment not in by_name.OF_SANDBOX), "those have the tools of the run itself"
