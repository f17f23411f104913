"""Episodes of several rows in an update: each counts once, whatever its rows. The functions around ours are verl's."""

import functools
import math
import random
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from verl_ext.episode import EpisodeKey
from verl_ext.settings import compose_run
from verl_ext.trainer.mini_batches import check_rows, lay_out

PRESETS = (
    "cispo dapo dppo_kl dppo_tv dr_grpo glm5_async gmpo gspo grpo grpo_roc icepop icepop_onpolicy maxrl mis_seq "
    "mis_token olmorl sapo simpletir tir_otb"
).split()
WEIGHTED = {"icepop", "mis_seq", "mis_token", "olmorl"}
OF_RESPONSES = {"gspo", "gmpo"}  # a ratio of a response, which is that of a row: see below
REWARDS = {"a_0": 1.0, "a_1": -1.0, "a_2": -1.0, "b_0": 1.0, "b_1": -1.0, "b_2": -1.0}
# Of each row which tokens train: 6, 2, 1, 3, 1 and 2 of the six episodes.
ONE = {
    "a_0_0": [1, 1, 1, 0, 1, 0, 1, 1],
    "a_1_0": [1, 1],
    "a_2_0": [0, 1],
    "b_0_0": [1, 0, 1, 1],
    "b_1_0": [1],
    "b_2_0": [1, 1],
}
THREE = {"a_0_0": [1, 1, 1], "a_0_1": [0, 0, 1, 0], "a_0_2": [1, 1]} | {k: v for k, v in ONE.items() if k != "a_0_0"}


class Queue:
    """verl's queue: the columns of each row, by its key."""

    def __init__(self, monkeypatch):
        import transfer_queue as tq

        self.rows, self.tags = {}, {}
        for name in ("get", "put"):
            monkeypatch.setattr(tq, f"kv_batch_{name}", getattr(self, name))

    def get(self, keys, partition_id, select_fields=None):
        from verl.utils import tensordict_utils as tu

        names = [name for name in self.rows[keys[0]] if select_fields is None or name in select_fields]
        data = {name: [self.rows[key][name] for key in keys] for name in names}
        for name in data.keys() - {"uid"}:
            data[name] = torch.nested.as_nested_tensor(data[name], layout=torch.jagged)
        return tu.get_tensordict(data)

    def put(self, keys, partition_id, fields, tags=None):
        for i, key in enumerate(keys):
            row = fields[i]
            self.rows.setdefault(key, {}).update({name: getattr(row[name], "data", row[name]) for name in row.keys()})
        self.tags |= dict(zip(keys, tags or [], strict=True)) if tags else {}
        return self.batch_of(keys)

    def batch_of(self, keys):
        from transfer_queue import KVBatchMeta

        return KVBatchMeta(partition_id="train", keys=[*keys], tags=[self.tags[key] for key in keys])


