"""A table of domains and a curriculum in verl's trainers: what is drawn, submitted, refused, and resumed."""

import copy
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.trainer.conftest import MODES, ON
from verl_ext.events import Drawn, Ended, Observer

ROOT = Path(__file__).parents[3]
TABLE = ["retool.domains.math.weight=3", "retool.domains.chat.weight=1", "retool.domains.exam.weight=0"]
CURRICULUM = ["retool.curriculum.enable=true", "retool.curriculum.easy_share=0"]


class Draws(Observer):
    def __init__(self):
        self.events = []

    def on_drawn(self, event: Drawn) -> None:
        self.events.append(event)

    @property
    def domains(self) -> Counter:
        return Counter(name for event in self.events for name in event.domains.values())


@pytest.fixture
def load(make, submitted, tokenizer, tmp_path, monkeypatch):
    """Let the real trainer load real files; return it with all that it draws. Arguments: `data_source` of the rows."""
    monkeypatch.chdir(ROOT)  # from which the YAML of the agent loops is named

    def load(*overrides, train=("math",) * 6 + ("chat",) * 3 + ("exam",), val=("math", "exam"), mode="sync"):
        for split, sources in (("train", train), ("val", val)):
            rows = [
                {"prompt": [{"role": "user", "content": f"{i}+1?"}], "data_source": source, "extra_info": {"index": i}}
                | {"reward_model": {"ground_truth": str(i + 1)}}
                for i, source in enumerate(sources)
            ]
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        files = [f"data.{split}_files={tmp_path}/{split}.parquet" for split in ("train", "val")]
        batch = [] if mode == "separate_async" else ["data.train_batch_size=8"]
        trainer, _ = make(*files, *batch, *overrides, mode=mode)
        trainer.tokenizer, trainer.processor, trainer.global_steps = tokenizer, None, 1
        trainer._init_dataloader()
        trainer.agent_loop_manager = submitted.manager
        draws = Draws()
        trainer.observers.add(draws)
        return trainer, draws

    return load


