"""The learning rates that verl's optimizer gets, along verl's own path from a YAML to the engine's scheduler."""

import sys

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

OPTIM = {
    "_target_": "verl_ext.trainer.lr_schedule.ScheduledOptimizerConfig",
    "lr": 1e-3,
    "lr_scheduler_type": "wsd",
    "lr_warmup_steps_ratio": 0.2,
    "lr_decay_steps_ratio": 0.4,
    "lr_decay_type": "linear",
    "min_lr_ratio": 0.1,
    "total_training_steps": 10,
}


def make_config(**settings):
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(OmegaConf.create(OPTIM | settings))


def learning_rates(config, strategy="fsdp2"):
    """Return each update's rate, by the engine class that verl registers, its optimizer and stepping; one weight."""
    import torch
    from verl.workers.engine import EngineRegistry

    engine_class = EngineRegistry.get_engine_cls("language_model", strategy)
    engine = engine_class.__new__(engine_class)
    engine.optimizer_config, engine.rank = config, 0
    optimizer = engine._build_optimizer(torch.nn.Linear(1, 1))
    engine.lr_scheduler = engine._build_lr_scheduler(optimizer)
    rates = []
    for _ in range(config.total_training_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reported = engine.lr_scheduler_step()
    assert reported == optimizer.param_groups[0]["lr"]
    return rates


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_wsd_rises_stays_and_falls(cpu_platform, strategy):
    """10 steps: 2 of warm-up from 10% (10%, 55%), 4 stable, the last 4 fall by 22.5% each towards 10%."""
    expected = [0.1, 0.55, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]
    assert learning_rates(make_config(), strategy) == pytest.approx([1e-3 * rate for rate in expected])


def test_cosine_decay_and_warm_up_in_steps(cpu_platform):
    """4 steps of decay to 0: (1 + cos(pi k / 4)) / 2 = 1, .8536, .5, .1464."""
    config = make_config(lr_decay_type="cosine", min_lr_ratio=0.0, lr_warmup_steps=4)
    expected = [0, 0.25, 0.5, 0.75, 1, 1, 1, 0.8536, 0.5, 0.1464]
    assert learning_rates(config) == pytest.approx([1e-3 * rate for rate in expected], abs=1e-7)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_verls_own_schedules_are_verls_own_numbers(cpu_platform, kind):
    import torch
    from verl.workers.config import FSDPOptimizerConfig
    from verl.workers.engine import FSDPEngineWithLMHead

    make_config()  # wsd is registered in this process
    settings = {name: value for name, value in OPTIM.items() if name not in ("_target_",) and "decay" not in name}
    published = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    published.optimizer_config, published.rank = FSDPOptimizerConfig(**settings | {"lr_scheduler_type": kind}), 0
    optimizer = published._build_optimizer(torch.nn.Linear(1, 1))
    published.lr_scheduler = published._build_lr_scheduler(optimizer)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        published.lr_scheduler_step()
    assert learning_rates(make_config(lr_scheduler_type=kind)) == expected


def test_a_resumed_schedule_continues_where_it_was(cpu_platform):
    import torch
    from verl.workers.engine import EngineRegistry

    def make():
        engine_class = EngineRegistry.get_engine_cls("language_model", "fsdp2")
        engine = engine_class.__new__(engine_class)
        engine.optimizer_config, engine.rank = make_config(), 0
        optimizer = engine._build_optimizer(torch.nn.Linear(1, 1))
        return optimizer, engine._build_lr_scheduler(optimizer)

    optimizer, scheduler = make()
    for _ in range(8):
        optimizer.step()
        scheduler.step()
    states = optimizer.state_dict(), scheduler.state_dict()
    optimizer, scheduler = make()
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.325e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_decay_steps_ratio": 0.0}, "expected 0 < lr_decay_steps_ratio <= 1 .* got 0.0"),
        ({"lr_decay_type": "square"}, "lr_decay_type one of linear, cosine, 1-sqrt, got 0.4 and 'square'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InstantiationException, match=message):
        make_config(**settings)


def test_more_warm_up_and_decay_than_steps_is_refused(cpu_platform):
    with pytest.raises(ValueError, match="7 warm-up and 4 decay steps, but only 10 training steps"):
        learning_rates(make_config(lr_warmup_steps=7))


def test_a_schedule_that_neither_of_us_knows_is_refused():
    with pytest.raises(InstantiationException):
        make_config(lr_scheduler_type="wds")


def test_the_engine_is_not_touched_unless_wsd_is_asked_for(monkeypatch):
    import verl_ext.trainer

    monkeypatch.delattr(verl_ext.trainer, "wsd_engine", raising=False)
    monkeypatch.setitem(sys.modules, "verl_ext.trainer.wsd_engine", None)  # importing it fails
    for kind in ("constant", "cosine"):
        assert make_config(lr_scheduler_type=kind).lr_scheduler_type == kind
    with pytest.raises(InstantiationException, match="wsd_engine"):
        make_config()
