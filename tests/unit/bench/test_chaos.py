"""`scripts/bench/chaos.py`: what it does to a run, and what it reads from the run afterwards."""

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace

import psutil
import pytest

from verl_ext.quickstart.supervise import CommandFailed
from verl_ext.records import store
from verl_ext.records.trajectories import cut
from verl_ext.sandbox import SandboxClient

RIGHT, WRONG = "so \\boxed{7}", "so \\boxed{8}"


@pytest.fixture(scope="module")
def script():
    from scripts.bench import chaos

    return chaos


@pytest.fixture(scope="module")
def measure(script):
    from scripts.bench import chaos_measure

    return chaos_measure


@pytest.fixture(scope="module")
def faults(script):
    from scripts.bench import chaos_faults

    return chaos_faults


def call(code="print(7)", stdout="7\n", exit_code=0, fault=None):
    return {"code": code, "stdout": stdout, "exit_code": exit_code, "fault": fault, "attempts": 1}


def rollout(uid="a", session=0, text=RIGHT, score=1.0, calls=(), trained=3, overlong=0.0, **more):
    parts = {"reward_base": score - overlong, "reward_overlong": overlong, "train_acc": (score - overlong + 1) / 2}
    row = {"uid": uid, "session": session, "validate": False, "trained_step": trained, "ground_truth": "7"}
    row |= {"turns": [{"role": "model", "text": text}, {"role": "tool", "text": "\\boxed{9}"}], "calls": list(calls)}
    return row | {"end_reason": "answer", "score": score, "reward_parts": json.dumps(parts)} | more


