"""How a run with our options starts, and what a step submits and logs; test_run_*.py have the single options."""

import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.trainer.conftest import MODES, ON
from tests.unit.trainer.prompt_groups import info
from verl_ext.episode import EpisodeKey
from verl_ext.events import Ended, EndedCounts
from verl_ext.records import store


@pytest.mark.parametrize("mode", MODES)
def test_every_trainer_of_verls_registry_is_extended_once(cpu_platform, mode):
    from verl.trainer.ppo import v1
    from verl.trainer.ppo.v1 import get_trainer_cls

    from verl_ext.trainer import extend_trainers
    from verl_ext.trainer.run_trainer import RunTrainer

    trainer_class = get_trainer_cls(mode)
    assert issubclass(trainer_class, RunTrainer) and trainer_class.__mro__[4].__module__.endswith(f"trainer_{mode}")
    extend_trainers(v1)
    assert get_trainer_cls(mode) is trainer_class


def test_another_version_of_verl_is_refused(monkeypatch):
    from verl_ext import trainer

    monkeypatch.setattr(trainer, "VERL", {"verl": "0.9.2"})
    with pytest.raises(RuntimeError, match=r"internals of \{'verl': '0.9.2'\}, but found \{'verl': '0.9.1'\}"):
        trainer.extend_trainers(None)


def test_a_recorder_that_nobody_would_tell_is_refused_when_the_run_starts(make):
    none = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"
    with pytest.raises(ValueError, match="agent_loop_manager_class is null.*set retool.recorder.enable=false"):
        make(none)
    make(none, "retool.recorder.enable=false")


def test_a_wrong_setting_of_retool_stops_the_run_at_its_start(make):
    with pytest.raises(ValueError, match=r"retool.sandbox.timeout_s is 0, expected a number in \(0, 86400\]"):
        make("retool.sandbox.timeout_s=0")


def test_dynamic_sampling_without_a_metric_stops_the_run_at_its_start(make):
    """verl checks only its own sampler; ours would filter nothing."""
    with pytest.raises(ValueError, match="enable is true with metric=null.* such as acc"):
        make("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=null")
    make("algorithm.filter_groups.enable=false", "algorithm.filter_groups.metric=null")


def test_a_dubious_setting_is_reported_when_the_run_starts(make, caplog):
    make()
    assert "Dynamic sampling" not in caplog.text and "distribution" not in caplog.text
    make("algorithm.filter_groups.enable=false", "actor_rollout_ref.rollout.top_p=0.9")
    assert "Dynamic sampling is off while the reward counts length" in caplog.text
    assert "top_p=0.9 from a part of the distribution" in caplog.text


def test_a_weight_update_that_the_run_cannot_have_stops_it_at_its_start(make):
    with pytest.raises(ValueError, match="weight_update is keep with trainer.v1.trainer_mode=sync: expected separate"):
        make("retool.fleet.weight_update=keep")


@pytest.mark.parametrize(("mode", "told"), [("sync", False), ("separate_async", True)])
def test_a_mean_over_the_batch_that_is_one_over_an_update_is_reported(make, caplog, mode, told):
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.run_trainer"):
        make(mode=mode, objective="olmorl")
    assert ("policy_loss.unit=batch with parameter_sync_step=2" in caplog.text) is told


def test_a_router_of_the_run_is_there_before_its_servers(make):
    lean = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_ext.rollout.workers.LeanAgentLoopManager"
    trainer, _ = make("retool.fleet.routing=ring", lean)
    assert trainer.config.actor_rollout_ref.rollout.router_config_path.endswith("verl_ext/fleet/ring.yaml")
    with pytest.raises(ValueError, match="full_determinism=true"):
        make("retool.fleet.routing=ring", lean, "actor_rollout_ref.rollout.full_determinism=true")


@pytest.mark.parametrize(("mode", "hybrid"), [("separate_async", "true"), ("colocate_async", "false")])
def test_servers_on_the_actors_gpus_do_not_come_and_go(make, mode, hybrid):
    trainer, _ = make(f"actor_rollout_ref.hybrid_engine={hybrid}", mode=mode)
    assert trainer.members is None


def test_dedicated_servers_join_and_leave_while_the_run_continues_and_never_while_weights_change(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_ext.fleet import commands

    trainer, _ = make("actor_rollout_ref.hybrid_engine=false", mode="separate_async")
    asked, run = [], Path(trainer.config.trainer.default_local_dir)
    lock = trainer.standalone_checkpoint_manager.lock
    trainer.standalone_checkpoint_manager.update_weights = lambda _: asked.append(lock.locked()) or {}
    trainer.prev_step_profile = False
    trainer.on_step_end()
    assert asked.pop() and not lock.locked()

    monkeypatch.setattr(trainer.members, "rows", lambda: [])
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, _: asked.append(commands.ask(run, ["list"])))
    trainer.fit(None)
    assert asked == [[]]


