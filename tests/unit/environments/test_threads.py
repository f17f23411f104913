"""Tools that are no coroutines: they wait for each other in no episode's time, and end neither a loop nor a process."""

import asyncio
import subprocess
import sys
import time

import pytest

from verl_ext.environments import threads
from verl_ext.environments.base import Environment, tool
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.protocols.base import Call


class Slow(Environment):
    call_s = 1.0

    @tool
    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long.
        """
        time.sleep(seconds)
        return "done"

    @tool
    def leave(self) -> str:
        """Leave."""
        sys.exit("bye")

    @tool
    async def leave_at_once(self) -> str:
        """Leave."""
        raise SystemExit(3)


async def test_a_call_that_waits_for_those_of_other_episodes_is_in_time(monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 2)
    started = time.monotonic()
    results = await asyncio.gather(*(Slow().call(Call("wait", {"seconds": 0.1}, 0)) for _ in range(30)))
    assert {each.output for each in results} == {"done"}
    assert time.monotonic() - started > 1.2 > Slow.call_s, "all of them do not fit into the time of one"
    assert all(each.run_s < Slow.call_s for each in results)


async def test_a_call_for_which_no_thread_becomes_free_is_the_infrastructures_failure(monkeypatch):
    monkeypatch.setattr(threads, "FREE_S", 0.05)
    taken = [await threads.begin(time.sleep, 1.0) for _ in range(threads.THREADS)]
    result = await Slow().call(Call("wait", {"seconds": 0.0}, 0))
    assert "threads for tools are taken by calls that do not end" in result.failure and not result.error
    with pytest.raises(ToolUnavailable):
        await threads.begin(print)
    await asyncio.gather(*taken)
    assert (await Slow().call(Call("wait", {"seconds": 0.0}, 0))).output == "done", "they are free again"


@pytest.mark.parametrize("name", ["leave", "leave_at_once"])
async def test_a_tool_that_calls_exit_has_a_bug_and_does_not_end_the_worker(name):
    with pytest.raises(RuntimeError, match="it raised SystemExit") as raised:
        await Slow().call(Call(name, {}, 0))
    assert f"Raised by Slow.{name}" in raised.value.__notes__[0]


async def test_what_a_function_gives_is_what_is_awaited():
    assert await (await threads.begin(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await (await threads.begin(divmod, 7, 0))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await (await threads.begin(next, iter(())))


def test_a_call_that_hangs_does_not_keep_the_process():
    code = (
        "import asyncio, time\nfrom verl_ext.environments import threads\n"
        "async def main():\n    running = await threads.begin(time.sleep, 600)\n    await asyncio.sleep(0.1)\n"
        "asyncio.run(main())\nprint('ended')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n" and not done.stderr
