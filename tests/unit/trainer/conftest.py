"""A trainer of verl with our options: constructor and training loop are real, their calls of a cluster are faked."""

import copy
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.test_configs import composed_once
from verl_ext.episode import EpisodeKey
from verl_ext.events import Observer
from verl_ext.settings import compose_run as composed

MODES = ["sync", "colocate_async", "separate_async"]


ON = {
    "adaptive_n": "retool.adaptive_n.enable=true",
    "schedule": "retool.validation_schedule.enable=true",
    "light": "retool.light_validation.enable=true",
    "early_stop": "retool.early_stop.enable=true",
}


class FakeCheckpoints:
    """The far side of the calls that free and fill the memory of vLLM."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name) or {}


class FakeRecorder:
    """The handle of the recorder's actor: notes (name, arguments...) of each call."""

    def __init__(self, calls):
        tell = lambda told: calls.extend((name, *arguments) for name, arguments in told)  # noqa: E731
        self.tell, self.close = SimpleNamespace(remote=tell), SimpleNamespace(remote=lambda: calls.append(("close",)))


class Watcher(Observer):
    def on_selected(self, event):
        self.selected = event


@pytest.fixture
def make(cpu_platform, monkeypatch, tmp_path):
    """A trainer of verl's registry, as its `TaskRunner` makes it; steps, validations and saves are only recorded."""
    import ray
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from verl_ext.rollout import recorder_actor

    monkeypatch.setattr(PPOTrainer, "init", lambda self: None)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: None)  # when the recorder is closed

    def make(*overrides, mode="sync", accs=None, resume_at=0, steps=6, objective=None):
        """`accs`: step -> what a validation after it measures, 0.5 if not there."""
        settings = [
            *(f"trainer.v1.trainer_mode={mode}", f"trainer.default_local_dir={tmp_path}"),
            *("trainer.val_before_train=false", "trainer.test_freq=2", "trainer.save_freq=4"),
            *("data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x"),
            *("trainer.v1.separate_async.parameter_sync_step=2", "actor_rollout_ref.rollout.nnodes=1"),
            *(
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
            ),
            *overrides,
        ]
        run = composed("tiny_dapo", [f"+objective={objective}"]) if objective else composed_once("tiny_dapo")
        run = copy.deepcopy(run)
        OmegaConf.set_struct(run.retool.domains, False)  # its names are free
        config = OmegaConf.merge(run, OmegaConf.from_dotlist(settings))
        trainer = get_trainer_cls(mode)(config)
        calls = SimpleNamespace(steps=[], validations=[], saves=[], logged={}, memory=[], recorded=[])
        monkeypatch.setattr(recorder_actor, "start", lambda *_: FakeRecorder(calls.recorded))
        trainer.standalone_server_manager = SimpleNamespace(config=config)
        trainer.global_steps = resume_at
        trainer.total_training_steps, trainer.steps_per_epoch = steps, 1000
        trainer.val_dataset = [{"n": i} for i in range(8)]
        trainer.val_dataloader = "all problems"
        trainer.checkpoint_manager = FakeCheckpoints(calls.memory)
        trainer.standalone_checkpoint_manager = SimpleNamespace(replicas=[], lock=threading.Lock(), update_weights=dict)
        trainer.tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: "text")
        trainer._init_dump_executor()
        trainer.timing_raw = {}
        trainer.init()

        def validate(self):
            loader = self.val_dataloader
            if loader != "all problems":
                loader = [len(batch["__rollout_n__"]) for batch in loader]
            calls.validations.append((self.global_steps, loader))
            acc = (accs or {}).get(self.global_steps, 0.5)
            return {"val-core/tiny/acc/mean@1": acc, "val-aux/num_turns/mean": 3.0}

        def save_checkpoint(self):
            calls.saves.append(self.global_steps)
            self.checkpoint_callback.on_save(trainer=self, global_step=self.global_steps, checkpoint_dir="")

        monkeypatch.setattr(PPOTrainer, "_validate", validate)
        monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save_checkpoint)
        monkeypatch.setattr(PPOTrainer, "step", lambda self, *_: calls.steps.append(self.global_steps) or batch)
        monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_, **__: None)
        monkeypatch.setattr(type(trainer), "on_train_begin", lambda self: None)
        monkeypatch.setattr(trainer_base.PPOTrainer, "_reissue_inflight_prompts", lambda self: 0)
        monkeypatch.setattr(tq, "kv_clear", lambda **_: None)
        monkeypatch.setattr(tq, "kv_list", dict)
        log = SimpleNamespace(log=lambda data, step: calls.logged.setdefault(step, {}).update(data))
        monkeypatch.setattr(trainer_base, "Tracking", lambda **_: log)
        return trainer, calls

    batch = SimpleNamespace(keys=[], tags=[], partition_id="train")
    return make


