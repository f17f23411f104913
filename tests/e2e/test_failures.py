"""Run RL in the real stack (vLLM, TransferQueue, sandbox server) while the sandbox or the model misbehaves.

The model has had 30 steps of SFT: it calls the interpreter in one response of six, mostly wrongly, and answers nothing
right. Its rewards are therefore drawn at random, which gives groups something to learn from.
"""

import json
import random
import socket
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.conftest import REPO, launch_tiny, pipeline, read_metrics, run_to_end
from tests.e2e.gradients import check_gradient_norm
from tests.e2e.records import check_records
from tests.e2e.test_options import EVERY_MODES, check_every_modes
from tests.ports import free_port
from tests.processes import kill_tree
from verl_ext.episode import EpisodeKey
from verl_ext.ledger.prompts import read_tally
from verl_ext.outcome import PromptEnd
from verl_ext.records import store
from verl_ext.sandbox.launch import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FAILURES = ("sandbox_failure", "verifier_unknown")  # the tiny model boxes much that no verifier can compute
N = 8  # responses per prompt
PROMPTS = 8


class Run:
    """A short RL run in `out`, and what it left there."""

    def __init__(self, out: Path, small: Path, sandbox_url: str, *overrides: str, steps: int = 2):
        self.out, self.log = out, out / "log.txt"
        self.process = launch_tiny(
            "dapo",
            out,
            small,
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=-1",
            f"data.train_batch_size={PROMPTS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            f"actor_rollout_ref.rollout.n={N}",
            "++reward.reward_kwargs.random_reward_p=0.5",
            f"trainer.v1.sampler.custom_sampler.path={REPO}/tests/e2e/recording_sampler.py",
            "trainer.v1.sampler.custom_sampler.name=RecordingReplayBuffer",
            f"++trainer.v1.sampler.sampler_kwargs.record_to={out}/batches.jsonl",
            *overrides,
            SANDBOX_URL=sandbox_url,
        )

    def wait_for_step(self, step: int, timeout_s: float = 300) -> None:
        deadline = time.time() + timeout_s
        while step not in dict(self.metrics()):
            assert self.process.poll() is None and time.time() < deadline, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.02)

    def wait_for_failures(self, timeout_s: float = 120) -> None:
        """Wait until rollouts have been given up."""
        deadline = time.time() + timeout_s
        while b"a tool failed: " not in self.log.read_bytes():
            assert self.process.poll() is None and time.time() < deadline, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.1)

    def finish(self) -> "Run":
        run_to_end(self.process, self.log)
        return self

    def metrics(self) -> list[tuple[int, dict]]:
        return read_metrics(self.out)

    def total(self, name: str) -> float:
        return sum(data.get(name, 0.0) for _, data in self.metrics())

    def trajectories(self) -> list[dict]:
        return list(store.rows(self.out))

    def batches(self) -> list[dict]:
        return [json.loads(line) for line in open(self.out / "batches.jsonl")]


def check_advantages(run: Run, sizes: set[int] = frozenset({N})) -> None:
    """Check that every batch has whole groups without failed rollouts, and advantages of the valid rollouts only."""
    failed = {EpisodeKey(t["uid"], t["session"]) for t in run.trajectories() if t["end_reason"] in FAILURES}
    unequal, found = 0, set()
    for batch in run.batches():
        keys = [EpisodeKey.parse(key).original for key in batch["keys"]]
        assert not failed & set(keys)
        groups: dict[str, dict[EpisodeKey, float]] = defaultdict(dict)
        for key, score in zip(keys, batch["scores"], strict=True):
            groups[key.uid][key] = score
        found |= set(Counter(key.uid for key in keys).values())
        for key, score, advantage in zip(keys, batch["scores"], batch["advantages"], strict=True):
            valid = list(groups[key.uid].values())
            unequal += len(set(valid)) > 1
            by_hand = (score - statistics.mean(valid)) / (statistics.stdev(valid) + 1e-6)
            assert advantage == pytest.approx(by_hand, abs=1e-4)
    assert unequal, "no group has unequal rewards: nothing was tested"
    assert found == sizes


def check_shares_of_ends(run: Run) -> None:
    """Check the shares. An asynchronous step has none if every rollout ended before the batch of the previous step."""
    shares = [[v for name, v in data.items() if name.startswith("finish/")] for _, data in run.metrics()]
    assert shares[0] and all(sum(each) == pytest.approx(1.0) for each in shares if each)


def check_malformed_calls_were_answered(run: Run) -> Counter:
    kinds = Counter()
    for trajectory in run.trajectories():
        for call in trajectory["calls"]:
            kind = call["status"].removeprefix("malformed:")
            if kind != call["status"]:
                kinds[kind] += 1
                assert call["stdout"].startswith("FormatError: ") and call["fault"] == "model"
                is_last = call["turn"] == len(trajectory["turns"]) - 1
                assert not is_last or trajectory["end_reason"] in ("max_tokens", "malformed_limit"), trajectory
    return kinds


