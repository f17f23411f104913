"""A request sees nothing of the one before it, and nothing of the server."""

import pytest

from tests.unit.sandbox.hostile.attacks import MARK, PROC, ROOT, need
from tests.unit.sandbox.server_process import IS_BELOW_TMP, SECRET

# --- from one request to the next


LEFT = [
    pytest.param(
        f"open('/tmp/{MARK}', 'w')",
        f"os.path.exists('/tmp/{MARK}')",
        marks=pytest.mark.skipif(IS_BELOW_TMP, reason="the interpreter is below /tmp"),
    ),
    (f"open('/dev/shm/{MARK}', 'w')", f"os.path.exists('/dev/shm/{MARK}')"),
    (f"open('{MARK}', 'w')", "os.listdir() != ['main.py']"),
    ("os.chmod('.', 0o777)", "os.stat('.').st_mode & 0o777 != 0o700"),
    ("os.setxattr('.', 'user.x', b'1')", "os.listxattr('.')"),
    ("os.environ['LEFT'] = '1'; os.putenv('LEFT', '1')", "'LEFT' in os.environ"),
    ("import builtins; builtins.LEFT = 1", "'LEFT' in dir(__builtins__)"),
    ("import sympy; sympy.factor = None; sympy.S.LEFT = 1", "__import__('sympy').factor is None"),
    ("import math; math.pi = 3", "__import__('math').pi == 3"),
    ("import numpy; numpy.seterr(all='raise')", "__import__('numpy').geterr()['over'] == 'raise'"),
    ("sys.path.append('/LEFT')", "'/LEFT' in sys.path"),
    ("sys.setrecursionlimit(77)", "sys.getrecursionlimit() == 77"),
    ("os.umask(0o777)", "os.umask(0) == 0o777"),
    ("os.nice(19)", "os.nice(0) == 19"),
    ("os.sched_setaffinity(0, {0})", "len(os.sched_getaffinity(0)) < os.cpu_count()"),
    ("import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (9, 9))", "__import__('resource').getrlimit(7)[1] == 9"),
    ("import signal; signal.signal(10, signal.SIG_IGN)", "__import__('signal').getsignal(10)"),
    ("import signal; signal.pthread_sigmask(0, {12})", "__import__('signal').pthread_sigmask(0, {12})"),
    ("libc.prctl(15, b'LEFT', 0, 0, 0)", "'LEFT' in open('/proc/self/comm').read()"),
    ("import tempfile; tempfile.tempdir = '/LEFT'", "__import__('tempfile').gettempdir() == '/LEFT'"),
    ("import locale; locale.setlocale(locale.LC_ALL, 'C')", "__import__('locale').setlocale(0) == 'C'"),
    (
        f"import _posixshmem; _posixshmem.shm_open('/{MARK}', os.O_CREAT | os.O_RDWR)",
        f"os.path.exists('/dev/shm/{MARK}')",
    ),
]  # (what a program leaves, how another looks for it)


@pytest.mark.parametrize(("leave", "look"), LEFT, ids=lambda text: text[:40])
def test_next_request_does_not_see(server, leave, look):
    if "sympy" in leave:
        pytest.importorskip("sympy")
    need(server, (ROOT if MARK in leave else set()) | (PROC if "/proc" in look else set()))
    for _ in range(3):  # one for each worker, and once more
        first = server.result(leave)
        assert first["return_code"] == 0, first
    assert [server.result(f"print(bool({look}))")["stdout"] for _ in range(3)] == ["False\n"] * 3


DRAWS = [
    "__import__('random').random()",
    "__import__('random').Random().random()",
    "__import__('numpy').random.random()",
    "__import__('numpy').random.default_rng().random()",
    "__import__('sympy.core.random').core.random.rng.random()",
    "__import__('uuid').uuid4()",
    "__import__('secrets').token_hex()",
    "__import__('tempfile').mkdtemp()",
    "os.urandom(8)",
]


@pytest.mark.parametrize(
    "draw", DRAWS, ids=["random", "Random", "numpy", "default_rng", "sympy", "uuid4", "secrets", "tempfile", "urandom"]
)
def test_random_numbers_differ(server, draw):
    if "numpy" in draw or "sympy" in draw:
        pytest.importorskip("sympy" if "sympy" in draw else "numpy")
    assert len({server.result(f"print({draw})")["stdout"] for _ in range(6)}) == 6


# --- secrets of the server


@pytest.mark.parametrize(
    "search",
    [
        "str(dict(os.environ))",
        "open('/proc/self/environ').read()",
        "str(__import__('gc').get_objects())",
        "''.join(str(f.f_globals) + str(f.f_locals) for f in sys._current_frames().values())",
        "' '.join(sys.orig_argv) + ' '.join(sys.argv)",
        "str([os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]])",
    ],
    ids=["environ", "proc", "objects", "frames", "arguments", "files"],
)
def test_secret_of_the_server_is_not_found(server, search):
    # Backwards, so that the program does not find itself.
    code = (
        f"found = {search}\nassert found\nprint('ESCAPED' if ''.join(reversed({SECRET[::-1]!r})) in found else 'held')"
    )
    result = server.result(code)
    assert result["stdout"] == "held\n", result


def test_only_standard_streams_are_open_and_none_is_a_socket(server):
    need(server, PROC)
    code = "import stat\nprint([stat.S_ISSOCK(os.fstat(int(fd)).st_mode) for fd in os.listdir('/proc/self/fd')[:-1]])"
    assert server.result(code)["stdout"] == "[False, False, False]\n"
