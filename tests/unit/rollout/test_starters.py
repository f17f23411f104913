"""Commands as agents, in real processes, and agents from outside by the real client; the model is scripted."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.unit.rollout.test_agents import AGENTS, BOX, Server, make_loop, play  # noqa: F401 (fixtures)
from verl_ext.gateway.outside import take
from verl_ext.outcome import RolloutEnd
from verl_ext.rollout.agents import task_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def command(tmp_path):
    """A command that runs this program. The client of httpx, because openai takes 1.5 s to import."""

    def make(program):
        head = """
            import json, os, subprocess, sys, time
            import httpx

            task = json.load(sys.stdin)
            def ask():
                url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
                body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
                return httpx.post(url + "/chat/completions", json=body, headers={"Authorization": "Bearer " + key})
        """
        file = tmp_path / "agent.py"
        file.write_text(textwrap.dedent(head) + textwrap.dedent(program))
        return [sys.executable, str(file)]

    return make


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tools_are_told_in_the_order_that_traces_of_sft_have():
    schema = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"z": 1, "a": 2}}}
    assert str(task_of({}, [], {"f": schema})["tools"]) == str([schema])


def test_a_crash_in_a_thread_is_told_by_the_agents_own_lines(play):  # noqa: F811
    episode, _ = play("crashes_in_a_thread", [BOX])
    assert episode.finish_reason == RolloutEnd.AGENT_ERROR and "KeyError: 'what the model wrote'" in episode.exception
    assert "own_agents.py" in episode.exception and "threads.py" not in episode.exception


def test_a_command_plays_an_episode_in_a_fresh_folder_and_ends_by_its_status(play, command, tmp_path):  # noqa: F811
    program = f"""
        print(ask().json())
        open({str(tmp_path / "told")!r}, "w").write(json.dumps([os.getcwd(), os.listdir(), task["id"]]))
    """
    episode, _ = play(command(program), [BOX], row={"extra_info": {"id": "a5"}})
    assert episode.finish_reason == RolloutEnd.ANSWER and len(episode.rows) == 1
    folder, files, name = json.loads((tmp_path / "told").read_text())
    assert files == [] and name == "a5" and not Path(folder).exists() and folder != os.getcwd()


def test_no_proxy_stands_between_an_agent_and_the_gateway(play, command, monkeypatch):  # noqa: F811
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for agent in ("once", "in_a_thread", command("ask()")):
        episode, _ = play(agent, [BOX], results=["2"])
        assert episode.finish_reason == RolloutEnd.ANSWER


def test_what_a_command_prints_without_end_does_not_fill_the_disk(play, command, monkeypatch):  # noqa: F811
    monkeypatch.setattr("verl_ext.rollout.starters.MAX_OUTPUT", 10_000)
    monkeypatch.setattr("verl_ext.rollout.starters.CHECK_S", 0.01)
    program = """
        ask()
        for number in range(3000):
            os.write(1, b"x" * 1000)
            if os.fstat(1).st_size < 1000 * number:
                sys.exit("it was cut")
            time.sleep(0.001)
    """
    episode, _ = play(command(program), [BOX])
    assert episode.exception.endswith("it was cut")


def test_a_command_that_fails_is_a_crash_with_the_end_of_its_output(play, command):  # noqa: F811
    from verl_ext.rollout.agents import AgentFailed

    episode, _ = play(command("ask(); print('x' * 9000); raise KeyError('what it read')"), [BOX])
    assert episode.finish_reason == RolloutEnd.AGENT_ERROR
    assert episode.exception.startswith("exit status 1: xxx") and len(episode.exception) < 4100
    assert episode.exception.endswith("KeyError: 'what it read'")
    with pytest.raises(AgentFailed, match="(?s)crashed before the model had answered: exit status 3"):
        play(command("sys.exit(3)"), [])


CHILDREN = """
    child = "import time; time.sleep(600)"
    pids = [subprocess.Popen([sys.executable, "-c", child], start_new_session=s).pid for s in (False, True)]
    open({file!r}, "w").write(json.dumps([os.getpid(), *pids]))