@pytest.mark.nightly
def test_a_normal_run_and_its_records(small: Path, tmp_path: Path) -> None:
    with running_server() as url:
        run = Run(tmp_path / "rl", small, url).finish()
    assert [step for step, _ in run.metrics()] == [1, 2]
    check_advantages(run)
    check_records(run)
    check_gradient_norm(run, small / "sft" / "merged")
    trajectories = run.trajectories()
    assert len(trajectories) == run.total("filter_groups/generated") * N
    for step, data in run.metrics():
        assert sum(value for name, value in data.items() if name.startswith("finish/")) == pytest.approx(1.0)
        assert data["failure/sandbox_failure"] == data["failure/aborted"] == data["failure/raised"] == 0
        assert data["actor/entropy_loss"] > 0 and "actor/entropy" not in data  # bypass_mode: what the report reads
        own = [t for t in trajectories if t["step"] == step and t["end_reason"] not in FAILURES]
        ran = [call for t in own for call in t["calls"] if call["attempts"] is not None]
        assert data["tool/calls"] == pytest.approx(len(ran) / len(own)) and ran
        assert all(call["run_s"] > 0 and call["fault"] in (None, "model") for call in ran)
    assert check_malformed_calls_were_answered(run)["unopened_tag"] > 0


def test_a_sandbox_that_is_killed_in_mid_step_costs_only_the_rollouts_that_needed_it(
    small: Path, tmp_path: Path
) -> None:
    overrides = ("algorithm.filter_groups.max_num_gen_batches=4", "retool.sandbox.queue_timeout_s=3")
    overrides += ("actor_rollout_ref.actor.optim.lr=0",)  # without a sandbox, only responses without calls teach
    port = free_port()
    with running_server(port=port) as url:
        run = Run(tmp_path / "rl", small, url, *overrides, steps=8)
        run.wait_for_step(1)
        for child in psutil.Process().children():
            if "verl_ext.sandbox.server" in " ".join(child.cmdline()):
                kill_tree(child.pid)
        run.wait_for_failures()
    with running_server(port=port):
        run.finish()

    metrics = dict(run.metrics())
    assert sorted(metrics) == [*range(1, 9)]
    check_advantages(run)
    failed = [t for t in run.trajectories() if t["end_reason"] == "sandbox_failure"]
    assert failed and run.total("failure/sandbox_failure") == len(failed)
    assert run.total("failure/groups_filled") > 0
    assert metrics[1]["failure/sandbox_failure"] == metrics[8]["failure/sandbox_failure"] == 0
    assert metrics[8]["tool/calls"] > 0
    copies = [key for batch in run.batches() for key in batch["keys"] if EpisodeKey.parse(key).copy]
    assert copies


@contextmanager
def faulty(url: str, rng: random.Random) -> Iterator[tuple[str, Counter]]:
    """Serve in front of the sandbox: answer 503, or cut the connection, at once or late, and count these faults.

    A server that never answers costs the client's time-out, 28 s: tests/unit/sandbox/test_client.py tests that.
    """
    done: Counter = Counter()
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            fault = rng.choices(["none", "503", "cut", "late"], weights=[60, 20, 16, 4])[0]
            done[fault] += 1
            if fault == "late":
                closing.wait(3)
            if fault in ("late", "cut"):
                self.close_connection = True
                self.connection.close()
                return
            if fault == "503":
                return self._answer(503, b'{"detail": "overloaded"}')
            upstream = HTTPConnection(urlsplit(url).hostname, urlsplit(url).port, timeout=60)
            upstream.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = upstream.getresponse()
            self._answer(response.status, response.read())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", done
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


@pytest.mark.nightly
def test_a_sandbox_that_fails_at_random_is_tried_again(small: Path, tmp_path: Path) -> None:
    with running_server() as url, faulty(url, random.Random(0)) as (faulty_url, done):
        run = Run(tmp_path / "rl", small, faulty_url).finish()
    assert [step for step, _ in run.metrics()] == [1, 2]
    assert done["503"] and done["cut"] and done["none"], done
    check_advantages(run)
    trajectories = run.trajectories()
    answered = [call for t in trajectories for call in t["calls"] if call["fault"] != "infrastructure"]
    assert any((call["attempts"] or 0) > 1 for call in answered)
    for turn in [turn for t in trajectories for turn in t["turns"] if turn["role"] == "tool"]:
        assert "HTTP 503" not in turn["text"] and "overloaded" not in turn["text"], "a fault never reaches the model"
    failed = [t for t in run.trajectories() if t["end_reason"] == "sandbox_failure"]
    assert run.total("failure/sandbox_failure") == len(failed)


