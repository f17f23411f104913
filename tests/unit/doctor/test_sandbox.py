"""The sandbox checks against a real server, and against servers that only look like one."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.unit.sandbox.boxes import need_boxes
from verl_ext.doctor.finding import Level
from verl_ext.doctor.sandbox import (
    calls_per_step,
    check_load,
    check_reachable,
    check_timeouts,
    is_address,
    judge_load,
    responses_at_once,
)
from verl_ext.sandbox import SandboxClient, running_server
from verl_ext.sandbox.load import Load, load


@pytest.fixture(scope="module")
def server():
    with running_server(options=("--preload", "sympy")) as url:
        yield url


WRONG = ["localhost:8080", "http://", "http://[::1:8080", "http://host:port", "http://host?a=b", "http://host/#x"]


@pytest.mark.parametrize("url", [*WRONG, "ftp://host", 7])
def test_an_address_that_cannot_be_one_is_a_plain_sentence(url, make_run, told):
    run = make_run("qwen2-32b_dapo")
    run.config.retool.sandbox.urls = [url]
    text = told(check_reachable(run), Level.FAIL)[0]
    assert text.startswith(f"retool.sandbox.urls has {url!r}, expected http://HOST:PORT") and "SANDBOX_URL" in text


@pytest.mark.parametrize("url", ["http://[::1]:8080", "https://user:p@host/path", "http://host", "http://10.0.0.1:80/"])
def test_other_addresses_are_tried(url):
    assert is_address(url)


@contextmanager
def answering(status, body, ping=None):
    """A server that gives every program the same answer, and pings a different one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self):
            self.send_response(404 if ping is None else 200)
            self.end_headers()
            self.wfile.write((ping or "").encode())

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def with_url(make_run, url, *overrides):
    return make_run("tiny_dapo", f"retool.sandbox.urls=[{url}]", *overrides)


def test_a_server_that_runs_and_isolates(server, make_run, only_ok):
    only_ok(check_reachable(with_url(make_run, server)))


