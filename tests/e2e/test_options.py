"""Run RL on the tiny model in the real stack with all named options on; each leaves a trace in what the run writes."""

import json
import socketserver
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from tests.e2e.conftest import REPO, launch_tiny, read_metrics, run_to_end
from tests.e2e.loggers import read_tensorboard, read_wandb
from tests.e2e.test_resume import optimizer_steps
from verl_ext.episode import EpisodeKey
from verl_ext.evaluation.samples import read_samples
from verl_ext.records import store
from verl_ext.records.imported import import_dumps
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

LR = 1e-4
SAME = (  # of a sample in verl's dump and in the records
    *("prompt", "output", "ground_truth", "pred", "data_source", "end_reason", "acc", "id", "problem", "normalised"),
    *("tool_calls", "tool_errors", "tool_timeouts", "model_turns", "response_tokens", "is_truncated"),
)
OVERRIDES = [
    *("trainer.total_training_steps=12", "trainer.save_freq=4", "retool.checkpoints.keep_last=null"),
    *("data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.rollout.n=8"),
    "trainer.val_before_train=true",
    *("trainer.logger=[console,file,tensorboard,wandb]", "trainer.log_val_generations=3"),
    "++reward.reward_kwargs.random_reward_p=0.5",  # such a small model solves nothing, and equal groups teach nothing
    f"trainer.v1.sampler.custom_sampler.path={REPO}/tests/e2e/recording_sampler.py",
    "trainer.v1.sampler.custom_sampler.name=RecordingReplayBuffer",
    "++reward.reward_kwargs.length_penalty=[[10,0],[50,-0.5]]",
    "++reward.reward_kwargs.terms={few_calls: {path: tests/e2e/reward_terms.py:few_calls, weight: 0.5}}",
    "retool.adaptive_n.enable=true",
    "retool.adaptive_n.phases=[[0,6],[3,8]]",
    *("retool.adaptive_n.easy_n=4", "retool.adaptive_n.hard_n=10"),
    *("retool.validation_schedule.enable=true", "retool.validation_schedule.phases=[[0,1],[3,2]]"),
    *("retool.light_validation.enable=true", "retool.light_validation.problems=6"),
    *("retool.light_validation.n=2", "retool.light_validation.full_every=3"),
    *("retool.early_stop.enable=true", "retool.early_stop.patience=2", "retool.early_stop.min_delta=0.9"),
    *("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", f"actor_rollout_ref.actor.optim.lr={LR}"),
    *("actor_rollout_ref.actor.optim.lr_warmup_steps=2", "actor_rollout_ref.actor.optim.min_lr_ratio=0.1"),
    *("actor_rollout_ref.actor.optim.lr_decay_steps_ratio=0.75", "actor_rollout_ref.actor.optim.lr_decay_type=linear"),
]
# The options that the runs of the asynchronous modes have (test_failures.py).
EVERY_MODES = (
    *("retool.adaptive_n.enable=true", "trainer.test_freq=1", "retool.light_validation.enable=true"),
    *("retool.light_validation.problems=4", "retool.light_validation.n=2"),
)
FULL, LIGHT = {0, 3, 6}, {1, 2, 4}  # steps: every step, then even ones, and multiples of 3 in any case


@contextmanager
def counted_connections() -> Iterator[tuple[str, list[str]]]:
    """Yield (URL of a server on loopback that answers nothing, the addresses of its callers so far)."""
    callers: list[str] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            callers.append(str(self.client_address))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", callers
        server.shutdown()


def check_every_modes(out: Path, steps: int) -> None:
    """Check the pass rates of each step, and that all validations except the last one are light."""
    rates = [json.loads(line) for line in (out / "pass_rates.jsonl").read_text().splitlines()]
    assert [record["step"] for record in rates] == [*range(1, steps + 1)] and any(record["rates"] for record in rates)
    for step, data in read_metrics(out):
        kinds = {name.split("/")[0] for name in data} & {"val-light", "val-core"}
        assert kinds == {"val-core" if step == steps else "val-light"}


