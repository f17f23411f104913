"""The tiny task's model with random weights, as transformers has it and as the harness has it."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they bring for so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tiny_tools, tokenizer, tmp_path_factory):
    """`actor`: a transformers model; `config`, `weights`: the same, read from its folder; biases are not 0."""
    from scripts.studies.tiny_model import load_model

    actor = tiny_tools.build_model.build_model(tokenizer, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp("model")
    actor.save_pretrained(folder)
    config, weights = load_model(folder)
    return SimpleNamespace(actor=actor, config=config, weights=weights, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def task(tiny):
    """Three problems, and an interpreter that always prints 7."""
    from scripts.studies.cell import Problem, Task
    from scripts.studies.preset import RUN
    from verl_ext.settings import compose_run

    texts = ["What is 3 times 4?", "Tom has 2 apples and gets 5 more. How many apples?", "Total?"]
    problems = [Problem(tiny.tokenizer.encode(text, add_special_tokens=False), "7") for text in texts]
    return Task(compose_run(RUN), tiny.tokenizer, problems, problems, lambda code: "7")


@pytest.fixture(scope="session")
def sampled(tiny, task):
    """Rollouts by weights that differ a little from the trainer's; rewards are not all equal."""
    from scripts.studies.cell import roll_out
    from scripts.studies.tiny_model import TinyModel

    generator = torch.Generator().manual_seed(0)
    old = {name: each + 0.003 * torch.randn(each.shape, generator=generator) for name, each in tiny.weights.items()}
    found = roll_out(TinyModel(tiny.config), old, task.train, task, generator)
    rewards = torch.where(torch.arange(len(found.ids)) % 3 == 0, 1.0, -1.0)
    rewards[:8] = -1.0  # a group of equal rewards
    return found._replace(batch=found.batch._replace(rewards=rewards), right=(rewards > 0).float())
