"""The notebook against real sandbox servers: what it keeps, whom it blames, and what it leaves."""

import asyncio
import shutil
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from tests.unit.sandbox.server_process import Server, wait_for_program
from tests.unit.sandbox.test_exclusion_for_sale import PRELUDE, PROGRAMS
from tests.unit.sandbox.test_server import read_metrics
from verl_ext.environments import notebook as notebook_module
from verl_ext.environments.interpreter import RESTARTED
from verl_ext.environments.notebook import Notebook
from verl_ext.environments.toolbox import Toolbox
from verl_ext.episode import CallResult
from verl_ext.protocols.base import CODE_TOOL, Call

Make = Callable[..., Notebook]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--preload", "")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def weak() -> Iterator[Server]:
    """A program can kill its worker there."""
    server = Server("--preload", "", "--isolation", "none")
    yield server
    server.stop()


class Restarted(Server):
    """A server that can be killed, and started again at its URL."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self.start()

    def start(self) -> None:
        command = (sys.executable, "-m", "verl_ext.sandbox.server", "--port", self._port)
        super().__init__("--preload", "", launcher=command)

    def kill(self) -> None:
        for process in [*self.descendants(), psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):  # a fork may end by itself
                process.kill()
        self.process.communicate()
        shutil.rmtree(self.root)


@pytest.fixture
def mortal() -> Iterator[Restarted]:
    server = Restarted()
    yield server
    if server.process.poll() is None:
        server.stop()


def settings_for(server: Server, *, traceback: str = "full", **settings: object) -> DictConfig:
    sandbox = {"urls": [server.url], "timeout_s": 5, "memory_limit_mb": 256, "queue_timeout_s": 5}
    sandbox |= {"echo_last_expression": False} | settings
    return OmegaConf.create({"sandbox": sandbox, "traceback": traceback})


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes notebooks on a server, closes them and the client that they share."""
    made = []

    def make_one(server: Server, **settings: object) -> Notebook:
        made.append(Notebook(settings_for(server, **settings)))
        return made[-1]

    yield make_one
    for notebook in made:
        await notebook.close()
        await notebook.sandbox.aclose()


async def run(notebook: Notebook, code: str) -> CallResult:
    return await notebook.run(Call(CODE_TOOL, {"code": code}, start=0))


async def said(notebook: Notebook, code: str) -> str:
    result = await run(notebook, code)
    assert result.failure is None, result.failure
    return result.output


def num_sessions(server: Server) -> int:
    return read_metrics(server)["sandbox_sessions"]


