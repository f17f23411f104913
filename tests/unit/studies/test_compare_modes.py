"""`compare_modes`: order of the runs, what they took, the table; and the slow sandbox before them."""

import json
import math
import shutil
import statistics
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_ext.checkpoints.manifest import vouch
from verl_ext.fleet import balancer, health, modes, weight_update
from verl_ext.quickstart.rungs import RUNGS
from verl_ext.records import store
from verl_ext.runs.machine import environment
from verl_ext.settings import compose_run

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script():
    from scripts.studies import compare_modes

    return compare_modes


@pytest.fixture(autouse=True)
def quickstart(script, monkeypatch):
    """Each folder has its own SFT."""
    monkeypatch.setattr(script, "find_source", lambda folder: SimpleNamespace(digests={"sft": folder.name}))


@pytest.fixture
def sandbox():
    """Answers with the program that it received; `seen` has the time of each call."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = 503 if body["code"] == "busy" else 200
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f"{self.path} {body['code']}".encode())

        def log_message(self, *args):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def post(url, code):
    request = urllib.request.Request(f"{url}/run_code", json.dumps({"code": code}).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_delays_are_log_normal_and_depend_on_the_call_alone(script):
    from scripts.studies.slow_sandbox import delay_s

    drawn = [math.log(delay_s(2.0, 0, f"print({i})", 0)) for i in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(math.log(2) - 0.5, abs=0.05)
    assert statistics.stdev(drawn) == pytest.approx(1.0, abs=0.04)
    assert delay_s(2.0, 0, "a", 0) == delay_s(2.0, 0, "a", 0) == pytest.approx(4 * delay_s(0.5, 0, "a", 0))
    assert len({delay_s(2.0, *call) for call in ((0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1))}) == 4
    assert delay_s(0.0, 0, "a", 0) == 0.0


def test_the_proxy_hands_on_calls_and_answers(script, sandbox):
    with script.slow_sandbox(sandbox, mean_s=0.0, seed=0) as url, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: post(url, f"p{i}"), range(16)))
        assert answers == [(200, f"/run_code p{i}") for i in range(16)]
        assert post(url, "busy") == (503, "/run_code busy")


def test_the_proxy_says_that_nothing_is_behind_it(script):
    with script.slow_sandbox("http://127.0.0.1:1", mean_s=0.0, seed=0) as url:
        status, text = post(url, "p")
    assert status == 502 and "refused" in text


def test_calls_are_held_back_side_by_side(script, sandbox, monkeypatch):
    from scripts.studies import slow_sandbox

    barrier = threading.Barrier(8, timeout=5)
    monkeypatch.setattr(slow_sandbox.time, "sleep", lambda seconds: barrier.wait())  # passes once all eight are there
    with script.slow_sandbox(sandbox, mean_s=1.0, seed=0) as url, ThreadPoolExecutor(8) as pool:
        assert {status for status, _ in pool.map(lambda i: post(url, f"p{i}"), range(8))} == {200}


def test_modes_take_turns(script):
    cells = list(script.cells_of([0.5, 2.0], ["sync", "separate_async"], 2))
    assert list(map(str, cells)) == [
        *("sync_0.5s_0", "separate_async_0.5s_0", "sync_2s_0", "separate_async_2s_0"),
        *("sync_0.5s_1", "separate_async_0.5s_1", "sync_2s_1", "separate_async_2s_1"),
    ]


@pytest.fixture
def run(tmp_path):
    """Groups a (2 x 10 tokens) and b (2 x 30), drawn in step 1; a trained in step 3, b in 4; c is equal."""

    def row(uid, tokens, seconds, calls=1):
        ran = [{"status": "ok"}] * calls + [{"status": "not_run"}]
        times = {"generate_s": 0.5, "tool_s": seconds}
        return {"uid": uid, "validate": False, "timings": times, "model_tokens": tokens, "acc": 0.5, "calls": ran}

    groups = [row("a", 10, 1.0), row("a", 10, 2.5), row("b", 30, 9.0), row("b", 30, 1.0), row("c", 7, 1.0)]
    rows = [*groups, row("v", 99, 1.0) | {"validate": True}]
    store.write(store.path_of(tmp_path, "trajectories", 4), "trajectories", rows)
    records = [
        {"step": 1, "drawn": {"a": "p", "b": "q", "c": "r"}, "ends": {"c": "equal"}},
        {"step": 3, "drawn": {}, "ends": {"a": "trained"}},
        {"step": 4, "drawn": {}, "ends": {"b": "trained"}},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    steps = [{"step": step, "data": {"timing_s/step": 2.0}} for step in range(1, 5)]
    steps[-1]["data"]["val-core/tiny_tools/acc/mean@4"] = 0.75
    (tmp_path / "metrics-1.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in steps))
    return tmp_path


def test_trained_tokens_per_second_are_of_warm_steps(script, run):
    assert script.tokens_per_s(run) == (20 + 60) / (2 + 2)  # steps 3 and 4; steps 1 and 2 are cold


def test_a_group_that_the_records_lack_is_named(script, run):
    line = {"step": 4, "drawn": {}, "ends": {"d": "trained"}}
    with open(run / "prompts.jsonl", "a") as ledger:
        ledger.write(f"{json.dumps(line)}\n")
    with pytest.raises(ValueError, match="the records lack 1 of 3 groups that were trained on, first d of step 4"):
        script.tokens_per_s(run)


def test_a_rollout_that_raised_is_in_no_mean(script, run):
    row = {"uid": "c", "validate": False, "timings": {"started_s": 1.0}}
    store.write(store.path_of(run, "trajectories", 5), "trajectories", [row, row | {"uid": "e"}])
    groups = script.read_groups(run)
    assert set(groups) == {"a", "b", "c"} and groups["c"].tokens == 7


def test_a_run_is_done_with_the_accuracy_of_its_last_step(script, run, tmp_path):
    assert script.is_done(run, 4) and not script.is_done(run, 5) and not script.is_done(tmp_path / "none", 4)


def test_what_was_taken_stands_next_to_what_was_drawn(script, run):
    row = script.taken_table(run).splitlines()[2]
    assert row == "| 1-5 | 4.67, 6.25 | 15.67, 20.00 | 1.00, 1.00 | 0.50, 0.50 | 2.50 |"  # latencies 3, 9.5, 1.5


def test_steps_that_took_no_group_have_dashes_and_a_run_that_trained_on_none_is_named(script, run):
    record = {"step": 9, "drawn": {"z": "p"}, "ends": {"z": "trained"}}
    with open(run / "prompts.jsonl", "a") as ledger:
        ledger.write(f"{json.dumps(record)}\n")
    assert script.taken_table(run).splitlines()[3] == "| 6-10 | -, - | -, - | -, - | -, - | 0.00 |"
    (run / "prompts.jsonl").write_text('{"step": 1, "drawn": {"a": "p"}, "ends": {"a": "equal"}}\n')
    with pytest.raises(ValueError, match="trained on no group"):
        script.taken_table(run)


def test_the_table_is_shown_of_the_quickstarts_folder_and_what_is_none_is_named(script, run, tmp_path, capsys):
    whole = tmp_path.with_name(f"{tmp_path.name}_whole")
    whole.mkdir()
    run.rename(whole / "rl")
    script.main(["--show", str(whole)])
    assert "| 1-5 | 4.67, 6.25 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="No run at"):
        script.main(["--show", str(whole / "misspelt")])
    shutil.rmtree(whole / "rl" / "records")
    with pytest.raises(SystemExit, match="has no records of training rollouts"):
        script.main(["--show", str(whole)])


def test_the_table_compares_runs_of_one_seed(script):
    """Of two seeds the interval is 12.706 s / sqrt 2, where s = |a - b| / sqrt 2: 6.353 |a - b|.

    speed       separate_async 165 / 100 and 150 / 120 = 1.65, 1.25: 1.45, interval 6.353 x .4
    accuracy    .85 - .90 and .90 - .92 = -.05, -.02: -.035, interval 6.353 x .03
    """
    found = {
        script.Cell("sync", 0.5, 0): (100.0, 0.90),
        script.Cell("sync", 0.5, 1): (120.0, 0.92),
        script.Cell("separate_async", 0.5, 0): (165.0, 0.85),
        script.Cell("separate_async", 0.5, 1): (150.0, 0.90),
        script.Cell("separate_async", 2.0, 0): (50.0, 0.9),
        script.Cell("separate_async", 2.0, 1): (40.0, 0.9),
        script.Cell("separate_async_actor", 2.0, 1): (40.0, 0.9),
        script.Cell("separate_async_keep", 2.0, 1): (50.0, 0.8),
    }
    speed, accuracy = "x1.45 ± 2.54", "-0.035 ± 0.191"
    assert script.mode_table(found, [0.5, 2.0]).splitlines()[2:] == [
        "| 0.5 s | sync | 2 | 110 ± 14 | 0.910 ± 0.014 | - | - | - | - |",
        "| 0.5 s | separate_async | 2 | 158 ± 11 | 0.875 ± 0.035 | sync "
        f"| {speed} | {accuracy} | x1.3: yes; accuracy: yes |",
        "| 2 s | separate_async | 2 | 45 ± 7 | 0.900 ± 0.000 | sync | - | - | - |",
        "| 2 s | separate_async_actor | 1 | 40 | 0.900 | sync | - | - | - |",
        "| 2 s | separate_async_keep | 1 | 50 | 0.800 | separate_async | x1.25 | -0.100 | - |",
        "| 2 s | separate_async_keep | 1 | 50 | 0.800 | separate_async_actor "
        "| x1.25 | -0.100 | x1.25: yes; accuracy: no |",
    ]


def test_every_mode_can_be_composed(script):
    for mode in script.MODES:
        config = compose_run("tiny_dapo", script.command_of(script.Cell(mode, 2.0, 7), 30, [])[2:])
        assert (config.data.seed, config.trainer.test_freq) == (7, 30)
        is_within = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == script.IN_SERVER
        assert is_within == (mode != script.ACTOR), "what is compared is the mode"
        get = modes.getter(config)
        assert not [*weight_update.refusals(get), *health.refusals(get), *balancer.refusals(get)]


def test_in_flight_updates_are_all_that_a_mode_differs_in_from_separate_async(script):
    keep, abort = (
        compose_run("tiny_dapo", script.command_of(script.Cell(mode, 2.0, 0), 30, [])[2:])
        for mode in (script.KEEP, "separate_async")
    )
    assert (keep.retool.fleet.weight_update, abort.retool.fleet.weight_update) == ("keep", "abort")
    keep.retool.fleet.weight_update = "abort"
    assert keep == abort


@pytest.fixture
def settings(script):
    return script.made_with({"sft": "quickstart"}, steps=4, overrides=script.OVERRIDES)  # `sync` adds none


def test_a_finished_run_is_published_and_not_run_again(script, run, settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "sync_2s_0").symlink_to(run)
    script.begin(run, settings)
    began = []
    monkeypatch.setattr(script, "run_cell", lambda cell, *_: began.append(str(cell)))
    options = ["--means", "2", "--steps", "4", "--repeats", "1", "--mode", "sync", "--out", str(tmp_path)]
    script.main(options)
    platform = environment()["platform"]
    made = {"from": {"sft": "quickstart"}, "task": RUNGS["tiny"].task_digest(), "steps": 4}
    assert settings == made | {"overrides": [*script.OVERRIDES], "cpu": platform["cpu"], "cores": platform["cores"]}
    row = {"run": "sync_2s_0", "settings": settings, "tokens_per_s": 20.0, "accuracy": 0.75}
    published = (tmp_path / "results.jsonl").read_text()
    assert [json.loads(line) for line in published.splitlines()] == [row] and not began
    (tmp_path / "sync_2s_0").unlink()  # another machine
    script.main(options)
    assert not began and "| 2 s | sync | 1 | 20 | 0.750 | - | - | - | - |" in capsys.readouterr().out


def test_results_of_other_settings_are_not_taken_for_ones_own(script, run, settings, tmp_path, monkeypatch):
    (tmp_path / "sync_2s_0").symlink_to(run)
    script.begin(run, settings)
    options = ["--means", "2", "--repeats", "1", "--mode", "sync", "--out", str(tmp_path), "--steps"]
    script.main([*options, "4"])
    for others in (["5"], ["4", "data.seed=7"], ["4", "--from", "another"]):
        with pytest.raises(SystemExit, match=r"sync_2s_0 was made with other settings.\n  there: .*'steps': 4,"):
            script.main([*options, *others])
    monkeypatch.setattr(script, "made_with", lambda *_, **__: settings | {"cpu": "another"})
    with pytest.raises(SystemExit, match=r"(?s)there: .*now: .*'cpu': 'another'"):
        script.main([*options, "4"])


def test_a_mode_that_has_changed_has_no_results(script, run, settings, tmp_path, monkeypatch):
    (tmp_path / "sync_2s_0").symlink_to(run)
    script.begin(run, settings)
    options = ["--means", "2", "--steps", "4", "--repeats", "1", "--mode", "sync", "--out", str(tmp_path)]
    script.main(options)
    monkeypatch.setitem(script.MODES, "sync", ("data.shuffle=false",))
    with pytest.raises(SystemExit, match=r"(?s)sync_2s_0 was made with other settings.*now: .*data.shuffle=false"):
        script.main(options)


def test_a_run_that_began_with_other_settings_is_refused_before_the_first_run(
    script, run, settings, tmp_path, monkeypatch
):
    """It was interrupted, or its result is not published."""
    (tmp_path / "sync_2s_1").symlink_to(run)
    began = []
    monkeypatch.setattr(script, "run_cell", lambda cell, *_: began.append(str(cell)))
    options = ["--means", "2", "--repeats", "2", "--mode", "sync", "--out", str(tmp_path), "--steps", "4"]
    with pytest.raises(SystemExit, match="sync_2s_1 was not started by this script"):
        script.main(options)
    script.begin(run, settings | {"overrides": ["data.seed=7"]})
    with pytest.raises(SystemExit, match=r"(?s)sync_2s_1 was started with other settings.*there: .*data.seed=7"):
        script.main(options)
    assert not began


@pytest.fixture
def launched(script, monkeypatch):
    """Return the commands that `run_cell` has started."""
    commands = []

    class Supervisor:
        def __init__(self, lock):
            assert not lock.closed

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def run(self, command, *, log, env, watch):
            assert env["SANDBOX_URL"].startswith("http://127.0.0.1:")
            commands.append(command)
            watch()

    monkeypatch.setattr(script, "Supervisor", Supervisor)
    monkeypatch.setattr(script, "running_server", lambda: __import__("contextlib").nullcontext("http://127.0.0.1:1"))
    return commands


def test_a_run_that_takes_too_long_is_ended_and_named(script, launched, tmp_path):
    with pytest.raises(TimeoutError, match="was not finished within -1 s. Run the same command again"):
        script.run_cell(script.Cell("sync", 0.5, 2), tmp_path, tmp_path / "out", 30, [], -1)
    assert "data.seed=2" in launched[0]


@pytest.mark.parametrize(("saved", "validates"), [(20, False), (30, True)])
def test_a_run_that_was_killed_in_its_validation_goes_on_with_it(script, launched, tmp_path, saved, validates):
    """verl would begin no step, and validate nothing."""
    checkpoint = script.checkpoints.path_of(tmp_path, saved)
    checkpoint.mkdir()
    (checkpoint / "data.pt").write_text("weights")
    vouch(checkpoint)
    (tmp_path / script.checkpoints.TRACKER).write_text(str(saved))
    script.run_cell(script.Cell("sync", 0.5, 0), tmp_path, tmp_path, 30, [], 60)
    assert [word in launched[0] for word in script.VALIDATE] == [validates] * 2


def test_a_run_that_fails_is_told_and_costs_no_other(script, run, settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "sync_2s_1").symlink_to(run)
    script.begin(run, settings)

    def run_cell(cell, *_):
        if cell.repeat == 0:
            raise script.CommandFailed("no sandbox")

    monkeypatch.setattr(script, "run_cell", run_cell)
    options = ["--means", "2", "--repeats", "3", "--mode", "sync", "--out", str(tmp_path), "--steps", "4"]
    with pytest.raises(SystemExit) as ended:
        script.main(options)
    said = str(ended.value).splitlines()
    assert said[1] == "sync_2s_0: no sandbox" and "sync_2s_2 ended without val-core/tiny_tools/acc/mean@4" in said[2]
    assert "| 2 s | sync | 1 | 20 | 0.750 |" in capsys.readouterr().out, "what is done is shown"


def test_a_run_that_another_process_writes_is_left_alone(script, launched, tmp_path):
    with script.lock_folder(tmp_path), pytest.raises(SystemExit, match="Another run writes into"):
        script.run_cell(script.Cell("sync", 0.5, 0), tmp_path, tmp_path, 30, [], 60)
    assert not launched
