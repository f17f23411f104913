"""Train on episodes of one to three rows in the real stack: each token once, exact, and in its episode's update."""

from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, launch_tiny, read_metrics, run_to_end
from verl_ext.records import store

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

UNREADABLE = "\ufffd"  # how many of them stand for bytes that are no text depends on what is decoded at once
OVERRIDES = [
    f"retool.agent.run={REPO}/tests/e2e/branching_agent.py:agent",
    *("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    *("trainer.save_freq=-1", "retool.recorder.token_share=1.0", "actor_rollout_ref.rollout.n=4"),
    *("data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=3"),
    "++reward.reward_kwargs.random_reward_p=0.5",  # so small a model solves nothing, and equal groups teach nothing
]


def test_episodes_of_several_rows_train(small: Path, tmp_path: Path) -> None:
    run_to_end(launch_tiny("dapo", tmp_path, small, *OVERRIDES), tmp_path / "log.txt", 900)
    metrics = dict(read_metrics(tmp_path, lambda data: "agent/rows" in data))
    assert len(metrics) == 2
    for data in metrics.values():
        assert data["agent/rows"] > 1 and data["agent/forks/history"] > 0 and data["actor/grad_norm"] > 0
    rows = {(row["uid"], row["session"]): row for row in store.rows(tmp_path) if row["trained_step"]}
    found = defaultdict(list)  # rollout and row -> its tokens
    for token in store.rows(tmp_path, "tokens"):
        found[token["uid"], token["session"], token["row"]].append(token)
    assert {key[:2] for key in found} == {*rows} and {number for *_, number in found} == {0, 1, 2}
    for (uid, session, number), tokens in found.items():
        turns = [turn for turn in rows[uid, session]["turns"] if turn["row"] == number]
        turns.sort(key=lambda turn: turn["start"])
        assert [token["turn"] for token in tokens] == [i for i, turn in enumerate(turns) for _ in range(turn["tokens"])]
        own = [turn["role"] == "model" for turn in turns]
        assert all(token["mask"] == own[token["turn"]] for token in tokens)
        written = "".join(turn["text"] for turn in turns if turn["role"] == "model")
        told = "".join(token["text"] for token in tokens if token["mask"])
        assert told.replace(UNREADABLE, "") == written.replace(UNREADABLE, "")
    # The first update has the weights that the servers had, and the second one others: no episode is in both. Step 1
    # has a learning rate of 0.
    is_exact = defaultdict(set)
    for (uid, session, _), tokens in found.items():
        if tokens[0]["step"] == 2:
            most = max(abs(token["log_prob"] - token["rollout_log_prob"]) for token in tokens if token["mask"])
            is_exact[uid, session].add(most < 1e-3)
    assert sorted(map(list, is_exact.values())) == [[False]] * 12 + [[True]] * 12
