"""The agent loops that a run registers, read in one place for evaluation, prompts' lengths and doctor."""

from pathlib import Path

import pytest

from verl_ext.settings import compose_run, registered_loops

KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def test_a_loop_without_a_protocol_has_that_of_the_run_or_the_domain() -> None:
    loops = registered_loops(compose_run("tiny_dapo"))
    assert loops["retool"] is None
    assert loops["retool_hermes"] == "hermes"


def test_a_file_is_searched_in_the_folder_first_and_then_beside_the_package(tmp_path: Path) -> None:
    run = compose_run("tiny_dapo")
    assert registered_loops(run, tmp_path) == registered_loops(run)
    mine = tmp_path / run.actor_rollout_ref.rollout.agent.agent_loop_config_path
    mine.parent.mkdir(parents=True)
    mine.write_text("[{name: mine, protocol: code}]")
    assert registered_loops(run, tmp_path) == {"mine": "code"}


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no_loops\.yaml"):
        registered_loops(compose_run("tiny_dapo", [f"{KEY}=no_loops.yaml"]))
