import functools
import inspect
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from verl_ext.settings import (
    CONFIGS,
    MAX_CODE_S,
    FailedSamples,
    Retool,
    SandboxSettings,
    SftData,
    SftRetool,
    compose_run,
)
from verl_ext.settings.checks import Option, check, check_phases, in_phase, read_settings


@dataclass(frozen=True)
class Settings(Option):
    first: int
    second: float = 0.5


def config(**option):
    return OmegaConf.create({"retool": {"option": option}})


def test_an_option_is_off_unless_it_says_enable():
    assert read_settings(OmegaConf.create({}), "option", Settings) is None
    assert read_settings(config(first=1), "option", Settings) is None
    assert read_settings(config(enable=False, frist=1), "option", Settings) is None
    assert read_settings(config(enable=True, first=1), "option", Settings) == Settings(1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"frist": 1, "first": 1},
            "retool.option.frist is not a setting of verl_ext and would have no effect. Did you mean",
        ),
        ({"second": 1.0}, "retool.option.first is missing, but verl_ext reads it."),
        ({"first": 1.5}, "retool.option.first is 1.5, expected a whole number."),
        ({"first": True}, "retool.option.first is True, expected a whole number."),
    ],
)
def test_a_setting_that_is_unknown_or_missing_or_of_another_type_is_named(option, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_settings(config(enable=True, **option), "option", Settings)


def test_the_last_phase_that_has_begun_counts():
    phases = [[0, 24], [30, 16], [80, 12]]
    assert [in_phase(phases, step) for step in (0, 1, 29, 30, 79, 80, 400)] == [24, 24, 24, 16, 16, 12, 12]


@pytest.mark.parametrize(
    "phases", [[], [[1, 8]], [[0, 8], [5, 1]], [[0, 8], [5, 8], [5, 9]], [[0, 8], [9, 8], [5, 8]], [[0]]]
)
def test_phases_that_make_no_sense_are_refused(phases):
    with pytest.raises(ValueError, match=r"retool.option.phases is .*expected \[\[0, value\], \[step, value\]"):
        check_phases("option", phases, lowest=2)


# All of `retool` -----------------------------------------------------------------------------------------------------


@functools.cache
def tiny_run():
    return OmegaConf.to_container(compose_run("tiny_dapo").retool, resolve=False)


def retool(**changes):
    """`retool` of the tiny run with other values; `__` stands for the dot of a key."""
    section = OmegaConf.create(tiny_run())
    for key, value in changes.items():
        OmegaConf.update(section, key.replace("__", "."), value, merge=False)
    return section


def test_what_a_start_of_a_run_and_the_doctor_check_is_one_schema():
    """The doctor's messages: tests/unit/doctor/test_config.py, test_names.py and test_values.py."""
    check(retool(), Retool)
    check({"checkpoints": {"keep_last": None}}, SftRetool)
    check({"protocol": "code", "bad_rows": "drop"}, SftData, "data.retool")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_calls": 3},
            "retool.max_calls is not a setting of verl_ext and would have no effect. Did you mean retool.max_tool",
        ),
        (
            {"sandbox__timout_s": 3},
            "retool.sandbox.timout_s is not a setting of verl_ext and would have no effect. Did you mea",
        ),
        ({"early_stop__pateince": 3}, "retool.early_stop.pateince is not a setting"),  # of an option that is off
        (
            {"max_tool_calls": -1},
            "retool.max_tool_calls is -1, expected a whole number in [0, inf): it is a number of calls",
        ),
        ({"max_tool_calls": 8.5}, "retool.max_tool_calls is 8.5, expected a whole number"),
        ({"max_tool_calls": None}, "retool.max_tool_calls is None, expected a whole number"),
        (
            {"sandbox__timeout_s": 0},
            "retool.sandbox.timeout_s is 0, expected a number in (0, 86400]: it is a number of sec",
        ),
        ({"sandbox__max_calls_per_s": 0}, "retool.sandbox.max_calls_per_s is 0"),
        ({"sandbox": 3}, "retool.sandbox is 3, but it is a section"),
        ({"sandbox": {}}, "retool.sandbox.urls is missing, but verl_ext reads it."),
        (
            {"protocol": "xml"},
            "retool.protocol is 'xml'; expected one of code, hermes, text.",
        ),
        ({"run_last_code": "yes"}, "retool.run_last_code is 'yes', expected true or false"),
        ({"recorder__keep_steps": 0}, "retool.recorder.keep_steps is 0, expected a whole number in [1, inf)"),
        ({"recorder__max_gb": 0}, "retool.recorder.max_gb is 0, expected a number in (0, inf)"),
        ({"recorder__token_share": 2}, "retool.recorder.token_share is 2, expected a number in [0, 1]"),
        ({"checkpoints__keep_last": 0}, "retool.checkpoints.keep_last is 0"),
        ({"validation__retries": -1}, "retool.validation: expected 0 <= max_failed_share < 1 and retries >= 0"),
        ({"early_stop__enable": True, "early_stop__patience": 0}, "retool.early_stop: expected patience >= 1"),
        ({"adaptive_n__enable": True, "adaptive_n__phases": [3]}, "object of type 'int' has no len()"),
        ({"adaptive_n": {"phases": [[0, 3]]}}, "retool.adaptive_n.enable is missing"),
    ],
)
def test_a_wrong_setting_stops_a_run(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(retool(**changes), Retool)


def test_an_option_that_is_off_may_have_any_values_and_a_run_of_before_may_lack_it():
    section = retool(early_stop__patience=0)
    del section.adaptive_n, section.validation, section.repeatable, section.checkpoints
    check(section, Retool)


@pytest.mark.parametrize(("save_freq", "outcome"), [(20, ""), (0, "expected numbers of at least 1, got ")])
def test_a_number_of_an_option_may_be_that_of_another_setting(save_freq, outcome):
    light = {"enable": True, "problems": 8, "n": 1, "full_every": "${trainer.save_freq}"}
    run = OmegaConf.create({"trainer": {"save_freq": save_freq}, "retool": tiny_run() | {"light_validation": light}})
    with pytest.raises(ValueError, match=outcome) if outcome else nullcontext():
        check(run.retool, Retool)


def test_every_wrong_key_is_named_at_once():
    with pytest.raises(ValueError, match="retool.max_calls is not a setting .* retool.traceback is 'all'"):
        check(retool(max_calls=3, traceback="all"), Retool)


def test_what_is_said_of_the_sandbox_is_what_client_and_server_do():
    from verl_ext.sandbox.client import SandboxClient
    from verl_ext.sandbox.limits import MAX_TIMEOUT_S

    default = inspect.signature(SandboxClient).parameters["queue_timeout_s"].default
    assert SandboxSettings.queue_timeout_s == default and MAX_CODE_S == MAX_TIMEOUT_S


def test_a_folder_of_further_yamls_may_have_any_name(tmp_path):
    beside = tmp_path / "zoë (1), a=b"
    (beside / "mine").mkdir(parents=True)
    (beside / "mine" / "small.yaml").write_text("# @package _global_\ndata:\n  train_batch_size: 3\n")
    assert compose_run("tiny_dapo", ["+mine=small"], beside=[beside]).data.train_batch_size == 3


def test_importing_settings_costs_no_package():
    code = (
        "import sys, verl_ext.settings;"
        "sys.exit(bool({'torch', 'verl', 'omegaconf', 'hydra', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parent).returncode == 0


def test_settings_of_failed_validation_samples_have_defaults_and_no_other_names():
    from omegaconf import OmegaConf

    assert FailedSamples.from_config(OmegaConf.create({})) == FailedSamples(0.25, 2)
    config = OmegaConf.create({"retool": {"validation": {"retries": 0}}})
    assert FailedSamples.from_config(config) == FailedSamples(0.25, 0)
    for wrong in ({"max_failed_share": 1}, {"max_failed_share": -0.1}, {"retries": -1}):
        with pytest.raises(ValueError, match="expected 0 <= max_failed_share < 1 and retries >= 0"):
            FailedSamples(**wrong)
    config.retool.validation.max_failed = 0.5
    with pytest.raises(
        ValueError,
        match="retool.validation.max_failed is not a setting.*Did you mean retool.validation.max_failed_share",
    ):
        FailedSamples.from_config(config)
