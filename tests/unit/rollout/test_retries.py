import pytest

from verl_ext.rollout.retries import FailedSamples


def test_settings_of_failed_validation_samples_have_defaults_and_no_other_names():
    from omegaconf import OmegaConf

    assert FailedSamples.from_config(OmegaConf.create({})) == FailedSamples(0.25, 2)
    config = OmegaConf.create({"retool": {"validation": {"retries": 0}}})
    assert FailedSamples.from_config(config) == FailedSamples(0.25, 0)
    for wrong in ({"max_failed_share": 1}, {"max_failed_share": -0.1}, {"retries": -1}):
        with pytest.raises(ValueError, match="expected 0 <= max_failed_share < 1 and retries >= 0"):
            FailedSamples(**wrong)
    config.retool.validation.max_failed = 0.5
    with pytest.raises(ValueError, match="retool.validation has max_failed; expected max_failed_share and retries"):
        FailedSamples.from_config(config)