async def test_what_a_call_defines_stays_and_a_last_expression_is_shown(server, make):
    notebook = make(server)
    assert await said(notebook, "import math\nx = 20\nopen('f', 'w').write('kept')") == "4"
    assert await said(notebook, "x += 1\nprint(math.pi > 3, open('f').read())\nx * 2") == "True kept\n42"
    assert (await said(notebook, "1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert await said(notebook, "x") == "21", "an exception keeps what came before it"
    assert "NameError" in await said(make(server), "x"), "another episode sees nothing of it"


async def test_calls_of_one_turn_run_in_their_order(server, make):
    notebook = make(server)
    codes = ["import time\nn = [1]", "time.sleep(0.3)\nn.append(2)", "n.append(3)", "n"]
    results = await asyncio.gather(*(run(notebook, code) for code in codes))
    assert results[-1].output == "[1, 2, 3]"
    assert results[-1].queue_s > 0.3 > results[-1].run_s, "the wait for the others counts"


async def test_memory_is_that_of_all_calls_together(server, make):
    notebook = make(server, memory_limit_mb=100)
    assert (await run(notebook, "a = bytearray(70 << 20)")).error is None
    assert (await run(notebook, "b = bytearray(70 << 20)")).error == "MemoryError"
    assert await said(notebook, "len(a) >> 20") == "70"


@pytest.mark.parametrize("traceback", ["full", "last_line"])
@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        ("print('out')\nwhile True: pass", "timeout", "TimeoutError: stopped after 1 s"),
        ("import os; os._exit(0)", "other", ""),
        ("import os; os._exit(3)", "other", "Exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "Killed by signal 9 (Killed)"),
        ("import ctypes; ctypes.string_at(0)", "killed", "Killed by signal 11 (Segmentation fault)"),
    ],
)
async def test_model_is_told_that_its_variables_are_gone(server, make, traceback, code, error, why):
    notebook = make(server, traceback=traceback, timeout_s=1)
    await run(notebook, "x = 1")
    result = await run(notebook, code)
    assert (result.failure, result.error) == (None, error)
    assert result.complaint == f"{why} {RESTARTED}".strip(), "however much of the output is cut"
    assert (await run(notebook, "x = x + 1")).error == "NameError"
    assert await said(notebook, "x = 5\nx") == "5"


@pytest.fixture
def lose(monkeypatch) -> Callable[[Server], None]:
    """Ends all sessions of notebooks behind their backs, as a restart of the server does."""
    ids = []

    def known_id() -> uuid.UUID:
        ids.append(uuid.uuid4())
        return ids[-1]

    def end(server: Server) -> None:
        assert 200 in [server.request(f"/v1/sessions/{each.hex}", method="DELETE")[0] for each in ids]

    monkeypatch.setattr(notebook_module, "uuid4", known_id)
    return end


async def test_lost_session_costs_a_replay_and_not_the_episode(server, make, lose):
    notebook = make(server, timeout_s=1)
    await run(notebook, "gone = 1")
    await run(notebook, "import os; os._exit(3)")  # what came before it is not replayed
    for code in ("x = 20\nprint('once')", "1 / 0", "x += 1"):
        await run(notebook, code)
    lose(server)
    result = await run(notebook, "x * 2")
    assert (result.output, result.failure, result.replays) == ("42", None, 1)
    assert result.queue_s > 3 * result.run_s, "the time of the replay"
    lose(server)
    result = await run(notebook, "'gone' in globals(), x")
    assert (result.output, result.replays, notebook.replays) == ("(False, 21)", 1, 2)
    assert (await run(notebook, "x")).replays == 0
    await notebook.close()
    assert num_sessions(server) == 0


async def test_server_that_is_started_again_costs_a_replay(mortal, make):
    notebook = make(mortal)
    await run(notebook, "x = 42")
    mortal.kill()
    mortal.start()
    assert await said(notebook, "x") == "42"


@pytest.mark.parametrize(
    ("first", "then"), [("1 / 0", "print(8); 1 / 0"), ("1 / 0", "raise KeyError"), ("pass", "os._exit(0)")]
)
async def test_replay_that_differs_is_a_failure_and_no_call_runs_in_an_empty_notebook(server, make, lose, first, then):
    for wait_s in (0.3, 3, 30):  # until the call has ended before it would do something else
        notebook, changes = make(server), time.time() + wait_s
        await run(notebook, "x = 1")
        await run(notebook, f"import os, time\nif time.time() > {changes}: {then}\nelse: {first}")
        if time.time() < changes:
            break
        await notebook.close()
    lose(server)
    await asyncio.sleep(max(changes - time.time(), 0))
    result = await run(notebook, "x")
    assert result.failure and "call 2 of 2 did not end as it had before" in result.failure
    again = await run(notebook, "print(1)")
    assert (again.failure, again.attempts) == (result.failure, 0), "the loop may ask again"
    await notebook.close()
    assert num_sessions(server) == 0


async def test_server_that_stays_away_is_a_failure_also_when_it_is_back(mortal, make):
    notebook = make(mortal, timeout_s=0.5, queue_timeout_s=1)
    await run(notebook, "x = 1")
    mortal.kill()
    failure = (await run(notebook, "x")).failure
    assert failure and "Connect call failed" in failure
    mortal.start()
    assert (await run(notebook, "x")).failure == failure


KILLS_WORKER = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(9)"


@pytest.mark.parametrize("before", [[], ["x = 1", "print(x)"], ["import os", "print(os.urandom(8))"]])
async def test_program_that_kills_its_worker_is_killed_and_buys_no_exclusion(weak, make, before):
    """Also if its earlier calls print what no replay prints again."""
    notebook = make(weak)
    for code in before:
        await run(notebook, code)
    result = await run(notebook, KILLS_WORKER)
    assert (result.failure, result.error, result.replays <= 2) == (None, "killed", True)
    assert result.complaint.endswith(RESTARTED) and "died with it" in result.output
    assert await said(notebook, "'x' in globals()") == "False"
    await notebook.close()
    assert num_sessions(weak) == 0, "nor is one left of a replay"


async def test_worker_that_somebody_else_kills_costs_a_replay(weak, make):
    notebook = make(weak)
    await run(notebook, "x = 42")
    program = wait_for_program(weak, fds=(4,))
    running = asyncio.create_task(run(notebook, "import time; time.sleep(0.5); x"))
    while program.status() != psutil.STATUS_SLEEPING:  # it was stopped between the two calls
        await asyncio.sleep(0.01)
    program.parent().kill()
    result = await running
    assert (result.output, result.replays) == ("42", 1)


async def test_close_ends_the_session_while_a_call_runs(server, make):
    notebook = make(server)
    await run(notebook, "x = 1")
    running, waiting = (asyncio.create_task(run(notebook, code)) for code in ("import time; time.sleep(30)", "x"))
    while read_metrics(server)["sandbox_requests_running"] < 1:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await notebook.close()
    assert time.monotonic() - began < 3
    assert [(await task).failure for task in (running, waiting)] == ["the notebook is closed"] * 2
    assert num_sessions(server) == 0
    await notebook.close()
    assert (await run(notebook, "1")).failure == "the notebook is closed"


async def test_close_of_a_notebook_in_which_nothing_ran_asks_no_server(make):
    await asyncio.wait_for(make(SimpleNamespace(url="http://127.0.0.1:9")).close(), 1)


async def test_cancelled_call_leaves_no_empty_notebook(server, make):
    notebook = make(server)
    await run(notebook, "x = 1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run(notebook, "import time; time.sleep(30)"), 0.2)
    assert "cancelled" in (await run(notebook, "x")).failure
    await notebook.close()
    assert num_sessions(server) == 0


async def test_call_without_code_is_the_models_error(server, make):
    notebook = make(server)
    assert (await notebook.run(Call(CODE_TOOL, {}, start=0))).error == "ToolError"
    assert await said(notebook, "1 + 1") == "2"


@pytest.mark.nightly
async def test_no_known_way_to_break_a_sandbox_buys_an_exclusion(server, make):
    """Each between two calls; the last one runs, in the same notebook or in a new one. Never without isolation: some
    of the programs stop or kill all that they reach."""
    if "namespaces" not in server.ping()["layers"]:
        pytest.skip("the programs could reach other processes of this machine")
    free = asyncio.Semaphore(2)

    async def try_out(code: str) -> list[CallResult]:
        async with free:
            notebook = make(server, timeout_s=0.5)
            codes = ("import os\nprint(os.urandom(8))", PRELUDE + code, "print(6 * 7)", "print(6 * 7)")
            results = [await run(notebook, each) for each in codes]
            await notebook.close()
            return results

    found = dict(zip(PROGRAMS, await asyncio.gather(*map(try_out, PROGRAMS.values())), strict=True))
    assert {name: each.failure for name, ran in found.items() for each in ran if each.failure} == {}


# In an episode ------------------------------------------------------------------------------------------------------

DRAW = """
def draw(_numbers=iter([7, 5]), _programs=set()):
    import sys
    program = sys._getframe(1).f_code
    if program in _programs:
        raise RuntimeError("one draw per call")
    _programs.add(program)
    return next(_numbers)
"""


@pytest.fixture
def play(server: Server):
    """Run programs in an episode of the sandbox; returns what the model reads."""

    async def run(has_state: bool, setup: str, *codes: str) -> list[str]:
        toolbox = Toolbox(settings_for(server))
        environment = toolbox.environment(has_state=has_state)
        try:
            await environment.open({"raw_prompt": [], "extra_info": {"setup_code": setup}})
            return [(await environment.call(Call(CODE_TOOL, {"code": code}, 0))).output for code in codes]
        finally:
            await environment.close()
            await toolbox.interpreter.sandbox.aclose()

    return run


async def test_only_a_notebook_can_draw_twice(play):
    codes = ("a = draw()", "print(a + draw())", "print(draw() + draw())")
    assert await play(True, DRAW, *codes[:2]) == ["(no output)", "12"]
    (told,) = await play(True, DRAW, codes[2])
    assert told.endswith("RuntimeError: one draw per call")
    told = await play(False, DRAW, *codes)
    assert told[0] == "(no output)" and told[1].endswith("NameError: name 'a' is not defined")
    assert told[2].endswith("RuntimeError: one draw per call")


async def test_the_setup_runs_again_after_the_notebook_was_restarted(play):
    told = await play(True, DRAW, "print(draw())", "import os\nos._exit(3)", "print(draw())")
    assert told[::2] == ["7", "7"] and RESTARTED in told[1]


@pytest.mark.parametrize("has_state", [False, True])
async def test_a_setup_that_fails_is_an_error_of_the_row(play, has_state):
    with pytest.raises(ValueError, match="setup_code of the row fails in the sandbox: .*no_such"):
        await play(has_state, "import no_such", "print(1)")
