"""What DapoReplayBuffer does for SimpleTIR (void turns only in the baseline) and GRPO-RoC (half of 2n are kept)."""

import pytest

from tests.unit.trainer.prompt_groups import MODES, RAISED, buffer_maker, info, keys_of
from verl_ext.episode import EpisodeKey
from verl_ext.outcome import PromptEnd
from verl_ext.trainer.sampler import DapoReplayBuffer


@pytest.fixture
def make_buffer(monkeypatch):
    return buffer_maker(monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_void_turns_stay_in_the_group_and_are_named_for_the_loss(make_buffer, mode):
    group = [info(1), info(0, void_turns=1), info(0)]
    _queue, buffer = make_buffer([group, [info(1), info(0)]], batch_size=1, void_turn_filter="loss", mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    assert sorted(batch.keys) == ["uid-0_0_0", "uid-0_1_0", "uid-0_2_0"]
    void = EpisodeKey("uid-0", 1)
    assert buffer.selection.left_out == {void: "in the baseline of its group, not in the loss: void_turn"}
    assert buffer.selection.baseline_only == {void} and metrics["failure/groups_filled"] == 0
    trains = [buffer.selection.trains(EpisodeKey("uid-0", session)) for session in range(3)]
    assert trains == [True, False, True] and not buffer.selection.trains(EpisodeKey("uid-0", 1, row=7))


def test_a_copy_of_a_void_rollout_is_not_in_the_loss_either(make_buffer):
    """Five rollouts, two failed: two of the three valid ones, of which two are void, are copied: one void at least.
    Of eight groups, one copies the other one as well: by chance none would, once in 6,561 times."""
    failed = info(0, sandbox_failure=1.0, finish_reason="sandbox_failure")
    group = [info(1), info(0, void_turns=1), info(1, void_turns=1), failed, failed]
    _queue, buffer = make_buffer([group] * 8, batch_size=8, void_turn_filter="loss")
    batch, _ = buffer.sample(1, "train", 8)
    keys, baseline_only = [EpisodeKey.parse(key) for key in batch.keys], buffer.selection.baseline_only
    assert len(keys) == 5 * 8 and baseline_only == {key for key in keys if key.session in (1, 2)}
    assert any(key.copy and key.session == 0 for key in keys)
    assert len(baseline_only) >= 3 * 8 and not any(map(buffer.selection.trains, baseline_only))


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_only_void_rollouts_is_replaced(make_buffer, mode):
    """Nothing of it would be in the loss."""
    void = [info(1, void_turns=1), info(0, void_turns=1)]
    _, buffer = make_buffer([void, [info(1), info(0)]], batch_size=1, void_turn_filter="loss", mode=mode)
    batch, _ = buffer.sample(1, "train", 1)
    assert sorted(batch.keys) == ["uid-1_0_0", "uid-1_1_0"] and not buffer.selection.fillers
    assert buffer.take_ended(1).prompts == {"uid-0": PromptEnd.VOID, "uid-1": PromptEnd.TRAINED}


def test_a_filler_of_void_rollouts_is_in_the_baseline_of_no_loss(make_buffer):
    """The records say that the group fills the batch, and not that each of its rollouts is left out of a loss."""
    void = [info(1, void_turns=1), info(0, void_turns=1)]
    _, buffer = make_buffer([void] * 2, batch_size=1, void_turn_filter="loss", max_num_gen_batches=1)
    batch, _ = buffer.sample(1, "train", 1)
    chosen = buffer.selection
    assert len(chosen.fillers) == 1 and len(batch.keys) == 2 and chosen.left_out == {}
    assert not any(chosen.trains(EpisodeKey.parse(key)) for key in batch.keys)


# Right with 2 of 2 calls failed, right without an error, wrong twice: of 4, 2 are kept, one right and one wrong.
DIRTY, CLEAN = info(1, errors={"error": 2}), info(1, ok=2)
GROUP = [DIRTY, info(0, ok=1), CLEAN, info(0, errors={"error": 1})]


@pytest.mark.parametrize("mode", MODES)
def test_half_of_a_group_is_kept_the_cleaner_right_answer(make_buffer, mode):
    queue, buffer = make_buffer([GROUP], batch_size=1, resample="code", mode=mode)
    assert buffer.settings.generated_for_one == 2
    batch, metrics = buffer.sample(1, "train", 1)
    assert sorted(keys_of(batch)) == ["uid-0_1_0", "uid-0_2_0"] and set(queue.tags) == set(batch.keys)
    assert metrics["train/acc"] == 0.5, "accuracy is of all that was generated"


def test_an_episode_that_is_left_out_goes_with_all_its_rows(make_buffer):
    group = [info(1, errors={"error": 2}, rows=2), info(0, rows=3), info(1, ok=2, rows=2), info(0, errors={"error": 1})]
    queue, buffer = make_buffer([group], batch_size=1, resample="code")
    batch, _ = buffer.sample(1, "train", 1)
    rows = {0: 2, 1: 3, 2: 2, 3: 1}
    kept = {2, 3 if EpisodeKey("uid-0", 1) in buffer.selection.left_out else 1}
    assert {key.session for key in buffer.selection.left_out} == rows.keys() - kept
    assert sorted(batch.keys) == [f"uid-0_{session}_{row}" for session in sorted(kept) for row in range(rows[session])]
    assert set(queue.tags) == set(batch.keys)


def test_what_infrastructure_failed_is_left_out_first(make_buffer):
    failed = info(0, sandbox_failure=1.0, finish_reason="sandbox_failure")
    _queue, buffer = make_buffer([[info(1, ok=1), failed, info(0), info(1, ok=1)]], batch_size=1, resample="code")
    batch, _ = buffer.sample(1, "train", 1)
    assert sorted(batch.keys) == ["uid-0_0_0", "uid-0_2_0"]  # one right, one wrong, and no copy


def test_groups_without_a_valid_rollout_are_replaced_as_usual(make_buffer):
    failed = [info(0, sandbox_failure=1.0, finish_reason="sandbox_failure")] * 4
    _queue, buffer = make_buffer([RAISED, failed, GROUP], batch_size=1, resample="paper")
    batch, metrics = buffer.sample(1, "train", 1)
    assert {key.split("_")[0] for key in batch.keys} == {"uid-2"} and len(batch.keys) == 2
    assert metrics["failure/groups_dropped"] == 2


@pytest.mark.parametrize("settings", [{"resample": "best"}, {"void_turn_filter": "baseline"}, {"void_turn_filter": 1}])
def test_another_rule_is_refused(make_buffer, settings):
    with pytest.raises(ValueError, match="expected void_turn_filter=false, true or loss and resample=null, paper"):
        make_buffer([], batch_size=1, **settings)


def test_resampling_does_not_go_with_a_filter_that_could_leave_too_few(make_buffer):
    with pytest.raises(ValueError, match="resample='paper'.*resample excludes true"):
        make_buffer([], batch_size=1, void_turn_filter=True, resample="paper")


@pytest.mark.parametrize(("strategy", "threshold"), [("wait", 2), ("drop", None)])
def test_surplus_is_not_kept_if_nothing_is_ever_too_old(make_buffer, strategy, threshold):
    ages = {"max_off_policy_threshold": threshold, "max_off_policy_strategy": strategy}
    with pytest.raises(ValueError, match=f"keep_surplus=true and max_off_policy_strategy='{strategy}'.*a number"):
        make_buffer([], batch_size=1, keep_surplus=True, **ages)


def test_a_misspelt_key_of_the_sampler_is_refused():
    keys = {"filter_groups": {"enable": False, "metric": "acc", "max_num_gen_batches": 1}, "poll_interval_s": 1}
    with pytest.raises(ValueError, match="sampler_kwargs.max_stalenes is unknown; expected one of filter_groups, keep"):
        DapoReplayBuffer(sampler_kwargs=keys | {"max_stalenes": 1})


@pytest.mark.parametrize("objective", ["dapo", "maxrl", "tir_otb"])
def test_adaptive_n_goes_with_every_baseline_of_groups(make, objective):
    make("retool.adaptive_n.enable=true", objective=objective)


@pytest.mark.parametrize(("option", "numbers"), [((), [16, 16]), (("retool.adaptive_n.enable=true",), [24, 24])])
def test_twice_the_responses_are_generated(make, submitted, option, numbers):
    """tiny_dapo has 8 responses a prompt; with adaptive n 12 in the first phase."""
    from verl.utils import tensordict_utils as tu

    trainer, _ = make(*option, objective="grpo_roc")
    trainer.global_steps, trainer.agent_loop_manager = 1, submitted.manager
    batch = tu.get_tensordict({"uid": ["a", "b"], "raw_prompt": [[{"role": "user", "content": "x"}]] * 2})
    trainer._submit_batch_to_rollout(batch)
    assert submitted.numbers == numbers
