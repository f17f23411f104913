"""configs/objective/*.yaml: each preset fits every RL run, sets all keys of an objective and no size."""

import re
import subprocess
import sys

import pytest
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from tests.unit.test_configs import RL_RUNS, ROOT
from tests.unit.test_launchers import launch
from verl_ext.doctor.schema import has_type_of, is_known, is_open, own_yaml, schema
from verl_ext.evaluation.store import flatten
from verl_ext.settings import compose_run as composed
from verl_ext.settings.checks import is_in

PRESETS = sorted(path.stem for path in (ROOT / "configs" / "objective").glob("*.yaml"))
NAMES = """dapo grpo olmorl icepop icepop_onpolicy glm5_async mis_token mis_seq gspo sapo cispo dppo_tv dppo_kl gmpo
dr_grpo maxrl simpletir grpo_roc tir_otb""".split()
ON_POLICY = {
    "actor_rollout_ref.actor.ppo_mini_batch_size": "${data.train_batch_size}",
    "trainer.v1.separate_async.parameter_sync_step": 1,
}
ACTOR = "actor_rollout_ref.actor"


def keys_of(preset):
    return flatten(own_yaml("neutral/objective")) | flatten(own_yaml(f"objective/{preset}"))


def test_every_objective_has_a_preset():
    assert sorted(NAMES) == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_every_key_of_an_objective_and_no_size(preset):
    keys, extra = keys_of(preset), ON_POLICY if preset == "icepop_onpolicy" else {}
    assert keys.keys() - extra.keys() == keys_of("dapo").keys()
    assert OmegaConf.load(ROOT / f"configs/objective/{preset}.yaml").defaults == ["/neutral/objective", "_self_"]
    assert {key: keys[key] for key in extra} == extra


@pytest.mark.parametrize("preset", PRESETS)
def test_verl_knows_every_key_of_a_preset_and_its_type(preset):
    known, defaults = schema("ppo_trainer"), flatten(schema("ppo_trainer"))
    for key, value in keys_of(preset).items():
        assert is_open(key) or is_known(key, known) or key == f"{ACTOR}.policy_loss.unit", key
        is_interval = key.endswith(".rollout_is_threshold") and re.fullmatch(r"[\d.e-]+_[\d.]+", str(value))
        assert is_interval or is_open(key) or has_type_of(value, defaults.get(key)), (key, value)


OF_ONE_RUN = [("tiny_dapo", preset) for preset in PRESETS]
OF_OTHERS = [(run, preset) for run in RL_RUNS for preset in PRESETS if run != "tiny_dapo"]


@pytest.mark.parametrize(
    ("run", "preset"), [*OF_ONE_RUN, *(pytest.param(*each, marks=pytest.mark.nightly) for each in OF_OTHERS)]
)
def test_a_preset_fits_a_run_and_its_keys_win(run, preset, cpu_platform):
    from verl.utils.config import omega_conf_to_dataclass

    from verl_ext.trainer.objective import check_objective

    config = composed(run, [f"objective={preset}"])
    check_objective(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss).unit in ("mini_batch", "batch")
    plain = flatten(OmegaConf.to_container(config, resolve=False))
    assert {key: plain[key] for key in keys_of(preset)} == keys_of(preset)


# Of verl's examples/dppo_trainer/run_qwen30b_dppo.sh (8f11888), of SimpleTIR's objective with its code's bounds, and of
# GLM-5's section 3.2.
SUM = ("seq-mean-token-sum-norm", "${data.max_response_length}")
AS_PUBLISHED = {
    "dppo_tv": (0.15, 0.15, False, *SUM),
    "dppo_kl": (0.05, 0.05, False, *SUM),
    "simpletir": (0.2, 0.28, True, "seq-mean-token-mean", None),
    "icepop": (0.2, 0.28, True, "seq-mean-token-mean", None),
}


@pytest.mark.parametrize("preset", AS_PUBLISHED)
def test_bounds_advantages_and_mean_are_as_published(preset):
    names = ("clip_ratio_low", "clip_ratio_high", "loss_agg_mode", "loss_scale_factor")
    low, high, *mean = (keys_of(preset)[f"{ACTOR}.{name}"] for name in names)
    by_std = keys_of(preset)["algorithm.norm_adv_by_std_in_grpo"]
    assert (low, high, by_std, *mean) == AS_PUBLISHED[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_doctor_has_nothing_against_the_values_of_a_preset(preset):
    from verl_ext.doctor.values import BOUNDS

    keys = keys_of(preset)
    outside = [
        (key, keys[key], within) for key, _, within, *_ in BOUNDS if key in keys and not is_in(keys[key], within)
    ]
    assert outside == []


@pytest.mark.parametrize("run", RL_RUNS)
def test_a_run_without_a_choice_is_verls_loss_with_dual_clip_at_10_as_before(run):
    actor = composed(run).actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.policy_loss._target_, actor.clip_ratio_c, actor.loss_agg_mode) == (
        *("vanilla", "verl.workers.config.PolicyLossConfig"),
        *(10.0, "token-mean"),
    )


@pytest.mark.parametrize("preset", ["dapo", "icepop_onpolicy"])
def test_separate_async_has_the_sizes_that_verl_asserts(preset):
    config = composed("tiny_dapo", ["hardware=cpu_separate", f"+objective={preset}"])
    steps = config.trainer.v1.separate_async.parameter_sync_step
    assert config.data.train_batch_size == steps * config.actor_rollout_ref.actor.ppo_mini_batch_size


def test_an_unknown_objective_fails_by_name():
    with pytest.raises(MissingConfigException, match="objective/dpao"):
        composed("tiny_dapo", ["+objective=dpao"])


@pytest.mark.parametrize("run", RL_RUNS)
def test_a_launcher_puts_an_objective_after_all_of_the_runs_own_values(run, tmp_path):
    """A default of a run would come before the values of the runs that are made from it."""
    fake = tmp_path / "python"
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = launch(run, "--cfg", "job", "objective=icepop", cwd=tmp_path, PYTHON=str(fake), OUTPUT_DIR=str(tmp_path))
    assert "+objective=icepop" in done.stdout.splitlines() and "objective=icepop" not in done.stdout.splitlines()


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_verl_prints_a_run_with_an_objective():
    done = subprocess.run(
        ["bash", "recipe/retool/run_tiny_dapo.sh", "--cfg", "job", "objective=glm5_async"],
        cwd=ROOT, capture_output=True, text=True, timeout=110, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = OmegaConf.create(done.stdout)
    assert printed.actor_rollout_ref.actor.policy_loss.loss_mode == "retool_glm5_async"
    assert printed.algorithm.rollout_correction.bypass_mode is True


def test_the_page_has_a_row_with_a_source_for_every_preset():
    text = (ROOT / "docs" / "guides" / "objectives.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    sources = {name.strip("`"): row[1] for row in rows if len(row) == 3 for name in row[0].split(", ")}
    assert sorted(name for name in sources if name in PRESETS) == PRESETS
    assert all(re.search(r"arXiv:\d{4}\.\d{5}|notion|rl-collapse|GLM-5|same paper", sources[name]) for name in PRESETS)
