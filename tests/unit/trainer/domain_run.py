"""A run of several domains without a model: the real sampler and loader, on prompts that end as each domain says."""

import copy
import random
from collections import Counter
from dataclasses import dataclass

from tests.unit.trainer.prompt_groups import RAISED, FakeQueue, buffer_maker, info

UNJUDGED = [info(1, unverified=1.0), info(0, unverified=1.0)]


@dataclass
class Like:
    """How a domain's prompts end."""

    keep: float = 1.0  # share of useful groups; the others are all right
    looks: int = 1  # of the sampler at the queue before a group ends
    is_down: bool = False  # its judge fails
    is_broken: bool = False  # its environment has a bug
    versions: tuple[int, ...] = ()  # of the weights that write its rollouts


class DomainQueue(FakeQueue):
    """The queue, and the trainer that draws its prompts from the loader."""

    def __init__(self, likes):
        super().__init__(())
        self.likes, self.left, self.rng, self.step = likes, {}, random.Random(0), 1
        self.loader = None
        self.drawn = []  # row of each prompt

    def submit(self, count, global_steps=None):
        self.submissions.append(count)
        for _ in range(count):
            row, uid = next(self.loader)["row"], f"uid-{len(self.drawn)}"
            self.loader.name(uid)
            self.drawn.append(row)
            self.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": self.step}
            like = self.likes[row["data_source"]]
            accs = (0, 1) if self.rng.random() < like.keep else (1, 1)
            self.groups[uid] = [info(acc, versions=like.versions) for acc in accs]
            self.left[uid] = like.looks
            self.in_flight.append(uid)
        return count

    def kv_list(self):
        """Let each prompt in flight take a step; those that have taken all of theirs end."""
        everyone = self.in_flight
        for uid in everyone:
            self.left[uid] -= 1
            if self.likes[self.source(uid)].is_down:
                self.groups[uid] = UNJUDGED
            if self.likes[self.source(uid)].is_broken:
                self.groups[uid] = RAISED
        self.in_flight = [uid for uid in everyone if self.left[uid] <= 0]
        listed = super().kv_list()
        self.in_flight = [uid for uid in everyone if self.left[uid] > 0]
        return listed

    def source(self, uid):
        return self.drawn[int(uid.removeprefix("uid-"))]["data_source"]

    def end_process(self, keeps_queue):
        """Let the trainer's process end: what runs begins anew, or nothing is left of it in the mode `sync`."""
        if not keeps_queue:
            self.tags, self.values, self.in_flight = {}, {}, []
        self.left |= {uid: self.likes[self.source(uid)].looks for uid in self.in_flight}


class Run:
    """`step` takes the batch of a step and returns its groups by domain.

    Args:
        likes: domain -> how it ends.
        weights: domain -> weight.
        warmup: batches that are submitted before the first step of an asynchronous mode.
        others: of the sampler.
    """

    def __init__(self, monkeypatch, likes, weights, batch_size, mode="sync", warmup=1, max_staleness=None, **others):
        self.weights, self.batch_size, self.mode, self.max_staleness = weights, batch_size, mode, max_staleness
        self.queue, self.others, self.monkeypatch = DomainQueue(likes), others, monkeypatch
        self.start()
        if mode != "sync":
            self.queue.submit(warmup * batch_size)

    def start(self):
        """Begin, or resume with the queue as it is."""
        import transfer_queue

        from verl_ext.trainer.domains import Domains
        from verl_ext.trainer.loader import DomainLoader

        _, self.buffer = buffer_maker(self.monkeypatch)((), batch_size=0, mode=self.mode, **self.others)
        for name in ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear"):
            self.monkeypatch.setattr(transfer_queue, name, getattr(self.queue, name))
        self.domains = self.buffer.domains = Domains(self.weights, self.batch_size, self.max_staleness)
        self.buffer.refill_fn = self.queue.submit
        dataset = [{"data_source": name, "row": i} for name in self.weights for i in range(50)]
        self.loader = self.queue.loader = DomainLoader(
            dataset,
            lambda rows: {"row": rows[0]},
            {name: [i for i, row in enumerate(dataset) if row["data_source"] == name] for name in self.weights},
            domains=self.domains,
            choose=lambda: self.buffer.choose_domain(self.queue.step),
            seed=1,
        )

    def kill_and_resume(self):
        state = copy.deepcopy(self.loader.state_dict())
        self.queue.end_process(keeps_queue=self.mode != "sync")
        self.start()
        self.loader.load_state_dict(state)
        for uid, tag in self.queue.tags.items():
            if tag.get("is_prompt"):
                self.domains.in_queue[uid] = self.queue.source(uid)

    def step(self, number):
        self.queue.step, self.queue.looks = number, 0
        missing = self.buffer.num_to_submit(self.batch_size) if self.mode == "sync" else self.batch_size
        if missing:
            self.queue.submit(missing)
        batch, self.metrics = self.buffer.sample(number, "train", self.batch_size)
        self.buffer.take_ended(number)
        uids = {key.split("_")[0] for key in batch.keys}
        assert len(uids) == self.batch_size
        self.queue.kv_clear("train", batch.keys)
        return Counter(map(self.queue.source, uids))


def shares(taken):
    """Share of each domain in a list of batches."""
    total = sum(taken, Counter())
    return {name: number / total.total() for name, number in total.items()}
