"""The worker processes: real ones where tests check that they can be limited, killed and replaced.

A fake one shows what workers are asked, and is lost, or out of time, when a test says so.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from verl_ext.reward.maths import symbolic
from verl_ext.reward.maths.symbolic import CONTROL, CPU_S, MEMORY_BYTES, QUICK_CPU_S, SymbolicPool, TooCostly


def too_much(number: int) -> str:
    """Return sums that sympy adds up one by one; each differs, because verdicts are kept."""
    return rf"\sum_{{k=1}}^{{10^9}} \frac{{{number}}}{{k}}"


def too_much_to_solve(number: int) -> tuple[str, str]:
    return f"x^{{40}}-{number}x+1>0", r"(-\infty ,3)\cup(5,\infty )"


@pytest.fixture(scope="module")
def pool():
    pool = SymbolicPool(cpu_s=0.5)
    yield pool
    pool.close()


FAKE_WORKER = """
import json, pathlib, sys
from multiprocessing.connection import Connection

folder = pathlib.Path(__file__).parent
connection = Connection(int(sys.argv[1]))
limits = json.loads(connection.recv_bytes())
if (folder / "broken").exists():
    sys.exit(1)
connection.send_bytes(b'{"ready": true}')
while True:
    request = json.loads(connection.recv_bytes())
    with open(folder / "asked.jsonl", "a") as asked:
        asked.write(json.dumps([limits["cpu_s"], request]) + "\\n")
    rules, pred = json.loads((folder / "rules.json").read_text()), request.get("pred", "")
    if (pred or request["gold"]) in rules["lost"] or "all" in rules["lost"]:
        sys.exit(1)
    is_slow = (pred or request["gold"]) in rules["slow"]
    connection.send_bytes(json.dumps({"equal": None if is_slow else sorted(pred) == sorted(request["gold"])}).encode())
"""


class FakeWorkers:
    """A pool of workers that find answers equal if they have the same characters."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "worker.py").write_text(FAKE_WORKER)
        self.set()
        self.pool = SymbolicPool(worker=folder / "worker.py")

    def set(self, lost=(), slow=()):
        """Name the answers, or the golds by themselves, on which workers are lost ("all" of them), or out of time."""
        (self.folder / "rules.json").write_text(json.dumps({"lost": lost, "slow": slow}))

    def asked(self):
        """Return (CPU time, request) of all requests so far."""
        return [tuple(json.loads(line)) for line in (self.folder / "asked.jsonl").read_text().splitlines()]


@pytest.fixture
def fake(tmp_path):
    fake = FakeWorkers(tmp_path)
    yield fake
    fake.pool.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_nothing_starts_before_the_first_comparison():
    assert SymbolicPool().worker_pids() == []


def test_worker_is_reused(pool):
    assert pool.is_equal("x+1", "1+x") is True
    pids = pool.worker_pids()
    assert pool.is_equal("x+1", "1-x") is False
    assert pool.worker_pids() == pids


def test_what_cannot_be_parsed_is_not_equal(pool):
    assert pool.is_equal(r"\frac{1}{", "x") is False


@pytest.mark.nightly
def test_cpu_time_limit_is_the_answers_and_the_next_comparison_works(pool):
    pool.is_equal("x", "x")
    (pid, *_) = pool.worker_pids()
    (child,) = psutil.Process(pid).children()
    start = time.monotonic()
    with pytest.raises(TooCostly):
        pool.is_equal(*too_much_to_solve(1))
    assert time.monotonic() - start > 0.5
    assert not child.is_running()
    start = time.monotonic()
    assert pool.is_equal("x+1", "1+x") is True
    assert pool.worker_pids()[0] == pid and time.monotonic() - start < 0.4  # s; an import of sympy takes longer