@pytest.fixture(scope="module")
def hermes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder like `small`, with a model after 60 steps of SFT on hermes calls: most of them are broken JSON."""
    out = tmp_path_factory.mktemp("hermes")
    sft = ("trainer.total_training_steps=60", "data.retool.protocol=hermes", "data.max_length=512")
    stages = ("--stage=data", "--stage=sft", "--stage=merge")
    pipeline(out, "--prepare=--sft=4000", *stages, *(f"--sft={override}" for override in sft))  # 62 steps of 64
    return out


@pytest.mark.nightly
def test_a_model_that_writes_malformed_hermes_calls_is_answered(hermes_model: Path, tmp_path: Path) -> None:
    overrides = ("retool.protocol=hermes", "data.max_response_length=300")
    with running_server() as url:
        run = Run(tmp_path / "rl", hermes_model, url, *overrides, steps=4).finish()
    kinds = check_malformed_calls_were_answered(run)
    assert kinds["bad_json"] > 0
    for kind, count in kinds.items():
        assert run.total(f"tool/malformed/{kind}") > 0, (kind, count)
    ran = [call for t in run.trajectories() for call in t["calls"] if call["run_s"] is not None]
    assert ran and all(not call["code"].startswith("{") for call in ran), "a program, not arguments as JSON"
    check_advantages(run)


@pytest.mark.nightly
def test_the_asynchronous_trainer_takes_the_same_sampler_and_options(small: Path, tmp_path: Path) -> None:
    """Groups have 6 samples, and 8 from step 2 on; equal ones are replaced; two validations are light and one full."""
    overrides = (
        "objective=cispo",
        "trainer.v1.trainer_mode=colocate_async",
        "++reward.reward_kwargs.random_reward_p=0.15",  # of groups of 6, 38% are all wrong
        *EVERY_MODES,
        *("retool.adaptive_n.phases=[[0,6],[2,8]]", "retool.light_validation.full_every=3"),
    )
    with running_server() as url, faulty(url, random.Random(1)) as (faulty_url, _):
        run = Run(tmp_path / "rl", small, faulty_url, *overrides, steps=3).finish()
    assert [step for step, _ in run.metrics()] == [1, 2, 3]
    check_advantages(run, sizes={6, 8})
    ends = Counter(read_tally(run.out).ends.values())
    assert ends[PromptEnd.TRAINED] and ends[PromptEnd.EQUAL] and read_tally(run.out).faults() == []
    check_every_modes(run.out, steps=3)
    for _, data in run.metrics():
        assert 0 <= data.get("tool/code_ratio", 0) <= 1 and data["failure/aborted"] == 0
        assert data["actor/clipped_low"] == data["actor/dropped"] == 0 <= data["actor/clipped_high"] < 0.5  # CISPO's
    check_shares_of_ends(run)
    assert run.trajectories()


def test_rollouts_on_a_separate_server_while_the_actor_learns(small: Path, tmp_path: Path) -> None:
    """verl's mode `separate_async` runs with two mini-batches per step; weights go through shared memory. Groups have 6
    samples, not 8; a light validation runs while prompts of the next step are answered, and a full one at the end.
    """
    with running_server() as url, faulty(url, random.Random(2)) as (faulty_url, _):
        overrides = (
            "hardware=cpu_separate",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "objective=icepop",  # the trainer's old log-probs, compared with vLLM's below
            *EVERY_MODES,
            *("retool.adaptive_n.phases=[[0,6]]", "retool.light_validation.full_every=2"),
        )
        run = Run(tmp_path / "rl", small, faulty_url, *overrides).finish()
    metrics = dict(run.metrics())
    assert sorted(metrics) == [1, 2] and len(run.batches()) == 4
    check_advantages(run, sizes={6})
    assert [data["rollout_n/min"] for data in metrics.values()] == [6, 6]
    check_every_modes(run.out, steps=2)
    # Both mini-batches of step 1 come from the first weights, and so do their old log-probs, although the first has
    # changed the weights when the second is taken.
    assert metrics[1]["training/rollout_probs_diff_max"] < 1e-3 < metrics[2]["training/rollout_probs_diff_max"]
    trajectories = run.trajectories()
    versions = {version for t in trajectories for version in [span["version"] for span in t["version_spans"]]}
    assert versions in ({0, 1}, {0, 1, 2}), "the new weights came, and every token has a version"
    assert metrics[1]["staleness/max"] == 0 and metrics[2]["staleness/max"] <= 1
    assert read_tally(run.out).faults() == []
    failed = [t for t in trajectories if t["end_reason"] == "sandbox_failure"]
    assert run.total("failure/sandbox_failure") <= len(failed)  # some may end when the last batch has been taken
    for data in metrics.values():
        assert data["failure/aborted"] == 0  # what a weight sync interrupts continues
        assert 0 <= data["actor/clipped_low"] <= data["actor/pg_clipfrac"] < 1  # shares, and of both mini-batches
        assert not any(name.startswith("actor/sum/") for name in data)
    check_shares_of_ends(run)
    deadline = time.time() + 60  # a test in parallel may have weights there for moments
    while left := list(Path("/dev/shm").glob("retool_weights_*")):
        assert time.time() < deadline, left
        time.sleep(0.1)


@pytest.mark.nightly
def test_a_validation_with_a_dead_sandbox_moves_nothing(small: Path, tmp_path: Path) -> None:
    """No call is answered, and early stop would end the run at the second validation, because nothing gets better.

    The model calls the interpreter in one response of six, so that its share of failed samples is small.
    """
    overrides = (
        *("trainer.val_before_train=true", "trainer.test_freq=1", "trainer.save_freq=1"),
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        *("retool.checkpoints.keep_last=1", "retool.checkpoints.best_metric=val-core/*/acc/mean@*"),
        *("retool.early_stop.enable=true", "retool.early_stop.patience=1", "retool.early_stop.min_delta=0.9"),
        *("retool.validation.retries=1", "retool.validation.max_failed_share=0.02"),
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens on this port
        run = Run(tmp_path / "rl", small, f"http://127.0.0.1:{closed.getsockname()[1]}", *overrides, steps=1).finish()
    metrics = dict(run.metrics())
    assert sorted(metrics) == [0, 1]
    for data in metrics.values():
        assert data["val-aux/failed/void"] == 1.0
        assert data["val-aux/failed/share"] >= data["val-aux/failed/sandbox_failure"] > 0
        assert not any(name.startswith(("val-core/", "early_stop/")) for name in data)
    assert not (run.out / "validation.json").exists() and not (run.out / "early_stop.jsonl").exists()
    log = run.log.read_text(errors="replace")
    assert "this validation is void" in log and "a tool failed; calling it again (1 of 1)" in log
    assert metrics[1]["failure/run_share_sandbox_failure"] > 0
    assert ("sandbox_failure kept" in log) >= (metrics[1]["failure/share_sandbox_failure"] > 0.05)

    with running_server() as url:  # the same run continues with a sandbox: its validations count, and stop it
        run = Run(tmp_path / "rl", small, url, *overrides[:-1], steps=9).finish()
    later = dict(run.metrics())
    assert max(later) == 2  # validated at 1, where it was resumed, and at 2, without progress
    assert later[2]["val-aux/failed/void"] == 0.0 and "early_stop/value" in later[2]
    assert json.loads((run.out / "validation.json").read_text())["values"].keys() == {"1", "2"}


@pytest.mark.nightly
def test_a_batch_of_fillers_trains_nothing(small: Path, tmp_path: Path) -> None:
    """All answers are right, by decree; only length penalties make the rewards differ."""
    overrides = (
        "++reward.reward_kwargs.random_reward_p=1.0",
        "++reward.reward_kwargs.length_penalty=[[10,0],[90,-0.5]]",
    )
    with running_server() as url:
        run = Run(tmp_path / "rl", small, url, *overrides).finish()
    for _, data in run.metrics():
        assert data["filter_groups/filled_with_equal"] == PROMPTS
        assert data["critic/rewards/max"] > data["critic/rewards/min"]
        assert data["critic/advantages/max"] == data["critic/advantages/min"] == data["actor/grad_norm"] == 0.0


@pytest.mark.nightly
def test_surplus_groups_of_a_step_are_trained_on_in_the_next(small: Path, tmp_path: Path) -> None:
    """One reward in ten is right: 43% of the groups of 8 are all wrong, so more are sampled than are needed."""
    overrides = (
        "++reward.reward_kwargs.random_reward_p=0.1",
        "trainer.v1.sampler.sampler_kwargs.keep_surplus=true",
        "algorithm.filter_groups.max_num_gen_batches=4",
    )
    with running_server() as url:
        run = Run(tmp_path / "rl", small, url, *overrides, steps=5).finish()
    metrics, batches = dict(run.metrics()), run.batches()
    born = {t["uid"]: t["step"] for t in run.trajectories()}
    trained = [{key.split("_")[0] for key in batch["keys"]} for batch in batches]
    assert len(set.union(*trained)) == 5 * PROMPTS  # each group once
    kept = 0
    for step in range(1, 6):
        older = [uid for uid in trained[step - 1] if born[uid] < step]
        assert metrics[step]["staleness/max"] == bool(kept)
        assert len(older) == kept and metrics[step]["filter_groups/generated"] == list(born.values()).count(step)
        kept = metrics[step]["filter_groups/kept"]
        assert kept == metrics[step]["filter_groups/surplus"]
    assert sum(data["filter_groups/kept"] for data in metrics.values()) > 0
    assert read_tally(run.out).faults() == []
    check_advantages(run)