def test_text_rl_needs_no_sandbox_unless_rows_have_tests(make_run, only_ok, told, tmp_path):
    nobody = ("retool.sandbox.urls=[http://127.0.0.1:9]", "+tool=none", "data.val_files=null")
    rows = {"math": {"data_source": "math"}, "code": {"data_source": "x", "ability": "code"}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    run = make_run("tiny_dapo", *nobody, "data.train_files=math.jsonl")
    only_ok(check_reachable(run))
    assert [*check_load(run, seconds=1)] == [*check_timeouts(run)] == []
    assert told(check_reachable(make_run("tiny_dapo", *nobody, "data.train_files=code.jsonl")), Level.FAIL)


def test_nobody_there(make_run, told):
    text = told(check_reachable(with_url(make_run, "http://127.0.0.1:9")), Level.FAIL)[0]
    assert "http://127.0.0.1:9 does not run code" in text and "retool sandbox" in text


@pytest.mark.parametrize(
    ("status", "body", "level", "message"),
    [
        (401, "", Level.FAIL, "answers HTTP 401 Unauthorized -> Set SANDBOX_TOKEN."),
        (503, "", Level.FAIL, "answers HTTP 503"),
        (200, "hello", Level.FAIL, "does not run code"),
        (200, json.dumps({"run_result": None}), Level.FAIL, "does not run code"),
        (200, json.dumps({"run_result": {"stdout": ""}, "message": "no space"}), Level.FAIL, "gave '', no space"),
        (200, json.dumps({"run_result": {"stdout": "42\n"}}), Level.WARN, "does not report what isolates it"),
    ],
)
def test_a_server_that_only_looks_like_one(status, body, level, message, make_run, told):
    with answering(status, body) as url:
        assert message in told(check_reachable(with_url(make_run, url)), level)[0]


def test_a_busy_server_is_no_reason_not_to_start(make_run, told):
    with answering(504, "", ping=json.dumps({"status": "ok", "layers": ["seccomp"]})) as url:
        assert "works, but is too busy" in told(check_reachable(with_url(make_run, url)), Level.WARN)[0]


def test_a_server_that_listens_and_never_answers(make_run, told, monkeypatch):
    monkeypatch.setattr("verl_ext.sandbox.probe.PING_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        text = told(check_reachable(with_url(make_run, url)), Level.FAIL)[0]
    assert "did not run print(6 * 7) within 0.3 s" in text


def test_a_server_without_isolation(make_run, told):
    with running_server(workers=1, options=("--preload", "", "--isolation", "none")) as url:
        text = told(check_reachable(with_url(make_run, url)), Level.WARN)[0]
    assert "namespaces, landlock, seccomp is off" in text


NOTEBOOKS = [
    ["retool.environment=notebook"],
    ["+retool.domains.math.environment=[{name: search, corpus: c}, notebook]"],
    ["+retool.domains.math.environment={name: notebook}"],
]


@pytest.mark.parametrize("overrides", NOTEBOOKS, ids=["run", "list", "section"])
def test_notebooks_need_as_many_sessions_as_responses_are_written_at_one_time(server, make_run, told, overrides):
    few = ["data.train_batch_size=25", "actor_rollout_ref.rollout.n=20", "algorithm.filter_groups.enable=true"]
    few += ["algorithm.filter_groups.max_num_gen_batches=2"]
    said = told(check_reachable(with_url(make_run, server, *few, *overrides)), Level.OK)
    assert said[1].startswith("up to 1,000 responses are written at one time, and 1,000 notebooks may exist")
    many = [*few, "algorithm.filter_groups.max_num_gen_batches=3"]
    text = told(check_reachable(with_url(make_run, server, *many, *overrides)), Level.WARN)[0]
    assert "up to 1,500 responses" in text and "queue_timeout_s=60, and then fail" in text
    assert text.endswith("-> Start the server with --max-sessions 1500.")
    many = [*few, "algorithm.filter_groups.max_num_gen_batches=10"]
    text = told(check_reachable(with_url(make_run, server, *many, *overrides)), Level.WARN)[0]
    assert "--max-sessions 4000, and 2 servers (SANDBOX_URL)" in text


def test_without_notebooks_no_session_is_needed(server, make_run, only_ok):
    only_ok(check_reachable(with_url(make_run, server, "data.train_batch_size=100000")))


BOXES = [["retool.environment=terminal"], ["+retool.domains.repo.environment={name: repository, folder: r}"]]


@pytest.mark.parametrize("overrides", BOXES, ids=["run", "domain"])
def test_tasks_in_boxes_need_as_many_boxes_as_responses_are_written_at_one_time(make_run, told, overrides):
    few = ["data.train_batch_size=5", "actor_rollout_ref.rollout.n=8", "algorithm.filter_groups.enable=false"]
    with running_server(workers=1, options=("--preload", "", "--max-boxes", "40")) as url:
        need_boxes(url)
        said = told(check_reachable(with_url(make_run, url, *few, *overrides)), Level.OK)
        assert said[1].startswith("up to 40 responses are written at one time, and 40 boxes may exist")
        many = [*few, "data.train_batch_size=6"]
        text = told(check_reachable(with_url(make_run, url, *many, *overrides)), Level.WARN)[0]
        assert "up to 48 responses" in text and "-> Start the server with --max-boxes 48" in text


def test_a_server_without_boxes_is_named(make_run, told):
    with running_server(workers=1, options=("--preload", "", "--max-boxes", "0")) as url:
        text = told(check_reachable(with_url(make_run, url, "retool.environment=terminal")), Level.FAIL)[0]
    assert f"{url} has no boxes (" in text and "terminal needs one for each response" in text


def test_responses_at_one_time_of_a_mode(make_run):
    """32 prompts x 8 responses, and in separate_async two batches more."""
    of_mode = ["data.train_batch_size=32", "actor_rollout_ref.rollout.n=8", "algorithm.filter_groups.enable=true"]
    of_mode += ["algorithm.filter_groups.max_num_gen_batches=5", "trainer.v1.separate_async.num_warmup_batches=2"]
    assert responses_at_once(make_run("tiny_dapo", *of_mode, "trainer.v1.trainer_mode=sync")) == 32 * 8 * 5
    assert responses_at_once(make_run("tiny_dapo", *of_mode, "trainer.v1.trainer_mode=separate_async")) == 32 * 8 * 3


@pytest.mark.parametrize(
    ("options", "level", "message"),
    [
        (("--max-sessions", "0"), Level.FAIL, "forbids sessions, and `notebook` needs one for each response"),
        (("--session-idle-s", "30"), Level.WARN, "ends a notebook 30 s after its last call or renewal"),
    ],
)
def test_servers_that_keep_no_notebook(make_run, told, options, level, message):
    with running_server(workers=1, options=("--preload", "", *options)) as url:
        run = with_url(make_run, url, "retool.environment=notebook")
        assert message in told(check_reachable(run), level)[0]


def test_another_projects_server_has_no_sessions(make_run, told):
    with answering(200, json.dumps({"run_result": {"stdout": "42\n"}}), ping='"pong"') as url:
        run = with_url(make_run, url, "retool.environment=notebook")
        assert "only this package's server has them" in told(check_reachable(run), Level.FAIL)[0]


def test_load_of_a_real_server(server, make_run, told):
    findings = list(check_load(with_url(make_run, server), seconds=1.0))
    assert "64 clients get" in told(findings, Level.OK)[0]


def test_an_answer_that_is_another_programs_is_a_fault():
    async def measure():
        with answering(200, json.dumps({"status": "Success", "run_result": RESULT})) as url:
            client = SandboxClient([url])
            try:
                return await load(client, clients=2, seconds=0.2)
            finally:
                await client.aclose()

    seen = asyncio.run(measure())
    assert len(seen.faults) == len(seen.latencies) > 0 and "7" in seen.faults[0]


RESULT = {"status": "Finished", "stdout": "7\n", "stderr": "", "return_code": 0, "execution_time": 0.0}


def test_calls_of_a_step(make_run):
    # 512 prompts x 16 responses x 2.9 calls; at most 8 calls in each of 4 batches
    assert calls_per_step(make_run("qwen2-32b_dapo")) == (512 * 16 * 2.9, 512 * 16 * 8 * 4)
    published = make_run("qwen2-32b_dapo_published")
    assert calls_per_step(published) == (512 * 16 * 2.9, 512 * 16 * 7)
    assert calls_per_step(make_run("qwen2-32b_dapo", "retool.max_tool_calls=1"))[0] == 512 * 16


def test_what_a_load_means_for_a_step(make_run, told):
    run = make_run("qwen2-32b_dapo")
    # 23,757 calls: at 100 a second 238 s, twice the 120 s; at 1,000 a second 24 s
    slow = told(judge_load(run, Load(10.0, [0.1] * 1000, []), 128), Level.WARN)[0]
    assert "= 23,757 takes the sandbox 238 s, and at most 2,621 s (262,144 calls)" in slow
    assert "Use about 2.0 times as many workers" in slow
    assert "24 s" in told(judge_load(run, Load(1.0, [0.1] * 1000, []), 128), Level.OK)[0]
    late = Load(100.0, [40.0] * 1000, [])
    assert "the p99 is above retool.sandbox.timeout_s=30" in told(judge_load(run, late, 128), Level.FAIL)[0]