def test_with_all_options_off_the_loop_is_verls(make):
    trainer, calls = make(accs={2: 0.5, 4: 0.0, 6: 0.0})
    trainer.fit(None)
    assert calls.steps == [1, 2, 3, 4, 5, 6] and calls.saves == [4, 6]
    assert calls.validations == [(2, "all problems"), (4, "all problems"), (6, "all problems")]
    assert trainer._get_required_batch_multiple(3) == 192  # lcm(3, mini-batch of 8 prompts x 8 responses)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ON["adaptive_n"], "algorithm.adv_estimator=rloo"], "adaptive_n needs GRPO's baselines .*=rloo"),
        (
            ["reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false"],
            "scores after a batch is sampled.*Set enable_resource_pool=true",
        ),
        ([ON["light"], "trainer.test_freq=0"], "trainer.test_freq is 0, so the run never validates"),
        ([ON["early_stop"], "trainer.test_freq=-1"], "trainer.test_freq is -1, so the run never validates"),
        ([ON["adaptive_n"], "retool.adaptive_n.phases=[[0,1]]"], "retool.adaptive_n.phases is"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(make, overrides, message):
    with pytest.raises(ValueError, match=message):
        make(*overrides)


def test_a_step_submits_as_many_prompts_less_as_groups_wait_for_it(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, _ = make()  # 16 prompts a step
    submitted = []
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, count: submitted.append(count))
    monkeypatch.setattr(PPOTrainer, "_add_batch_to_generate", lambda self: submitted.append("a batch"))
    for waiting in (0, 3, 16, 20):
        monkeypatch.setattr(type(trainer.replay_buffer), "num_kept", waiting)
        trainer.prepare_step()
    assert submitted == ["a batch", 13]


def test_shares_of_a_step_are_of_its_tokens_however_many_each_of_its_batches_has(make, monkeypatch):
    """50 of 100 tokens clipped, then 0 of 900: 50 of 1000. The mean of shares, as both have 8 responses, is .25."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_ext.trainer.objective import COUNT

    verls = PPOTrainer.step
    trainer, _ = make("retool.recorder.enable=false", mode="separate_async")
    counts = iter([{"tokens": 100.0, "clipped_low": 50.0}, {"tokens": 900.0, "clipped_low": 0.0}])

    def update_actor(self, batch, metrics):
        metrics.update({COUNT + name: value for name, value in ({"clipped_high": 0.0} | next(counts)).items()})
        return batch

    def step_once(self, metrics, timing_raw, sample_batch_size):
        keys = [f"{self.local_trigger_step}_{i}_0" for i in range(8)]
        return self._update_actor(KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys]), metrics)

    monkeypatch.setattr(PPOTrainer, "step", verls)
    monkeypatch.setattr(PPOTrainer, "_step_once", step_once)
    monkeypatch.setattr(PPOTrainer, "_update_actor", update_actor)
    monkeypatch.setattr(type(trainer), "prepare_step", lambda self: {})
    metrics = {}
    trainer.step(metrics, {})
    assert metrics["actor/clipped_low"] == metrics["actor/pg_clipfrac"] == 0.05
    assert not any(name.startswith(COUNT) for name in metrics)


def test_exclusions_are_logged_per_step_and_per_run_and_follow_a_resume(make, caplog, monkeypatch):
    from verl_ext.trainer.sampler import DapoReplayBuffer

    excluded = {1: 0, 2: 1, 3: 60}

    def take_ended(self, step, metrics):
        return Ended(step, EndedCounts(rollouts=100, groups=10, excluded=Counter(verifier_unknown=excluded[step])))

    monkeypatch.setattr(DapoReplayBuffer, "take_ended", take_ended)
    trainer, calls = make("trainer.test_freq=-1", steps=3)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.exclusions"):
        trainer.fit(None)
    shares = {step: data["failure/share_verifier_unknown"] for step, data in calls.logged.items()}
    assert shares == {1: 0.0, 2: 0.01, 3: 0.6}
    assert calls.logged[3]["failure/run_share_verifier_unknown"] == pytest.approx(61 / 300)
    assert [calls.logged[step]["failure/alarm"] for step in (1, 2, 3)] == [0, 0, 1]
    assert "step 3: verifier_unknown kept 60.0% of 100 rollouts out of training (0.5% of 200" in caplog.text

    excluded[3] = 0
    resumed, calls = make("trainer.test_freq=-1", steps=3, resume_at=2)
    resumed.fit(None)
    assert calls.logged[3]["failure/run_share_verifier_unknown"] == pytest.approx(1 / 300)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_every_prompt_that_is_submitted_is_in_the_ledger(make, submitted, monkeypatch, tmp_path, mode):
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils as tu

    from verl_ext.ledger.prompts import PromptLedger, read_tally
    from verl_ext.outcome import PromptEnd
    from verl_ext.trainer.sampler import DapoReplayBuffer

    PromptLedger(tmp_path).on_ended(Ended(3))  # of a start whose step 3 no checkpoint has
    trainer, _ = make(mode=mode, resume_at=2, steps=3)
    queue = {"a_0_0": {}, "b": {"is_prompt": True}, "b_0_0": {}}
    cleared = []
    monkeypatch.setattr(tq, "kv_list", lambda: {"train": queue})
    monkeypatch.setattr(tq, "kv_clear", lambda keys, partition_id: cleared.extend(keys))

    def step(self, *_):
        prompts = [[{"role": "user", "content": text}] for text in ("1+1", "2+2")]
        self._submit_batch_to_rollout(tu.get_tensordict({"uid": ["c", "d"], "raw_prompt": prompts}))
        queue.clear()
        queue.update(d={"is_prompt": True})
        return SimpleNamespace(keys=[], tags=[], partition_id="train")

    def take_ended(self, step, metrics):
        fates = {"b": Counter(trained=4), "c": Counter({"filtered/equal": number})}
        counts = EndedCounts(4, 2, lost=Counter({"a:80": 1}))
        return Ended(step, counts, {"b": PromptEnd.TRAINED, "c": PromptEnd.EQUAL}, fates, in_queue=len(queue))

    monkeypatch.setattr(PPOTrainer, "step", step)
    monkeypatch.setattr(DapoReplayBuffer, "take_ended", take_ended)
    number = trainer.config.actor_rollout_ref.rollout.n
    trainer.fit(submitted.manager)
    assert cleared == ["a_0_0"], "the batch that was trained when the checkpoint was saved"
    tally = read_tally(tmp_path)
    assert tally.ends == {"b": PromptEnd.TRAINED, "c": PromptEnd.EQUAL, "d": PromptEnd.OPEN}
    assert tally.faults() == [] and tally.step == 3 and len(tally.problems) == 3
    assert tally.sizes == dict.fromkeys(("c", "d"), number) and tally.retries == {"a:80": 1}
    assert tally.rollouts() == {"trained": 4, "filtered/equal": number, "open": number}


def test_records_are_resumed_and_closed_even_if_early_stop_starts_no_step(make):
    trainer, _ = make(ON["early_stop"], accs={2: 0.9, 4: 0.1})
    trainer.fit(None)
    again, calls = make(ON["early_stop"], resume_at=4)
    again.fit(None)
    assert calls.steps == [] and calls.recorded == [("resume", 4), ("close",)]


def test_records_forget_later_steps_also_without_a_sampler_of_ours_but_not_for_a_validation(make):
    trainer, calls = make("trainer.v1.sampler.custom_sampler.path=null", steps=3, resume_at=2)
    trainer.fit(None)
    assert calls.recorded[0] == ("resume", 2) and calls.steps == [3] and calls.recorded[-1] == ("close",)
    only, calls = make("trainer.val_only=true", resume_at=2)
    only.config.trainer.val_before_train = True
    only.fit(None)
    assert calls.validations == [(2, "all problems")]
    assert [name for name, *_ in calls.recorded] == ["end_step", "close"]


@pytest.mark.parametrize(
    ("only", "files", "is_recorded"),
    [
        ("true", ["step_000002", "val_000002"], False),
        ("false", ["step_000002", "val_000002"], True),
        ("true", ["step_000002", "val_000001"], True),  # of a run that was killed before its last validation
        ("true", ["val_000002"], True),  # an evaluation in a separate folder, made again
    ],
)
def test_the_recorded_validation_of_a_run_stays_if_a_start_only_validates(make, tmp_path, only, files, is_recorded):
    trainer, calls = make(f"trainer.val_only={only}", steps=2, resume_at=2)
    trainer.config.trainer.val_before_train = True
    for file in files:
        store.path_of(tmp_path, "trajectories", 2).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "records" / "trajectories" / f"{file}.parquet").touch()
    trainer._validate()
    assert ("end_step" in [name for name, *_ in calls.recorded]) == is_recorded


def test_what_verl_times_in_a_step_are_intervals_of_its_records(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.debug import marked_timer

    def step(self, metrics, timing_raw):
        for name in ("gen", "gen", "ref", "adv"):
            with marked_timer(name, timing_raw):
                pass
        return SimpleNamespace(keys=[], tags=[], partition_id="train")

    trainer, calls = make("trainer.test_freq=1", steps=2)
    monkeypatch.setattr(PPOTrainer, "step", step)
    trainer.fit(None)
    of_steps = [(step, [each["what"] for each in intervals]) for _, step, intervals in _calls(calls, "times")]
    expected = ["wait", "wait", "log_probs", "weight_sync", "validate"]
    assert of_steps == [(1, expected), (2, [*expected[:3], "save", *expected[3:]])]
    assert all(each["start_s"] <= each["end_s"] for *_, own in _calls(calls, "times") for each in own)


def _calls(calls, name):
    return [each for each in calls.recorded if each[0] == name]


LISTENER = """
from verl_ext.events import Observer

class Listener(Observer):
    def __init__(self, trainer):
        self.heard = trainer.heard = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            self.heard.append(name)
        return super().__getattribute__(name)

    def on_ended(self, event):
        return {"mine/step": float(event.step)}
"""


def test_your_own_observer_hears_every_event_and_adds_metrics(make, tmp_path):
    (tmp_path / "mine.py").write_text(LISTENER)
    trainer, calls = make(f"retool.observers=[{tmp_path}/mine.py:Listener]", "trainer.save_freq=1", steps=1)
    trainer.fit(None)
    assert trainer.heard == ["on_started", "on_ended", "on_saved", "on_validated", "on_finished"]
    assert calls.logged[1]["mine/step"] == 1.0


@pytest.mark.parametrize(
    "where", ["mine.py:Listener", "verl_ext.events:Listener", "no.such.module:X", "verl_ext.events"]
)
def test_an_observer_that_cannot_be_loaded_stops_the_run_at_its_start(make, where):
    with pytest.raises(ValueError, match=f"retool.observers names '{where}', which cannot be loaded: .*Expected FILE"):
        make(f"retool.observers=[{where}]")


def test_an_observer_that_would_miss_an_event_stops_the_run_at_its_start(make, tmp_path):
    (tmp_path / "mine.py").write_text("class Listener:\n    def __init__(self, trainer): ...\n")
    with pytest.raises(ValueError, match="which gave a Listener. Expected a subclass of verl_ext.events.Observer"):
        make(f"retool.observers=[{tmp_path}/mine.py:Listener]")


def test_the_wait_for_rollouts_ends_if_the_process_of_an_agent_loop_is_gone(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_ext.rollout.liveness import AgentLoops

    def gone(self):
        raise RuntimeError("an agent-loop worker is gone")

    trainer, _ = make()
    monkeypatch.setattr(AgentLoops, "check", gone)
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, _: self.replay_buffer._wait_for_next_poll("train", 0.0))
    with pytest.raises(RuntimeError, match="an agent-loop worker is gone"):
        trainer.fit(None)


@pytest.mark.parametrize(("cut", "expected"), [((1, 1, 0, 0), 0.5), ((0,) * 4, 0.0), ((None,) * 4, 0.25)])
def test_the_clip_ratio_is_the_share_that_the_limit_cut_and_not_of_the_batchs_longest(make, monkeypatch, cut, expected):
    """verl's own is .25 here: one of four is as long as the longest. It stays if a loop notes no end."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    names = ("response_length/clip_ratio", "response_length_non_aborted/clip_ratio")
    keys = ["a_0_0", str(EpisodeKey("a", 0, copy=1)), "a_1_0", "b_0_0", "padding_0_0"]
    made = {None: {}, 0: info(1), 1: info(0, finish_reason="max_tokens")}
    ends = dict(zip(keys, [made[each] for each in cut], strict=False))
    trainer, _ = make()
    monkeypatch.setattr(
        PPOTrainer,
        "_compute_metrics",
        lambda self, batch, metrics, *_, **__: metrics.update(dict.fromkeys(names, 0.25)),
    )
    monkeypatch.setattr(
        tq, "kv_batch_get", lambda keys, partition_id, select_fields: {select_fields[0]: [ends[key] for key in keys]}
    )
    batch = tq.KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 4 + [{"is_padding": True}])
    metrics = {}
    trainer._compute_metrics(batch, metrics, {}, global_steps=1, epoch=0)
    assert [metrics[name] for name in names] == [expected] * 2
