"""DapoReplayBuffer on an in-memory TransferQueue whose prompts end as a test says, for the tests of the sampler."""

from types import SimpleNamespace

from verl_ext.episode import SUMMARY, Episode, EpisodeKey, TokenRow, ToolUse, summary_of

MAX_LOOKS = 300  # a buffer that has looked this often would wait forever


def info(
    acc, *, ok=0, errors=None, finish_reason="answer", void_turns=0, versions=(), lost=(), rows=1, agent=None, **fields
):
    """`extra_fields` of each row of an episode, as RetoolAgentLoop and RetoolRewardManager (`fields`) write it."""
    defaults = {"sandbox_failure": 0.0, "unverified": 0.0, "response_tokens": 10.0}
    reward = defaults | {"acc": float(acc), "train_acc": float(acc), "finish_reason": finish_reason} | fields
    spans = [(0, int(reward["response_tokens"]))]
    row = TokenRow(model_spans=spans, version_spans=[(*spans[0], v) for v in versions])
    use = ToolUse(ok=ok, void_turns=void_turns, errors=errors or {})
    episode = Episode(EpisodeKey("u", 0), [row] * rows, finish_reason, use, agent, lost_servers=list(lost))
    return {"reward_extra_info": reward, SUMMARY: summary_of(episode)}


MIXED, RIGHT, WRONG = [info(0), info(1)], [info(1), info(1)], [info(0), info(0)]
SANDBOX_DOWN = [info(1), info(0, sandbox_failure=1.0, finish_reason="sandbox_failure")]
UNVERIFIED = [info(1), info(0, unverified=1.0)]
VOID = [info(1, void_turns=1), info(0, void_turns=1)]
ABORTED = [info(1), info(0, finish_reason="aborted")]
SCORED_BY_OTHERS = [info(1), info(0, finish_reason="aborted")]  # a reward manager that repeats no finish_reason
del SCORED_BY_OTHERS[1]["reward_extra_info"]["finish_reason"]
RAISED = None  # a loop of the group raised: status "failure"
MODES = ["sync", "colocate_async", "separate_async"]


class FakeQueue:
    """TransferQueue's kv calls and the trainer's submissions. Each look lets every prompt in flight take one step."""

    def __init__(self, outcomes, partition="train"):
        self.outcomes, self.partition = iter(outcomes), partition
        self.tags, self.values, self.groups = {}, {}, {}
        self.submissions, self.looks, self.in_flight = [], 0, []

    def submit(self, count, global_steps=1):
        """The trainer's refill_fn."""
        self.submissions.append(count)
        for _ in range(count):
            uid = f"uid-{len(self.groups)}"
            self.groups[uid] = next(self.outcomes)
            self.tags[uid] = {"is_prompt": True, "status": "pending", "global_steps": global_steps}
            self.in_flight.append(uid)
        return count

    def kv_list(self):
        self.looks += 1
        assert self.looks < MAX_LOOKS, "the buffer waits forever"
        for uid in list(self.in_flight):
            if self.tags[uid]["status"] == "pending":
                self.tags[uid]["status"] = "running"
                continue
            self.in_flight.remove(uid)
            group = self.groups[uid]
            self.tags[uid]["status"] = "failure" if group is RAISED else "finished"
            for i, extra in enumerate(MIXED[:1] if group is RAISED else group):
                for row in range(len(extra[SUMMARY]["rows"]) if SUMMARY in extra else 1):
                    self.tags[f"{uid}_{i}_{row}"] = {"status": "success", "seq_len": 7}
                    self.values[f"{uid}_{i}_{row}"] = SimpleNamespace(data=extra)
            if (
                group is RAISED and self.partition == "train"
            ):  # as TransferQueue where a put failed: a key without data and tag
                self.tags[f"{uid}_1_0"] = {}
        return {self.partition: {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys, partition_id, select_fields=("extra_fields",)):
        assert partition_id == self.partition and list(select_fields) == ["extra_fields"]
        return {"extra_fields": [self.values[key] for key in keys]}

    def kv_batch_put(self, keys, partition_id, fields, tags):
        assert partition_id == self.partition and not set(keys) & set(self.tags)
        self.tags |= dict(zip(keys, tags, strict=True))
        self.values |= dict(zip(keys, fields["extra_fields"], strict=True))

    def kv_clear(self, partition_id, keys):
        assert partition_id == self.partition
        for key in keys:
            del self.tags[key]  # KeyError: cleared twice
            self.values.pop(key, None)


def buffer_maker(monkeypatch):
    """(queue, buffer) for the outcomes of the prompts in the order of their submission."""
    import transfer_queue
    from omegaconf import OmegaConf

    from verl_ext.trainer.sampler import DapoReplayBuffer

    def make(
        outcomes,
        *,
        batch_size,
        partition="train",
        enable=True,
        max_num_gen_batches=4,
        metric="train_acc",
        mode="sync",
        void_turn_filter=False,
        parameter_sync_step=1,
        keep_surplus=None,
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        resample=None,
        max_staleness=None,
    ):
        queue = FakeQueue(outcomes, partition)
        for name in ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
        filter_groups = {"enable": enable, "metric": metric, "max_num_gen_batches": max_num_gen_batches}
        buffer = DapoReplayBuffer(
            trainer_mode=mode,
            trainer_config=OmegaConf.create({"parameter_sync_step": parameter_sync_step}),
            max_off_policy_threshold=max_off_policy_threshold,
            max_off_policy_strategy=max_off_policy_strategy,
            sampler_kwargs=OmegaConf.create(
                {"poll_interval_s": 0.0, "filter_groups": filter_groups, "void_turn_filter": void_turn_filter}
                | {"resample": resample, "max_staleness": max_staleness}
                | ({} if keep_surplus is None else {"keep_surplus": keep_surplus})
            ),
            refill_fn=queue.submit,
        )
        queue.submit(batch_size)
        queue.submissions.clear()
        return queue, buffer

    return make


def sampled(batch):
    """Numbers of the prompts in a batch, in order of submission; checks that the groups are whole."""
    uids = [key.split("_")[0] for key in batch.keys]
    assert all(uids.count(uid) == 2 for uid in uids)
    return sorted({int(uid.removeprefix("uid-")) for uid in uids})


def group_of(*accs, failed=(), **fields):
    """Return rollouts with these accuracies; the sandbox failed those at `failed`."""
    return [info(acc, sandbox_failure=float(i in failed), **fields) for i, acc in enumerate(accs)]


def keys_of(batch, uid="uid-0"):
    return sorted(key for key in batch.keys if key.startswith(f"{uid}_"))