@pytest.fixture
def submitted(monkeypatch):
    """What verl's trainer hands to the agent loops: of each prompt, the number of responses that the worker reads."""
    import transfer_queue as tq

    monkeypatch.setattr(tq, "kv_batch_put", lambda **_: None)
    numbers = []

    def generate_sequences(batch):
        for chunk in batch.chunk(min(2, len(batch))):  # as AgentLoopManagerTQ; the loop is AgentLoopWorkerTQ's
            for i in range(len(chunk)):
                value = dict(chunk.items()).get("__rollout_n__")
                value = value[i] if hasattr(value, "__getitem__") else value
                numbers.append(getattr(value, "data", value))

    return SimpleNamespace(numbers=numbers, manager=SimpleNamespace(generate_sequences=generate_sequences))


@pytest.fixture
def advantages(make, monkeypatch):
    """What verl's `_compute_advantage` and ours write for one batch, by key; the records note the same."""
    import torch
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    from verl_ext.events import Selection

    def advantages(
        rewards,
        fillers,
        estimator,
        *overrides,
        baseline_only=(),
        lengths=None,
        objective=None,
        mask=(1, 0, 1),
        padding=(),
        **others,
    ):
        """`rewards`: key -> reward of a row of three tokens, the second of which a tool wrote: `mask`.

        `lengths`: key -> tokens of a response, all its own, instead; `padding`: keys of verl's; `others`: further
        columns, values by row.
        """
        settings = [f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=false", *overrides]
        trainer, _ = make(*settings, objective=objective)
        trainer.replay_buffer.selection = Selection(frozenset(fillers), frozenset(map(EpisodeKey.parse, baseline_only)))
        masks = [torch.ones(lengths[key], dtype=torch.long) if lengths else torch.tensor(mask) for key in rewards]
        masks = [own * (key not in padding) for key, own in zip(rewards, masks, strict=True)]
        scores = [torch.zeros(len(own)) for own in masks]
        for score, reward in zip(scores, rewards.values(), strict=True):
            score[-1] = reward
        columns = {
            "uid": [EpisodeKey.parse(key).uid for key in rewards],
            "response_mask": masks,
            "rm_scores": scores,
            **others,
        }
        stored = {key: {name: values[i] for name, values in columns.items()} for i, key in enumerate(rewards)}

        def get(keys, partition_id, select_fields):
            data = {name: [stored[key][name] for key in keys] for name in select_fields if name in stored[keys[0]]}
            for name in data.keys() - {"uid"}:
                data[name] = torch.nested.as_nested_tensor(data[name], layout=torch.jagged)
            return tu.get_tensordict(data)

        def put(keys, partition_id, fields):
            for name, values in fields.items():
                for key, value in zip(keys, values.unbind(), strict=True):
                    stored[key][name] = value
            return batch

        monkeypatch.setattr(tq, "kv_batch_get", get)
        monkeypatch.setattr(tq, "kv_batch_put", put)
        batch = tq.KVBatchMeta(
            partition_id="train", keys=[*rewards], tags=[{"is_padding": key in padding} for key in rewards]
        )
        watcher = Watcher()
        trainer.observers.add(watcher)
        trainer._compute_advantage(batch, {})
        for key, row in stored.items():
            own = set(row["advantages"][row["response_mask"].bool()].tolist())
            scaled, told = own.pop() if len(own) == 1 else None, watcher.selected.advantage[EpisodeKey.parse(key)]
            assert (told is None) == (scaled is None)
            if told is not None:  # the loss has it times a factor of the mean
                assert told * scaled > 0 or told == scaled == 0
                unit = trainer.config.actor_rollout_ref.actor.policy_loss.get("unit", "mini_batch")
                are_episodes = not padding and all(EpisodeKey.parse(key).row == 0 for key in stored)
                assert told == pytest.approx(scaled) or unit != "mini_batch" or not are_episodes
        return {key: row["advantages"].tolist() for key, row in stored.items()}

    return advantages