"""


@pytest.mark.parametrize("end", ["", "time.sleep(600)", "os.kill(os.getpid(), 9)"])
def test_no_process_of_a_command_is_left(play, command, tmp_path, end):  # noqa: F811
    file = tmp_path / "pids"
    program = textwrap.dedent("ask()") + textwrap.dedent(CHILDREN.format(file=str(file))) + end
    episode, _ = play(command(program), [BOX], own={"timeout_s": 4.0 if "sleep" in end else 60.0})
    reasons = {"": RolloutEnd.ANSWER, "time.sleep(600)": RolloutEnd.TIMEOUT}
    assert episode.finish_reason == reasons.get(end, RolloutEnd.AGENT_ERROR)
    pids = json.loads(file.read_text())
    assert len(pids) == 3 and not any(map(lives, pids))


def test_a_cancelled_episode_ends_its_command(make_loop, tokenizer, command, tmp_path):  # noqa: F811
    file = tmp_path / "pids"
    program = textwrap.dedent("ask()") + textwrap.dedent(CHILDREN.format(file=str(file))) + "time.sleep(600)"

    async def run():
        loop = make_loop(command(program), Server(tokenizer, [BOX]))
        task = {"uid": "p", "session_id": 0, "raw_prompt": [{"role": "user", "content": "1+1?"}]}
        rolling = asyncio.ensure_future(loop.roll_out({"logprobs": True}, **task))
        while not (file.exists() and file.read_text()):
            await asyncio.sleep(0.05)
        rolling.cancel()
        await asyncio.wait([rolling])
        await loop.aclose()

    asyncio.run(run())
    assert not any(map(lives, json.loads(file.read_text())))


def test_a_command_ends_with_the_worker_that_started_it(tmp_path):
    """A worker may be killed, and then runs no clean-up."""
    program = textwrap.dedent(f"""
        import asyncio
        from types import SimpleNamespace
        from verl_ext.rollout.starters import CommandStarter

        async def main():
            starter = CommandStarter(["sh", "-c", "sleep 600 & echo $$ $! > {tmp_path}/pids; wait"], 1)
            endpoint = SimpleNamespace(base_url="http://127.0.0.1:1/v1", api_key="secret", model="m")
            async with starter.place() as play:
                await play({{}}, endpoint)

        asyncio.run(main())
    """)
    worker = subprocess.Popen([sys.executable, "-c", program])
    file = tmp_path / "pids"
    while not (file.exists() and file.read_text().endswith("\n")):
        assert worker.poll() is None
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 20
    while any(lives(int(pid)) for pid in file.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["command", "thread"])
def test_agents_beyond_the_limit_wait_and_their_clock_does_not_run(make_loop, tokenizer, command, kind):  # noqa: F811
    agent = command("ask(); time.sleep(1)") if kind == "command" else f"{AGENTS}:sleeps"

    async def run():
        loop = make_loop(agent, Server(tokenizer, [BOX] * 2), own={"max_processes": 1})
        row = {"uid": "p", "raw_prompt": [{"role": "user", "content": "1+1?"}]}
        rolls = [loop.roll_out({"logprobs": True}, **row, session_id=i) for i in range(2)]
        started = time.monotonic()
        episodes = await asyncio.gather(*rolls)
        await loop.aclose()
        return episodes, time.monotonic() - started

    episodes, seconds = asyncio.run(run())
    assert [episode.finish_reason for episode in episodes] == [RolloutEnd.ANSWER] * 2
    assert seconds >= 2 and sum(episode.agent.agent_s for episode in episodes) <= seconds


def from_outside(make_loop, tokenizer, answers, visit, episodes=1, results=(), **own):  # noqa: F811
    """Play episodes by the thread `visit(run_folder)`; return the first."""

    async def run():
        loop = make_loop("outside", Server(tokenizer, answers), results, own=own)
        folder = loop.config.trainer.default_local_dir
        row = {"uid": "p", "raw_prompt": [{"role": "user", "content": "1+1?"}]}
        thread = threading.Thread(target=visit, args=(folder,), daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(60):
                rolls = [loop.roll_out({"logprobs": True}, **row, session_id=i) for i in range(episodes)]
                return (await asyncio.gather(*rolls))[0]
        finally:
            await loop.aclose()
            await asyncio.to_thread(thread.join, 20)
            assert not thread.is_alive()
            assert not [*Path(folder).glob("agents/*.json")], "the address is withdrawn"

    return asyncio.run(run())


def ask(task):
    import httpx

    body = {"messages": task.messages}
    return httpx.post(f"{task.base_url}/chat/completions", json=body, timeout=30)


def call(task):
    import httpx

    body = {"arguments": {"code": "print(1)"}}
    return httpx.post(f"{task.base_url}/tools/code_interpreter", json=body, timeout=30)


def test_an_agent_takes_a_task_from_outside_and_ends_it(make_loop, tokenizer, tmp_path):  # noqa: F811
    left_behind = tmp_path / "agents" / f"{socket.gethostname()}-999999999-1.json"  # of a worker that was killed
    left_behind.parent.mkdir()
    left_behind.write_text(json.dumps({"url": "http://127.0.0.1:1"}))

    def visit(folder):
        with take(folder) as task:
            assert ask(task).status_code == 200

    episode = from_outside(make_loop, tokenizer, [BOX], visit)
    assert episode.finish_reason == RolloutEnd.ANSWER and len(episode.rows) == 1


def test_a_crash_outside_is_told_apart(make_loop, tokenizer):  # noqa: F811
    def visit(folder):
        with take(folder) as task:
            ask(task)
            raise KeyError("what it read")

    episode = from_outside(make_loop, tokenizer, [BOX], visit)
    assert episode.finish_reason == RolloutEnd.AGENT_ERROR and "KeyError: 'what it read'" in episode.exception


def test_an_agent_that_went_away_after_an_answer_is_out_of_time(make_loop, tokenizer):  # noqa: F811
    episode = from_outside(make_loop, tokenizer, [BOX], lambda folder: ask(take(folder)), timeout_s=0.5)
    assert episode.finish_reason == RolloutEnd.TIMEOUT


def test_a_task_that_was_taken_and_left_is_handed_out_again(make_loop, tokenizer, caplog):  # noqa: F811
    kept = []

    def visit(folder):
        kept.append(take(folder))
        with take(folder) as task:
            assert task.api_key != kept[0].api_key
            assert ask(task).status_code == 200 and ask(kept[0]).status_code == 410

    episode = from_outside(make_loop, tokenizer, [BOX], visit, timeout_s=0.5)
    assert episode.finish_reason == RolloutEnd.ANSWER and "is handed out again" in caplog.text


def test_a_task_whose_agent_went_after_a_call_is_not_handed_out_in_a_world_that_it_changed(make_loop, tokenizer):  # noqa: F811
    visit, own = lambda folder: call(take(folder)), {"timeout_s": 0.5}
    episode = from_outside(make_loop, tokenizer, [BOX], visit, results=["1\n"], **own)
    assert episode.finish_reason == RolloutEnd.ABORTED and "and then asked the model nothing" in episode.exception


def test_a_task_goes_to_nobody_who_has_hung_up(make_loop, tokenizer):  # noqa: F811
    def visit(folder):
        with take(folder) as task:  # the only one that may be out at a time
            ask(task)
            address = urlsplit(json.loads(next(Path(folder).glob("agents/*.json")).read_text())["url"])
            with socket.create_connection((address.hostname, address.port)) as waiting:
                waiting.sendall(b"GET /task?wait=20 HTTP/1.1\r\nHost: x\r\n\r\n")
                time.sleep(0.5)  # until it waits
            time.sleep(0.5)  # until it is known to be gone
        with take(folder) as task:
            ask(task)

    found = from_outside(make_loop, tokenizer, [BOX] * 2, visit, episodes=2, max_processes=1)
    assert found.finish_reason == RolloutEnd.ANSWER


def test_nobody_who_takes_tasks_is_warned_of(make_loop, tokenizer, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr("verl_ext.rollout.outside.WARN_S", 0.2)

    def visit(folder):
        while "1 tasks wait" not in caplog.text:
            time.sleep(0.05)
        with take(folder) as task:
            ask(task)

    assert from_outside(make_loop, tokenizer, [BOX], visit).finish_reason == RolloutEnd.ANSWER


def test_other_machines_need_the_token(make_loop, tokenizer, monkeypatch):  # noqa: F811
    import httpx

    monkeypatch.delenv("RETOOL_AGENT_TOKEN", raising=False)
    with pytest.raises(ValueError, match="has no RETOOL_AGENT_TOKEN"):
        make_loop("outside", Server(tokenizer, []), own={"host": "10.0.0.7"})
    monkeypatch.setenv("RETOOL_AGENT_TOKEN", "a long random text")

    def visit(folder):
        while not [*Path(folder).glob("agents/*.json")]:
            time.sleep(0.05)
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            take(folder, token="another")
        with take(folder) as task:
            ask(task)

    assert from_outside(make_loop, tokenizer, [BOX], visit).finish_reason == RolloutEnd.ANSWER


def test_no_task_within_the_time_is_none(tmp_path):
    started = time.monotonic()
    assert take(tmp_path, wait_s=0.3) is None and time.monotonic() - started < 5


def test_an_agent_of_a_file_is_loaded_from_the_current_folder(play, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "mine.py").write_text(f"from {AGENTS} import once as solve\n")
    monkeypatch.chdir(tmp_path)
    from verl_ext.rollout.starters import load_agent

    assert load_agent("mine.py:solve").__name__ == "once"