@pytest.fixture(scope="module")
def run(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of the run, which is started twice with the same command."""
    folder = tmp_path_factory.mktemp("options")
    data, out = folder / "data", folder / "run"
    data.mkdir()
    (data / "eval.parquet").symlink_to(small / "data" / "eval.parquet")
    problems = pd.read_parquet(small / "data" / "rl_train.parquet")
    rates = [(1.0, 0.0, None)[i % 3] for i in range(len(problems))]  # easy, hard, not known
    problems.assign(pass_rate=pd.array(rates, dtype="Float64")).to_parquet(data / "rl_train.parquet")
    with running_server() as url, counted_connections() as (wandb_url, callers):
        for start in (1, 2):
            process = launch_tiny(
                "dapo",
                out,
                small,
                *OVERRIDES,
                f"trainer.validation_data_dir={out}/validation",
                f"++trainer.v1.sampler.sampler_kwargs.record_to={out}/batches.jsonl",
                DATA_DIR=str(data),
                SANDBOX_URL=url,
                WANDB_MODE="offline",
                WANDB_BASE_URL=wandb_url,
            )
            run_to_end(process, out / "log.txt")
            (out / "log.txt").rename(out / f"log{start}.txt")
    assert callers == [], "wandb is offline and must not call its server"
    return out


def test_the_groups_have_the_sizes_of_their_phase_and_difficulty_and_their_own_baselines(run: Path) -> None:
    data = pd.read_parquet(run.parent / "data" / "rl_train.parquet")
    rate_of = dict(zip((info["index"] for info in data["extra_info"]), data["pass_rate"], strict=True))
    assert len(rate_of) == len(data)
    problem_of = {record["uid"]: record["index"] for record in store.rows(run, columns=("uid", "index"))}
    batches = [json.loads(line) for line in (run / "batches.jsonl").read_text().splitlines()]
    assert len(batches) == 6
    sizes = Counter()
    for step, batch in enumerate(batches, 1):
        groups: dict[str, dict[EpisodeKey, tuple[float, float]]] = {}
        for key, score, advantage in zip(batch["keys"], batch["scores"], batch["advantages"], strict=True):
            if not key.startswith("pad"):
                episode = EpisodeKey.parse(key).original
                groups.setdefault(episode.uid, {})[episode] = (score, advantage)
        assert len(groups) == 6
        for uid, group in groups.items():
            rate = rate_of[problem_of[uid]]
            n = (6 if step < 3 else 8) if pd.isna(rate) else {1.0: 4, 0.0: 10}[rate]
            taken = sum(key.startswith(f"{uid}_") for key in batch["keys"])
            assert taken == n, (step, uid, rate)  # also with infrastructure failures: filled to the same size
            sizes[n] += 1
            scores = pd.Series([score for score, _ in group.values()])
            expected = (scores - scores.mean()) / (scores.std() + 1e-6)
            assert [advantage for _, advantage in group.values()] == pytest.approx(list(expected), abs=1e-3)
    assert {4, 10} < set(sizes) <= {4, 6, 8, 10}


def test_a_step_has_two_updates_whatever_its_responses(run: Path) -> None:
    assert optimizer_steps(run / "global_step_6") == {12.0}
    for _, data in read_metrics(run, lambda data: "actor/lr" in data):
        assert 4 <= data["rollout_n/min"] <= data["rollout_n/mean"] <= data["rollout_n/max"] <= 10
    rates = [json.loads(line) for line in (run / "pass_rates.jsonl").read_text().splitlines()]
    assert [record["step"] for record in rates] == [1, 2, 3, 4, 5, 6] and all(record["rates"] for record in rates)


def test_validations_come_by_the_schedule_and_most_are_light(run: Path) -> None:
    found = {(file.step, file.light): len(table) for file, table in store.tables(run, columns=()) if file.validate}
    problems = len(pd.read_parquet(run.parent / "data" / "eval.parquet"))
    assert found == {(step, False): problems for step in FULL} | {(step, True): 6 * 2 for step in LIGHT}
    metrics = read_metrics(run)
    assert {step for step, data in metrics if any(name.startswith("val-core/") for name in data)} == FULL
    light = [name.split("/") for step, data in metrics if step in LIGHT for name in data]
    assert {step for step, data in metrics if any(name.startswith("val-light/") for name in data)} == LIGHT
    assert ["val-light", "acc", "mean@2"] in [[parts[0], *parts[2:]] for parts in light]


def test_the_run_stops_early_with_a_checkpoint_and_stays_stopped(run: Path) -> None:
    first, second = ((run / f"log{start}.txt").read_text(errors="replace") for start in (1, 2))
    assert "early stop: the run ends after step 6 because the mean validation accuracy has not risen" in first
    assert "early stop: ended at step 6; the last checkpoint is of step 6." in first
    assert (
        "early stop: this run ended at step 6 because" in second
        and "To continue training, set retool.early_stop.enable" in second
    )
    assert sorted(path.name for path in run.glob("global_step_*")) == ["global_step_4", "global_step_6"]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert [step for step, data in read_metrics(run, lambda data: "actor/lr" in data)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, data in read_metrics(run, lambda data: "early_stop/value" in data)] == sorted(FULL)


def test_the_learning_rate_warms_up_stays_and_decays(run: Path) -> None:
    """verl logs the next step's rate: 2 steps of warm-up from 10%, then 9 of decay to 10% from step 3 on, 10% each."""
    rates = [data["actor/lr"] for _, data in read_metrics(run, lambda data: "actor/lr" in data)]
    assert rates == pytest.approx([LR * rate for rate in (0.55, 1, 1, 0.9, 0.8, 0.7)])


def test_the_length_penalty_and_an_own_term_are_in_the_rewards(run: Path) -> None:
    rows = store.read(store.path_of(run, "trajectories", 3, validate=True)).to_pylist()
    parts = [json.loads(row["reward_parts"]) for row in rows]
    assert all(-0.5 <= each["reward_length"] <= 0 for each in parts)
    assert any(each["reward_length"] < -0.05 for each in parts)
    for row, each in zip(rows, parts, strict=True):
        own = sum(each[f"reward_{name}"] for name in ("base", "overlong", "length", "tool_bonus", "few_calls"))
        assert row["score"] == pytest.approx(own, abs=1e-5)
        assert each["reward_few_calls"] == pytest.approx(0.5 - each["tool_calls"] / 20)
    logged = [data["train/reward_few_calls"] for _, data in read_metrics(run, lambda data: "train/acc" in data)]
    assert len(logged) == 6 and all(0 < value <= 0.5 for value in logged)


def test_verls_dumps_become_the_records_that_the_run_wrote(run: Path, tmp_path: Path) -> None:
    import_dumps(run / "validation", tmp_path)
    for step in FULL:
        files = [store.path_of(folder, "trajectories", step, validate=True) for folder in (run, tmp_path)]
        recorded, imported = ({sample.uid: sample for sample in read_samples(file)} for file in files)
        assert recorded.keys() == imported.keys()
        for uid, sample in recorded.items():
            is_forged = any(role == "model" and "<interpreter>" in text for role, text in sample.turns)
            for name in {*SAME} - ({"model_turns"} if is_forged else set()):  # in a dump, such a reply looks real
                assert getattr(imported[uid], name) == getattr(sample, name), (uid, name, sample.output)
            assert imported[uid].score == pytest.approx(sample.score, abs=1e-5)


def test_tensorboard_and_offline_wandb_hold_what_the_file_logger_has(run: Path) -> None:
    expected: dict[int, dict[str, float]] = defaultdict(dict)
    for step, data in read_metrics(run):
        expected[step].update({name: value for name, value in data.items() if isinstance(value, int | float)})
    scalars, _ = read_tensorboard(run / "tensorboard")
    tracked = read_wandb(run / "wandb")
    assert set(expected) == set(scalars) == set(tracked) == FULL | LIGHT | {5}
    for step, data in expected.items():
        assert len(data) > 5
        assert {name: scalars[step].get(name) for name in data} == pytest.approx(data, rel=1e-5)
        assert {name: tracked[step].get(name) for name in data} == pytest.approx(data)


def test_validation_generations_are_in_tensorboard_and_in_offline_wandb(run: Path) -> None:
    """Three are logged per validation, also per light one; the console and the file logger have no place for them."""
    _, texts = read_tensorboard(run / "tensorboard")
    assert set(texts) == FULL | LIGHT
    for step in FULL:
        samples = read_samples(store.path_of(run, "trajectories", step, validate=True))
        assert texts[step].count("### Sample") == 3
        assert sum(f"**Output:** {sample.output}\n" in texts[step] for sample in samples) >= 3
    tables = {step: data for step, data in read_wandb(run / "wandb").items() if "val/generations/path" in data}
    assert set(tables) == FULL | LIGHT
    files = {
        path.name: json.loads(path.read_text()) for path in run.glob("wandb/offline-run-*/files/media/table/val/*")
    }
    last = files[Path(tables[6]["val/generations/path"]).name]
    assert last["columns"] == ["step", *(f"{name}_{i}" for i in (1, 2, 3) for name in ("input", "output", "score"))]
    assert [row[0] for row in last["data"]] == sorted(FULL | LIGHT)