@pytest.fixture
def gradients(make, monkeypatch):
    """What each sampled token of the episodes gets from the updates of a step, as verl's actor computes them."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils import losses

    queue, made = Queue(monkeypatch), functools.cache(make)
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda values, data: values)

    def gradients(objective, masks, *overrides, ranks=1, ratio=None):
        """`masks`: key of a row -> which of its tokens train. `ratio`: of log-probs, by the numbers of the tokens."""
        one_update = objective == "icepop_onpolicy"
        sizes = ("data.train_batch_size=2", f"actor_rollout_ref.actor.ppo_mini_batch_size={1 + one_update}")
        trainer, _ = made(
            *sizes, "actor_rollout_ref.rollout.n=3", "retool.recorder.enable=false", *overrides, objective=objective
        )
        trainer.tokenizer.eos_token_id = 0
        trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
        masks = {key: torch.tensor(mask).bool() for key, mask in masks.items()}
        token, number = {}, 0  # key of a row -> the numbers of its tokens that train
        for key, mask in sorted(masks.items()):
            token[key] = range(number, number := number + sum(mask))
        generator = torch.Generator().manual_seed(5)
        drawn = [torch.rand(number, generator=generator) for _ in range(4)]
        old = -1 - drawn[0]
        new = old + (0.6 * (drawn[1] - 0.5) if ratio is None else ratio)
        sampled = old + 0.8 * (drawn[2] - 0.5)  # by the rollout engine
        if objective == "mis_seq":
            sampled[:6] = old[:6] - 0.2  # e^1.2 = 3.3 of the first episode is above 2, e^.6 of a row is not
        if trainer.config.algorithm.rollout_correction.bypass_mode:
            old = sampled

        def placed(key, values):
            """Values of all tokens that train, as a column of a row."""
            return torch.zeros(len(masks[key])).masked_scatter(masks[key], values[list(token[key])])

        queue.rows.clear()
        for key, own in masks.items():
            row = {"rm_scores": torch.zeros(len(own)), "response_mask": own.long(), "loss_mask": own.long()}
            row["rm_scores"][-1] = REWARDS[key.rpartition("_")[0]]
            queue.rows[key] = row | {"uid": EpisodeKey.uid_of(key), "rollout_log_probs": placed(key, sampled)}
            queue.tags[key] = {"seq_len": 10 + len(own)}
        batch = trainer._balance_batch(queue.batch_of(masks), {})
        for key in batch.keys:  # as the actor's pass for old log-probs gives them
            for name, of in {"old_log_probs": old, "sum_pi_squared": drawn[3]}.items():
                queue.rows[key][name] = placed(key, of) if key in masks else torch.zeros(1)
        batch = trainer._compute_advantage(batch, {})
        config = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
        keys, updates = batch.keys, trainer._updates_per_step()
        found, counts = torch.zeros(number), []
        of_rank = [keys[len(keys) // ranks * i : len(keys) // ranks * (i + 1)] for i in range(ranks)]
        size = len(of_rank[0]) // updates
        for update in range(updates):
            parts = [own[update * size : (update + 1) * size] for own in of_rank]
            together = [key for part in parts for key in part]
            counts.append({EpisodeKey.parse(key).episode for key in together if key in masks})
            tokens = sum(int(queue.rows[key]["loss_mask"].sum()) for key in together)
            for part in parts:
                data = queue.get(part, "train", ["response_mask", "old_log_probs", "advantages", "rollout_is_weights"])
                info = {"dp_size": ranks, "batch_num_tokens": tokens, "global_batch_size": len(together)}
                tu.assign_non_tensor(data, **info)
                leaves = torch.zeros(data["response_mask"].to_padded_tensor(0).shape)
                real = [(i, key) for i, key in enumerate(part) if key in masks]
                for i, key in real:
                    leaves[i, : len(masks[key])] = placed(key, new)
                leaves.requires_grad_()
                losses.ppo_loss(config, {"log_probs": leaves}, data)[0].backward()
                for i, key in real:
                    found[list(token[key])] += leaves.grad[i, : len(masks[key])][masks[key]] / ranks
        return SimpleNamespace(of_tokens=found, episodes=counts, keys=keys)

    return gradients


SAME = [(name, ()) for name in PRESETS]
SAME += [("dapo", (f"algorithm.adv_estimator={name}",)) for name in ("reinforce_plus_plus", "opo")]


@pytest.mark.parametrize(("objective", "more"), SAME, ids=lambda each: each if isinstance(each, str) else "".join(each))
def test_an_episode_of_three_rows_trains_as_one_row_with_the_same_tokens_does(gradients, objective, more):
    """For objectives whose ratio is that of a response, the ratio here is the same for all its tokens."""
    ratio = None
    if objective in OF_RESPONSES:
        ratio = torch.repeat_interleave(torch.tensor([1, -1, 3, 2, 1, -2]) * 1e-4, torch.tensor([6, 2, 1, 3, 1, 2]))
    one, three = (gradients(objective, masks, *more, ratio=ratio) for masks in (ONE, THREE))
    assert torch.allclose(one.of_tokens, three.of_tokens, atol=1e-7)
    assert one.of_tokens.abs().max() > 1e-3 and one.episodes == three.episodes
    two = gradients(objective, THREE, *more, ranks=2, ratio=ratio)
    assert torch.allclose(two.of_tokens, three.of_tokens, atol=1e-7) and two.episodes == three.episodes


UNIT = "actor_rollout_ref.actor.policy_loss.unit"
# Rewards 1, -1, -1: mean -1/3, so 4/3 and -2/3; by the sample std 2 / sqrt 3: 1.1547 and -.57735.
STD = 2 / math.sqrt(3)
BY_HAND = {
    # objective and more -> (of a token of the first episode, of the second), where ratios are 1
    ("dapo",): (4 / 3 / STD / 9, -2 / 3 / STD / 9),  # 9 tokens in the first update
    ("dapo", f"{UNIT}=batch"): (4 / 3 / STD * 2 / 15, -2 / 3 / STD * 2 / 15),  # 2 updates, 15 tokens
    ("dapo", f"{UNIT}=group"): (4 / 3 / STD * 2 / 2 / 9, -2 / 3 / STD * 2 / 2 / 9),  # 2 groups
    ("grpo",): (4 / 3 / STD / 3 / 6, -2 / 3 / STD / 3 / 2),  # 3 episodes in an update, of 6 and 2 tokens
    ("gspo",): (4 / 3 / STD / 3 / 6, -2 / 3 / STD / 3 / 2),
    ("gmpo",): (4 / 3 / STD / 3 / 6, -2 / 3 / STD / 3 / 2),
    ("dr_grpo", "actor_rollout_ref.actor.loss_scale_factor=10"): (4 / 3 / 3 / 10, -2 / 3 / 3 / 10),
    ("maxrl",): (2 / 9, -1 / 9),  # (1 - 1/3) / (1/3)
}


@pytest.mark.parametrize("objective", BY_HAND, ids=lambda each: each[0] + each[-1][-6:])
def test_the_weight_of_a_token_is_that_computed_by_hand(gradients, objective):
    found = gradients(objective[0], THREE, *objective[1:], ratio=torch.zeros(15)).of_tokens
    first, second = BY_HAND[objective]
    assert found[:8].tolist() == pytest.approx([-first] * 6 + [-second] * 2, rel=1e-5)


def test_the_ratio_of_a_response_is_that_of_a_row(gradients):
    """GSPO's upper bound is 4e-4. The fourth token, alone in its row, is above it; the mean of all six is not."""
    ratio = torch.zeros(15)
    ratio[3] = 1e-3
    found = gradients("gspo", THREE, ratio=ratio).of_tokens[:6]
    assert found[3] == 0 and (found[[0, 1, 2, 4, 5]] != 0).all()
    assert (gradients("gspo", ONE, ratio=ratio).of_tokens[:6] != 0).all()


