"""configs/task/*.yaml: each composes with an RL run, and every environment and verifier of its domains can be made."""

import json

import pytest

from verl_ext.settings import CONFIGS, REPO, Retool, compose_run
from verl_ext.settings.checks import check
from verl_ext.settings.domains import of_whole_run, read_domains

TASKS = sorted(path.stem for path in (CONFIGS / "task").glob("*.yaml"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ["tiny_dapo", "qwen3-4b_dapo"])
def test_a_task_fits_a_run_and_its_parts_can_be_made(task, name, tmp_path, monkeypatch):
    from verl_ext.environments.by_name import Environments
    from verl_ext.reward.verifiers import Verifiers

    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.chdir(REPO)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "1", "title": "A", "text": "B"}) + "\n")
    config = compose_run(name, [f"+task={task}"])
    check(config.retool, Retool)
    domains = read_domains(config)
    verifiers = Verifiers.of_run(config)
    for source, domain in (domains or {"": of_whole_run(config)}).items():
        assert Environments(domain.environment, config).make() is not None
        assert verifiers.find(source, "") is not None
    if task == "mixed":
        names = {source: type(verifiers.find(source, "")).__name__ for source in domains}
        assert names["science"] == "ChoiceVerifier" and names["chat"] == "JudgeVerifier"
        assert set(names.values()) >= {"MathVerifier", "CodeVerifier", "IfevalVerifier", "ExactVerifier"}