@pytest.fixture
def run_of(tmp_path):
    def write(*rows, ledger=(), steps=(), timeline=()):
        store.write(store.path_of(tmp_path, "trajectories", 3), "trajectories", rows)
        store.write(store.path_of(tmp_path, "timeline", 3), "timeline", timeline)
        (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in ledger))
        lines = [json.dumps({"step": step, "data": {"timing_s/step": took}}) for step, took in enumerate(steps, 1)]
        (tmp_path / "metrics-1.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return write


def test_a_reward_that_is_not_the_answers_is_found(measure, run_of):
    run = run_of(
        *(rollout("a"), rollout("b", score=-1.0), rollout("c", text=WRONG), rollout("d", text=WRONG, score=-1.0)),
        *(rollout("e", score=0.5, overlong=-0.5), rollout("f", score=-1.0, trained=None)),
        rollout("g", score=-1.0, validate=True),
    )
    rows = measure.trained_rollouts(run)
    assert [row["uid"] for row in rows] == ["a", "b", "c", "d", "e"]
    assert measure.wrong_scores(rows) == [
        "b_0: trained with the reward -1, but its answer has 1",
        "c_0: trained with the reward 1, but its answer has -1",
    ]


def test_a_rollout_that_infrastructure_failed_must_not_train(measure, run_of):
    failed = call(stdout=None, exit_code=None, fault="infrastructure")
    run = run_of(
        *(rollout("a", calls=[call(fault="model")]), rollout("b", calls=[call(), failed])),
        *(rollout("c", end_reason="verifier_unknown"), rollout("d", calls=[failed], trained=None)),
    )
    found = measure.failures_in_the_loss(measure.trained_rollouts(run))
    assert [line.partition(":")[0] for line in found] == ["b_0", "c_0"]


class FakeRun:
    """A sandbox client that answers each program from a table and notes the programs."""

    def __init__(self, answers):
        self.asked, self._answers = [], answers

    async def run(self, program, **limits):
        self.asked.append(program)
        stdout, code = self._answers[program]
        return SimpleNamespace(stdout=stdout, return_code=code)

    async def aclose(self):
        return None


def test_what_a_tool_said_is_what_its_program_says(measure, run_of, monkeypatch):
    long = "print('a' * 40_000)"
    fake = FakeRun({"print(7)": ("7\n", 0), "1/0": ("", 1), long: ("a" * 40_000, 0)})
    monkeypatch.setattr(measure, "SandboxClient", lambda urls, max_concurrency: fake)
    run = run_of(
        rollout("a", calls=[call(), call("1/0", "", 1, "model"), call(long, cut("a" * 40_000))]),
        rollout("b", calls=[call(stdout="")]),
        rollout("c", calls=[call(exit_code=-9, stdout="7\n", fault="model")]),
        rollout("d", calls=[call("lost", fault="infrastructure"), {"code": "not run", "attempts": None}]),
    )
    found = measure.wrong_answers_of_tools(measure.trained_rollouts(run), "http://127.0.0.1:1")
    assert [line.partition(":")[0] for line in found] == ["b_0", "c_0"]
    assert sorted(fake.asked) == ["1/0", long, "print(7)"], "each program once"


def record(step, drawn=(), ends=None, **more):
    drawn = {uid: f"problem of {uid}" for uid in drawn}
    return {"step": step, "drawn": drawn, "ends": ends or {}, "seen": [], "in_queue": 0} | more


def test_prompts_that_are_lost_or_doubled_are_found(measure, run_of):
    good = [record(1, "ab", {"a": "trained", "b": "equal"})]
    run = run_of(rollout("a"), ledger=good)
    assert measure.lost_and_doubled(run, measure.trained_rollouts(run), 4) == ([], [])

    bad = [*good, record(2, "ac", {"b": "equal", "c": "trained"}), record(3, "d", in_queue=1), record(3, lost=["d"])]
    run = run_of(rollout("a"), rollout("a"), ledger=bad)
    lost, doubled = measure.lost_and_doubled(run, measure.trained_rollouts(run), 5)
    assert lost == ["d was open at a checkpoint and is gone", "c trained, but the records have no rollout of it"]
    assert doubled == [
        "a was drawn twice",
        "b ended twice",
        "a_0 is in the records 2 times",
        "the problem problem of a was drawn 2 times",
    ]
    _, in_second_epoch = measure.lost_and_doubled(run, measure.trained_rollouts(run), 4)
    assert in_second_epoch == doubled[:-1]


def test_a_ledger_that_does_not_sum_is_a_loss(measure, run_of):
    run = run_of(ledger=[record(1, "ab", {"a": "equal"}, in_queue=5)])
    assert measure.lost_and_doubled(run, [], 2) == (
        ["1 prompts are open or wait with an end, but the queue held 5."],
        [],
    )


def test_a_stall_is_the_longest_time_without_progress_beyond_a_step(measure, run_of):
    """Ends at 10, 11, 14 and 25 s: 11 s without progress, 2 of them are a usual step's; the cold steps took 9 s."""
    ends = [rollout(str(s), timings={"ended_s": s}) for s in (10.0, 25.0)]
    ends += [rollout("v", timings={"ended_s": 20.0}, validate=True), rollout("n", timings={"ended_s": None})]
    timeline = [{"step": 3, "what": "update", "start_s": s - 1, "end_s": s} for s in (11.0, 14.0)]
    run = run_of(*ends, timeline=timeline, steps=[9.0, 9.0, 2.0, 2.0, 13.0])
    assert measure.stall(run) == (9.0, 2.0)


def test_the_user_is_told_what_the_log_did_not_say_before(measure):
    before = "(Worker pid=12) WARNING:2026-11-25 02:38:17,512:slow disk 3\n"
    after = "\n".join(
        [
            "(Worker pid=99) WARNING:2026-11-25 03:38:17,512:slow disk 4",
            "\x1b[36m(W pid=3)\x1b[0m WARNING:2026-11-25 03:38:18,001:a tool failed: 127.0.0.1:8080 said b'a'",
            "\x1b[36m(W pid=3)\x1b[0m WARNING:2026-11-25 03:38:19,001:a tool failed: 127.0.0.1:8081 said b'bcd'",
            "step:3 - critic/score:1",
            "(Server pid=3) ERROR 11-25 03:38:18 [core.py:9] Traceback (most recent call last):",
            "(W pid=3) WARNING:2026-11-25 03:38:18,002:step 3: only 1 of 4 groups had unequal rewards",
            "Error executing job with overrides: ['trainer.device=cpu']",
            "ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunnerV1.run() (pid=1, ip=192.0.2.2)",
            "RuntimeError: 9 of 9 groups failed. Start the sandbox.",
            "\x1b[36m(Fleet pid=3)\x1b[0m Training Progress:  21%|██   | 5/24 [00:18<01:00,  3.16s/it]INFO:server a "
            "takes the place of b",
        ]
    )
    assert measure.told(before, before + after) == [
        "a tool failed: 127.0.0.1:8080 said b'a'",
        "server a takes the place of b",
        "RuntimeError: 9 of 9 groups failed. Start the sandbox.",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "requests.exceptions.ConnectionError: refused",
        "json.decoder.JSONDecodeError: Expecting value",
        "ray.exceptions.RayTaskError(RuntimeError): lost",
        "[rank0]: RuntimeError: a",
        "httpx.ReadTimeout: timed out",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_what_an_uncaught_error_says_is_told(measure, line):
    assert measure.told("", f"fine\n{line}\n") == [line]


def test_one_event_is_no_gap(measure, run_of):
    assert measure.longest_gap(run_of(steps=[1.0, 1.0, 1.0]), [5.0]) == (0.0, 1.0)


@pytest.fixture
def sandbox(faults):
    sandbox = faults.Sandbox()
    yield sandbox
    sandbox.stop()


def ask(url, **settings):
    """The status that the client of a run would see."""

    async def run():
        client = SandboxClient([url], **{"max_attempts": 1, "queue_timeout_s": 1} | settings)
        try:
            return (await client.run("print(7)", timeout_s=2)).status
        finally:
            await client.aclose()

    return asyncio.run(run())


def scene_of(faults, run, sandbox=None, processes=()):
    scene = faults.Scene(run, run / "log.txt", sandbox, None, seed=0)
    scene.processes = lambda: list(processes)
    return scene


def beside(inject, scene):
    thread = threading.Thread(target=inject, args=(scene,))
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["sandbox_dead", "sandbox_hung", "sandbox_out_of_memory"])
def test_a_broken_sandbox_fails_and_is_well_afterwards(faults, sandbox, monkeypatch, tmp_path, name):
    monkeypatch.setattr(faults, "HOLD_S", 5.0)
    assert ask(sandbox.url) == "ok"
    thread = beside(getattr(faults, name), scene_of(faults, tmp_path, sandbox))
    while ask(sandbox.url) == "ok":
        assert thread.is_alive(), "no call failed while the sandbox was broken"
    thread.join()
    assert ask(sandbox.url, max_attempts=4, queue_timeout_s=30) == "ok"


def test_no_garbage_passes_for_an_answer(script, faults, sandbox, monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "HOLD_S", 3.0)
    scene = scene_of(faults, tmp_path)
    usual = scene.before
    with script.proxied(sandbox.url, lambda program: scene.before(program)) as url:
        assert ask(url) == "ok"
        thread = beside(faults.sandbox_garbage, scene)
        while scene.before is usual:
            assert thread.is_alive()
            time.sleep(0.01)
        assert [ask(url) for _ in faults.GARBAGE] == ["sandbox_failure"] * len(faults.GARBAGE)
        thread.join()
        assert ask(url) == "ok"


def post(url, content, timeout=5):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body), timeout=timeout) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_the_judge_scores_as_the_verifier_of_mathematics_and_can_hang(faults):
    from verl_ext.reward.verifiers.judge import PROMPT, REFERENCE

    def prompt(response):
        return PROMPT.format(rubric="r", task="t", reference=REFERENCE.format(reference="7"), response=response)

    judge = faults.Judge()
    try:
        assert post(judge.url, prompt(RIGHT)) == "Score: 1" and post(judge.url, prompt(WRONG)) == "Score: 0"
        judge.hangs.set()
        with pytest.raises(TimeoutError):
            post(judge.url, prompt(RIGHT), timeout=0.5)
        judge.hangs.clear()
        assert post(judge.url, prompt(RIGHT)) == "Score: 1"
    finally:
        judge.stop()


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_the_run_is_killed_when_a_checkpoint_is_half_there(faults, sleeper, tmp_path):
    for name in ("global_step_2", ".saving/global_step_4"):
        (tmp_path / name / "actor").mkdir(parents=True)
    (tmp_path / "global_step_2" / "actor" / "model_world_size_1_rank_0.pt").touch()
    (tmp_path / ".saving" / "global_step_4").rename(tmp_path / "later")
    thread = beside(faults.learner_killed, scene_of(faults, tmp_path, processes=[sleeper]))
    time.sleep(0.2)
    (tmp_path / "later").rename(tmp_path / ".saving" / "global_step_4")
    time.sleep(0.2)
    assert thread.is_alive() and sleeper.is_running(), "the folder alone is no shard"
    (tmp_path / ".saving" / "global_step_4" / "actor" / "model_world_size_1_rank_0.pt").touch()
    thread.join(5)
    assert psutil.wait_procs([sleeper], timeout=5)[0]