def test_what_a_kl_takes_from_rewards_counts_in_every_row_and_the_score_once(cpu_platform):
    """Scores 1 and 0; the first episode loses 1 + 2 tenths in its first row and 3 in its second: .4 against 0."""
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo.v1 import trainer_base

    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    data = {"token_level_scores": scores, "response_mask": torch.tensor([[1, 1], [0, 1], [1, 1]])}
    data["token_level_rewards"] = scores - torch.tensor([[0.1, 0.2], [0.0, 0.3], [0.0, 0.0]])
    data = DataProto.from_dict(data, non_tensors={"uid": np.array(["a", "a", "a"], dtype=object)})
    keys = ["a_0_0", "a_0_1", "a_1_0"]
    data = trainer_base.compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator="rloo")
    assert data.batch["advantages"].flatten().tolist() == pytest.approx([0.4, 0.4, 0.0, 0.4, -0.4, -0.4])


# Mini-batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "fixed"), [(1, 1), (2, 1), (3, 4)])
def test_the_rows_of_an_episode_are_in_one_mini_batch_of_verls(monkeypatch, cpu_platform, ranks, fixed):
    """30 episodes of 1 to 8 rows in 3 updates: 10 each, in their order, and equally many rows on each rank."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    queue, rng = Queue(monkeypatch), random.Random(4)
    rows = [rng.randint(1, 8) for _ in range(30)]
    keys = [f"u{i}_0_{row}" for i, number in enumerate(rows) for row in range(number)]
    for key in keys:
        length = rng.randint(2, 900)
        queue.rows[key] = {"uid": key.split("_")[0], "prompts": torch.zeros(length)}
        queue.tags[key] = {"seq_len": length}
    batch, partitions = lay_out(queue.batch_of(keys), 3, ranks * fixed, ranks, 0)
    assert [tag.get("is_padding", False) for tag in batch.tags] == [False] * len(keys) + [True] * (
        len(batch) - len(keys)
    )
    assert sorted(place for own in partitions for place in own) == [*range(len(batch))]
    found = [Counter() for _ in range(3)]
    for own in partitions:
        data = TensorDict({"place": torch.tensor(own)}, batch_size=len(own))
        updates = [*tu.make_iterator(data, mini_batch_size=len(own) // 3, epochs=1, seed=1, dataloader_kwargs={})]
        assert len(updates) == 3 and len(own) % (3 * fixed) == 0
        for update, counts in zip(updates, found, strict=True):
            real = [batch.keys[place] for place in update["place"].tolist() if place < len(keys)]
            counts.update(EpisodeKey.parse(key).uid for key in real)
    assert found == [Counter({f"u{i}": rows[i] for i in range(10 * k, 10 * k + 10)}) for k in range(3)]
    most = max(sum(rows[10 * k : 10 * k + 10]) for k in range(3))
    assert len(batch) == 3 * -(-most // (ranks * fixed)) * ranks * fixed


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("settings", "updates", "said"),
    [
        (["algorithm.adv_estimator=gae"], 1, "adv_estimator=gae values every row by itself.*such as grpo"),
        ([f"{ACTOR}.shuffle=true"], 2, "shuffle=true spreads them over the 2 updates.*Set it to false"),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], 1, "Set use_kl_loss=false"),
        (
            [f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"],
            1,
            "or loss_agg_mode=token-mean",
        ),
        ([f"{ACTOR}.shuffle=true"], 1, None),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.loss_agg_mode=token-mean"], 2, None),
    ],
)
def test_settings_that_would_count_an_episode_by_its_rows_are_refused(settings, updates, said):
    config = compose_run("tiny_dapo", settings)
    with pytest.raises(ValueError, match=f"Episodes may have several rows, but .*{said}") if said else nullcontext():
        check_rows(config, updates)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [(["retool.agent.run=a:b"], True), (["retool.agent.run=a:b", "retool.agent.max_rows=1"], False), ([], False)],
)
def test_a_run_of_agents_is_refused_when_it_starts(make, settings, is_refused):
    refusal = pytest.raises(ValueError, match="shuffle=true spreads .* Or set retool.agent.max_rows=1")
    with refusal if is_refused else nullcontext():
        make(f"{ACTOR}.shuffle=true", *settings)