@pytest.mark.nightly
def test_what_takes_long_does_not_hold_up_the_rest():
    """The quick lane gives both up after .1 s; both still wait for the first in the slow lane, 1.5 s."""
    pool = SymbolicPool(size=1, cpu_s=1.5)
    with ThreadPoolExecutor(2) as threads:  # both lanes have their worker
        assert all(threads.map(pool.is_equal, ["x", r"\sum_{k=1}^{16} k"], ["x", "136"]))

    def compare(pred: str, gold: str) -> None:
        with pytest.raises(TooCostly):
            pool.is_equal(pred, gold)

    slow = [threading.Thread(target=compare, args=too_much_to_solve(n)) for n in (1, 2)]
    for thread in slow:
        thread.start()
    assert all(pool.is_equal(f"x+{n}", f"{n}+x") for n in range(3))
    assert all(thread.is_alive() for thread in slow)
    for thread in slow:
        thread.join()
    pool.close()


def test_sums_do_not_enter_the_quick_lane(fake):
    fake.pool.is_equal(r"\sum_{k=1}^{16} k", "136")
    fake.pool.is_equal("136", r"\sum_{k=1}^{16} k")
    assert [cpu_s for cpu_s, _ in fake.asked()] == [CPU_S, CPU_S]


def test_what_the_quick_lane_gives_up_goes_to_the_slow_one(fake):
    fake.set(slow=["x+3"])
    with pytest.raises(TooCostly):
        fake.pool.is_equal("x+3", "3+x")
    request, gold = {"pred": "x+3", "gold": "3+x"}, {"gold": "3+x"}
    assert fake.asked() == [(QUICK_CPU_S, request), (CPU_S, request), (CPU_S, gold)]


@pytest.mark.nightly
def test_real_workers_give_the_value_of_a_sum(pool):
    assert pool.is_equal(r"\sum_{k=1}^{16} k", "136") is True
    assert pool.is_equal("136", r"\sum_{k=1}^{16} k") is True


def test_memory_of_a_worker_is_limited(pool):
    pool.is_equal("x", "x")
    for pid in pool.worker_pids():
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (MEMORY_BYTES, MEMORY_BYTES)


def test_idle_worker_that_was_killed_is_replaced(pool):
    pool.is_equal("x", "x")
    for pid in pool.worker_pids():
        os.kill(pid, signal.SIGKILL)
    assert pool.is_equal("x+1", "1+x") is True