def test_an_engine_is_hit_and_nothing_else(faults, sleeper, tmp_path):
    log = f"(EngineCore_DP0 pid={sleeper.pid}) WARNING\n(EngineCore pid=1) x\n(Worker pid={psutil.Process().pid}) y\n"
    (tmp_path / "log.txt").write_text(log)
    faults.engine_stopped(scene_of(faults, tmp_path, processes=[psutil.Process(), sleeper]))
    deadline = time.monotonic() + 5
    while sleeper.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, sleeper.status()
        time.sleep(0.01)
    with pytest.raises(faults.Missed, match="names no process of the run that is an engine"):
        faults.engine_killed(scene_of(faults, tmp_path, processes=[psutil.Process()]))


@pytest.mark.parametrize("folder", ["run", "notes"])
def test_a_run_has_a_step_when_it_has_logged_it(script, faults, tmp_path, folder):
    scene = scene_of(faults, tmp_path / "run")
    assert not script.has_step(scene, 2)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "metrics-1.jsonl").write_text('{"step": 1, "data": {}}\n{"step":23, "data": {"a": 2}}\n')
    assert script.has_step(scene, 23) and not script.has_step(scene, 2)


def starts(failures):
    """Starts of a run, of which a given number fail."""
    left = iter([CommandFailed("ended with status 1")] * failures)

    def start(watch):
        watch()
        if error := next(left, None):
            raise error

    return start


