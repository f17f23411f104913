"""A session sees nothing of the one before it, which had the same worker; and nobody finds the id of another."""

import json
from collections.abc import Iterator
from uuid import uuid4

import psutil
import pytest

from tests.unit.sandbox.hostile.attacks import ISOLATION, MARK, PROC, ROOT, HostileServer, need
from tests.unit.sandbox.hostile.test_next_request import DRAWS, LEFT


class OneWorker(HostileServer):
    """A server whose sessions come one after the other, all in one worker: it must still be there after each."""

    def __init__(self) -> None:
        super().__init__("--isolation", ISOLATION, "--max-sessions", "1")
        self.without = {process.pid for process in self.descendants()}

    def own(self) -> list[psutil.Process]:
        """Return the processes for sessions: the worker first, then its program."""
        return [process for process in self.descendants() if process.pid not in self.without]

    def session(self, *codes: str) -> list[dict]:
        """Return `run_result` of each call of a new session, which is then ended."""
        name = uuid4().hex
        results = [self.result(code, session_id=name) for code in codes]
        self.end(name)
        return results

    def end(self, name: str) -> None:
        assert self.request(f"/v1/sessions/{name}", method="DELETE")[0] == 200


@pytest.fixture(scope="module")
def server() -> Iterator[OneWorker]:
    server = OneWorker()
    try:
        server.session("pass")
        (server.worker,) = server.own()
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def same_worker(server) -> Iterator[None]:
    yield
    assert server.own() == [server.worker], "the test must have seen what one worker keeps"
    assert not [path for path in server.root.iterdir() if path.name == server.mark]


@pytest.mark.parametrize(("leave", "look"), LEFT, ids=lambda text: text[:40])
def test_next_session_does_not_see(server, leave, look):
    if "sympy" in leave:
        pytest.importorskip("sympy")
    need(server, (ROOT if MARK in leave else set()) | (PROC if "/proc" in look else set()))
    assert [result["return_code"] for result in server.session("kept = 1", leave)] == [0, 0]
    first, second = server.session(f"print(bool({look}))", "print('kept' in globals())")
    assert (first["stdout"], second["stdout"]) == ("False\n", "False\n")


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_sessions_differ(server, draw):
    if "numpy" in draw or "sympy" in draw:
        pytest.importorskip("sympy" if "sympy" in draw else "numpy")
    assert len({server.session(f"print({draw})")[0]["stdout"] for _ in range(4)}) == 4


def test_threads_timers_and_streams_end_with_the_session(server):
    code = """
import signal, threading, time
def f():
    while True: os.write(1, b"LEFT"); open(str(time.monotonic_ns()), "w").write("LEFT"); time.sleep(0.001)
for _ in range(3): threading.Thread(target=f, daemon=True).start()
signal.signal(signal.SIGALRM, lambda *_: print("LEFT", flush=True))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
print("x" * 100_000)
"""
    server.session(code)
    (result,) = server.session("time = __import__('time'); time.sleep(0.1); print(os.listdir())")
    assert (result["stdout"], result["stderr"]) == ("['main.py']\n", "")


def test_files_of_the_session_before_are_no_longer_mounted(server):
    need(server, ROOT | PROC)
    count = "print(sum(os.getcwd() in line.split() for line in open('/proc/self/mountinfo')))"
    assert [server.session("open('f', 'w').write('x')", count)[1]["stdout"] for _ in range(3)] == ["1\n"] * 3


def test_memory_holds_nothing_of_the_session_before(server):
    """Also not what it printed, was given or computed: each program can read all that its worker's fork gave it."""
    need(server, PROC)
    secret = uuid4().hex
    server.session(f"x = '{secret}'\nprint(x * 50)\nprint(x, file=sys.stderr)\nopen('f', 'w').write(x)", "print(x)")
    assert server.session(search_for(secret))[0]["stdout"] == "held\n"
    assert server.session(f"x = '{secret}'", search_for(secret))[1]["stdout"] == "ESCAPED\n", "the search finds nothing"


def test_program_does_not_find_its_own_session_id(server):
    need(server, PROC)
    name = uuid4().hex
    assert server.result(search_for(name), session_id=name)["stdout"] == "held\n"
    server.end(name)


def search_for(text: str) -> str:
    """Return a program that looks for a text in all its memory. It is written backwards, so not to find itself."""
    return f"""
backwards = bytearray({text[::-1]!r}.encode())
found, looked = 0, 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.read().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if "r" not in line.split()[1] or "[v" in line: continue
        for at in range(start, end, 1 << 20):
            try:
                memory.seek(at)
                block = memory.read(min(1 << 20, end - at))
            except OSError: continue
            looked += len(block)
            at = block.find(backwards[:3:-1])
            while at >= 0:
                found += block[at:at + len(backwards)][::-1] == backwards
                at = block.find(backwards[:3:-1], at + 1)
assert looked > 1 << 20
print("ESCAPED" if found else "held")
"""


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/", "/v1/ping", "/metrics"])
def test_no_route_tells_a_session_id(server, path):
    name = uuid4().hex
    server.run("x = 1", session_id=name)
    assert name.encode() not in server.request(path)[2]
    for guess in (name[:-1], f"{name[:-1]}g", "*", ".", name.upper()):
        assert server.request(f"/v1/sessions/{guess}", method="DELETE")[0] == 404
        body = json.dumps({"session_ids": [guess]}).encode()
        assert json.loads(server.request("/v1/sessions", body)[2]) == {"renewed": 0}
    assert server.result("print(x)", session_id=name)["stdout"] == "1\n"
    server.end(name)