def test_threads_share_the_workers(pool):
    verdicts = []
    threads = [
        threading.Thread(target=lambda n=n: verdicts.append(pool.is_equal(f"x+{n}", f"{n}+x"))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 8
    assert 1 <= len(pool.worker_pids()) <= 4  # two in each lane


@pytest.mark.nightly
def test_event_loop_goes_on_during_a_comparison(pool):
    async def both():
        comparison = asyncio.create_task(asyncio.to_thread(pool.is_equal, too_much(12), "3"))
        ticks = 0
        while not comparison.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert isinstance(comparison.exception(), TooCostly)
        return ticks

    assert asyncio.run(both()) > 2


@pytest.mark.nightly
def test_verdict_is_kept_for_equal_answers(pool):
    with pytest.raises(TooCostly):
        pool.is_equal(too_much(13), "3")
    start = time.monotonic()
    with pytest.raises(TooCostly):
        pool.is_equal(too_much(13), "3")
    assert time.monotonic() - start < 0.25  # s; to the limits it would take 0.6


def test_equal_answers_at_the_same_time_are_compared_once(fake):
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(fake.pool.is_equal, ["2x+14"] * 8, ["14+2x"] * 8)) == [True] * 8
    assert fake.asked() == [(QUICK_CPU_S, {"pred": "2x+14", "gold": "14+2x"})]


def test_workers_that_are_always_lost_are_no_verdict(fake):
    fake.set(lost=["all"])
    assert fake.pool.is_equal("x+15", "15+x") is None
    fake.set()
    assert fake.pool.is_equal("x+15", "15+x") is True


def test_answer_that_loses_its_workers_while_others_do_not_is_too_costly(fake):
    fake.set(lost=["x+17"])
    with pytest.raises(TooCostly, match="17"):
        fake.pool.is_equal("x+17", "17+x")
    control = dict(zip(("pred", "gold"), CONTROL, strict=True))
    assert [request for _, request in fake.asked()[-2:]] == [control, {"gold": "17+x"}]


def test_gold_that_is_slow_by_itself_leaves_it_open(fake):
    """It exhausts the limits even by itself; that is found out once, and only if an answer has exhausted them."""
    fake.set(slow=["3", "4", "y+18"])
    assert fake.pool.is_equal("18+y", "y+18") is True
    assert {"gold": "y+18"} not in [request for _, request in fake.asked()]
    assert fake.pool.is_equal("3", "y+18") is None
    assert fake.pool.is_equal("4", "y+18") is None
    assert [request for _, request in fake.asked()].count({"gold": "y+18"}) == 1


def test_sum_that_takes_too_long_leaves_it_open_if_it_is_the_gold(pool):
    gold = too_much(18)
    assert pool.is_equal("3", gold) is None
    assert pool.is_equal(gold, gold) is True  # without being added up


@pytest.mark.parametrize(
    ("pred", "gold"),
    [
        (too_much(19), r"\sqrt{x}+\binom{x}{3}"),
        (too_much_to_solve(19)[0], "x<3"),
        (too_much_to_solve(19)[0], r"(-\infty ,3)"),
        (too_much(19), r"\sum_{k=1}^{9} k"),
        (f"{too_much(19)}=y", "x+y=3"),
        (too_much(19), r"\pi"),
    ],
)
def test_ordinary_gold_is_not_slow_by_itself(pool, pred, gold):
    with pytest.raises(TooCostly):
        pool.is_equal(pred, gold)


def test_failure_to_start_a_worker_is_not_kept(fake):
    (fake.folder / "broken").touch()
    with pytest.raises(RuntimeError, match="did not start: exit status"):
        fake.pool.is_equal("x+16", "16+x")
    (fake.folder / "broken").unlink()
    assert fake.pool.is_equal("x+16", "16+x") is True


def test_close_ends_the_workers(pool):
    pool.is_equal("x", "x")
    pids = pool.worker_pids()
    pool.close()
    assert pids and not any(is_running(pid) for pid in pids)


def run_program(*lines: str) -> subprocess.CompletedProcess:
    start = [
        "import os, signal",
        "from verl_ext.reward import score_answer",
        "from verl_ext.reward.maths import symbolic",
        r"assert score_answer(r'\boxed{\sqrt{16}}', '4').acc == 1.0",
    ]
    return subprocess.run([sys.executable, "-c", "\n".join([*start, *lines])], capture_output=True, text=True)


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def test_forked_child_leaves_its_parents_workers_alone_and_none_outlives_its_parent():
    parent = run_program(
        "child = os.fork()",
        "if child == 0: os._exit(len(symbolic.POOL.worker_pids()))",
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *symbolic.POOL.worker_pids())",
    )
    of_the_child, pid = map(int, parent.stdout.split())
    assert of_the_child == 0
    assert_ends(pid)


@pytest.mark.nightly
def test_no_worker_outlives_a_parent_that_is_killed():
    parent = run_program("print(*symbolic.POOL.worker_pids(), flush=True)", "os.kill(os.getpid(), signal.SIGKILL)")
    (pid,) = map(int, parent.stdout.split())
    assert_ends(pid)


def test_broken_installation_is_our_error(monkeypatch, tmp_path):
    (tmp_path / "sympy.py").write_text("raise ImportError('sympy is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="did not start: sympy is broken"):
        SymbolicPool().is_equal("x", "x")


def test_a_start_that_takes_too_long_is_not_called_a_broken_installation(monkeypatch):
    monkeypatch.setattr(symbolic, "START_WALL_S", 0.001)
    with pytest.raises(RuntimeError, match=r"did not start: it was not ready within 0\.001 s"):
        SymbolicPool().is_equal("x", "x")
