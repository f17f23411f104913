from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from verl_ext.trainer.settings import check_phases, in_phase, read_settings


@dataclass(frozen=True)
class Settings:
    first: int
    second: float = 0.5


def config(**option):
    return OmegaConf.create({"retool": {"option": option}})


def test_an_option_is_off_unless_it_says_enable():
    assert read_settings(OmegaConf.create({}), "option", Settings) is None
    assert read_settings(config(first=1), "option", Settings) is None
    assert read_settings(config(enable=False, frist=1), "option", Settings) is None
    assert read_settings(config(enable=True, first=1), "option", Settings) == Settings(1)


@pytest.mark.parametrize(("option", "wrong"), [({"frist": 1, "first": 1}, "frist"), ({"second": 1.0}, "first")])
def test_a_setting_that_is_unknown_or_missing_is_named(option, wrong):
    with pytest.raises(ValueError, match=rf"retool.option has .*expected \['first', 'second'\].* Correct {wrong}\."):
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