@pytest.mark.parametrize("mode", MODES)
def test_prompts_are_drawn_by_weight_from_every_path_of_the_trainer(load, mode):
    trainer, draws = load(*TABLE, mode=mode)
    size = trainer.config.data.train_batch_size
    trainer._add_batch_to_generate()
    assert draws.domains == {"math": size * 3 // 4, "chat": size // 4}
    trainer._add_prompts_to_generate(4)
    trainer._add_prompts_to_generate(4)  # as the sampler asks for more
    assert draws.domains == {"math": size * 3 // 4 + 6, "chat": size // 4 + 2}
    (first, *_) = draws.events
    of = trainer.replay_buffer.domains
    assert {uid: of.of(uid) for uid in first.prompts} == dict(first.domains)


def test_a_domain_may_have_a_number_of_responses_of_its_own(load, submitted):
    trainer, draws = load(*TABLE, "retool.domains.chat.n=4")
    assert trainer._get_required_batch_multiple(1) == 1  # micro-batches of whole groups are not asked for
    trainer._add_batch_to_generate()
    (event,) = draws.events
    sizes = {(name, size) for name, size in zip(event.domains.values(), event.sizes, strict=True)}
    assert sizes == {("math", 8), ("chat", 4)} and Counter(submitted.numbers) == {8: 6, 4: 2}


def test_without_a_table_nothing_is_drawn_otherwise(load, submitted):
    from torchdata.stateful_dataloader import StatefulDataLoader

    trainer, draws = load()
    assert type(trainer.train_dataloader) is StatefulDataLoader
    trainer._add_batch_to_generate()
    assert draws.events[0].domains == {} and submitted.numbers == [None] * 8


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_resumed_run_continues_each_domains_order_and_quota(load, mode):
    trainer, draws = load(*TABLE, mode=mode)
    trainer._add_batch_to_generate()
    trainer.replay_buffer.domains.settle({"math": 8})
    state = copy.deepcopy(trainer.train_dataloader.state_dict())
    resumed, redrawn = load(*TABLE, mode=mode)
    resumed.train_dataloader.load_state_dict(state)
    assert resumed.replay_buffer.domains.wanted(8) == {"math": 4, "chat": 4}
    for each in (trainer, resumed):
        each.replay_buffer.domains.in_queue.clear()
        each._add_batch_to_generate()
    assert [*draws.events[-1].prompts.values()] == [*redrawn.events[-1].prompts.values()]


def test_a_run_whose_table_was_removed_begins_its_data_anew(load, monkeypatch, caplog):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, _ = load(*TABLE)
    plain, draws = load()
    of_domains, of_verl = trainer.train_dataloader.state_dict(), plain.train_dataloader.state_dict()
    cases = ((plain, of_domains, True), (plain, of_verl, False), (trainer, of_domains, False))
    for resumed, state, told in cases:
        caplog.clear()
        load_checkpoint = lambda self, state=state: self.train_dataloader.load_state_dict(state)  # noqa: E731
        monkeypatch.setattr(PPOTrainer, "_setup", load_checkpoint)  # the rest of it starts a cluster
        resumed._setup()
        assert ("is of a run with domains or a curriculum, which this run has not" in caplog.text) is told
        resumed._add_batch_to_generate()
    assert len(draws.events) == 2


def test_a_resumed_run_knows_the_domains_of_the_prompts_in_the_queue(make, monkeypatch):
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    trainer, _ = make(*TABLE, mode="colocate_async", resume_at=2, steps=2)
    waiting = {"a": "math", "b": "chat", "c": "math"}
    tags = {uid: {"is_prompt": True, "status": "running", "global_steps": 2} for uid in waiting}
    monkeypatch.setattr(tq, "kv_list", lambda: {"train": tags})
    get = lambda keys, partition_id, select_fields: tu.get_tensordict(  # noqa: E731
        {name: [waiting[key] for key in keys] for name in select_fields}
    )
    monkeypatch.setattr(tq, "kv_batch_get", get)
    trainer.fit(None)
    assert trainer.replay_buffer.domains.in_queue == waiting


def test_a_curriculum_needs_no_table(load):
    """What the first epoch solved is not drawn in the second."""
    trainer, draws = load(*CURRICULUM, train=("math",) * 8)
    trainer._add_batch_to_generate()
    uids = list(draws.events[0].prompts)
    told = trainer.observers.tell(Ended(1, accs={uid: [1.0, float(i > 0)] for i, uid in enumerate(uids)}))
    assert (told["curriculum/easy"], told["curriculum/middle"], told["curriculum/untried"]) == (7, 1, 0)
    trainer._add_prompts_to_generate(2)
    (only,) = set(draws.events[-1].prompts.values())
    assert only == draws.events[0].prompts[uids[0]] and draws.events[-1].domains == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [ON["adaptive_n"], "retool.domains.math.n=4"],
            "also gives a number n to math. Set retool.adaptive_n.enable=f",
        ),
        (["retool.domains.math.n=4", "algorithm.adv_estimator=rloo"], "n of retool.domains needs GRPO's baselines"),
        (["trainer.v1.sampler.custom_sampler.path=null"], "need a sampler that counts by domain; got ReplayBuffer"),
        (
            ["retool.domains.math.max_staleness=1", "trainer.v1.sampler.sampler_kwargs.resample=paper"],
            "retool.domains gives math a max_staleness, and sampler_kwargs.resample is paper",
        ),
    ],
)
def test_a_table_that_the_run_cannot_have_is_refused_at_its_start(make, overrides, message):
    with pytest.raises(ValueError, match=message):
        make(*TABLE, *overrides)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": ("math", "chat", "poem")}, r"data.train_files has rows .* does not name: 'poem' \(1 rows\)"),
        ({"val": ("math", "poem", "poem")}, r"data.val_files has rows .* does not name: 'poem' \(2 rows\)"),
        ({"train": ("math",) * 8}, "gives chat a weight, but data.train_files has no row with that data_source"),
    ],
)
def test_rows_and_table_must_fit(load, rows, message):
    with pytest.raises(ValueError, match=message):
        load(*TABLE, **rows)


def test_prompts_are_drawn_one_at_a_time(load):
    settings = ["algorithm.filter_groups.enable=false", "trainer.v1.sampler.sync_refill_failed_groups=false"]
    with pytest.raises(ValueError, match="draw prompts one at a time, but verl would take 8 at once. Set data.gen_"):
        load(*TABLE, *settings)
    load(*TABLE, *settings, "data.gen_batch_size=1")


def test_the_ledger_counts_by_domain(load, tmp_path):
    from verl_ext.ledger.prompts import read_tally
    from verl_ext.outcome import PromptEnd

    trainer, draws = load(*TABLE)
    trainer._add_batch_to_generate()
    ended = next(uid for uid, name in draws.events[0].domains.items() if name == "chat")
    fates = {ended: {"failed/aborted": 8}}
    trainer.observers.tell(Ended(1, prompts={ended: PromptEnd.FAILED}, fates=fates, in_queue=7))
    tally = read_tally(tmp_path)
    assert tally.ends_by_domain() == {"math": {"open": 6}, "chat": {"failed": 1, "open": 1}}
    assert "chat: 1 failed, 1 open" in tally.table() or "chat: 1 open, 1 failed" in tally.table()