@pytest.mark.parametrize(
    ("failures", "ends"),
    [(0, "yes"), (1, "yes, started 1 time more"), (2, "yes, started 2 times more"), (3, "no: failed 3 times")],
)
def test_a_run_that_fails_is_started_again(script, faults, tmp_path, monkeypatch, failures, ends):
    monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
    injection = SimpleNamespace(log_bytes=1, join=lambda: None)
    scene = scene_of(faults, tmp_path)
    assert script.run_to_its_end(starts(failures), scene, injection)["ends"] == ends
    assert scene.ended.is_set()


def test_a_fault_that_breaks_off_has_missed(script, faults, tmp_path):
    (tmp_path / "metrics-1.jsonl").write_text('{"step": 2}\n')
    (tmp_path / "log.txt").touch()
    injection = script.Injection(faults.Fault(lambda scene: 1 / 0), scene_of(faults, tmp_path))
    injection.run()
    assert injection.missed == "ZeroDivisionError('division by zero')"


def test_a_run_that_fails_by_itself_is_no_result(script, faults, tmp_path):
    with pytest.raises(CommandFailed):
        script.run_to_its_end(starts(1), scene_of(faults, tmp_path), SimpleNamespace(log_bytes=None))


def test_a_run_that_does_not_end_is_ended(script, faults, tmp_path):
    scene, injection = scene_of(faults, tmp_path), SimpleNamespace(log_bytes=1)
    result = script.run_to_its_end(starts(0), scene, injection, limit_s=-1.0)
    assert result["ends"] == "no: not within -1 s"


RESULT = {"ends": "yes", "trained": 640, "wrong": 0, "lost": 0, "doubled": 1, "excluded": {"sandbox_failure": 12}}
RESULT |= {"stall_s": 1.5, "step_s": 2.0, "fault_s": 15.2, "told": ["a tool `failed` | again"]}


def test_a_folder_that_another_process_writes_is_not_emptied(script, faults, tmp_path, monkeypatch):
    """If the script was killed, its run lives on. The next script also holds the lock, and so does what it starts."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics-1.jsonl").write_text("{}")
    measured = (script.SIDES["ours"], faults.FAULTS["sandbox dead"], tmp_path, tmp_path, 0)
    with script.lock_folder(tmp_path), pytest.raises(SystemExit, match="Another run writes into"):
        script.measure(*measured)
    assert (tmp_path / "run" / "metrics-1.jsonl").is_file()
    locks = []

    def supervisor(lock):
        locks.append(lock.closed)
        raise CommandFailed("no run")

    monkeypatch.setattr(script, "Supervisor", supervisor)
    with pytest.raises(CommandFailed):
        script.measure(*measured)
    assert locks == [False] and not list((tmp_path / "run").iterdir())


def test_a_result_is_of_the_overrides_and_steps_of_its_fault(script, faults, tmp_path, monkeypatch, capsys):
    measured = []

    def measure(side, fault, *_):
        measured.append(fault)
        return RESULT

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "find_source", lambda folder: SimpleNamespace(digests={}))
    monkeypatch.setattr(script, "make_sft", lambda source: None)
    command = ["--only", "sandbox dead", "--out", str(tmp_path)]
    script.main(command)
    script.main(command)
    assert len(measured) == 1 and "| sandbox dead of 15.2 s | yes | 640, 0 |" in capsys.readouterr().out
    for fault in (measured[0]._replace(steps=99), measured[0]._replace(overrides=("objective=grpo",))):
        monkeypatch.setitem(faults.FAULTS, "sandbox dead", fault)
        with pytest.raises(SystemExit, match="sandbox dead was made with other settings"):
            script.main(command)


def test_the_table_says_what_was_found_and_what_was_not_run(script):
    lines = script.table(
        ["sandbox dead", "disk full", "engine killed"], {"sandbox dead": RESULT}, {"disk full": "no root"}
    )
    assert lines.splitlines()[2:] == [
        "| sandbox dead of 15.2 s | yes | 640, 0 | 0, 1 | 12 sandbox_failure | 1.5 s (a step: 2 s) "
        "| `a tool failed / again` |",
        "| disk full | not run: no root | - | - | - | - | - |",
        "| engine killed | not run | - | - | - | - | - |",
    ]


def test_the_quick_faults_are_five_of_all(faults):
    assert len(faults.QUICK) == 5 and set(faults.QUICK) < set(faults.FAULTS)
