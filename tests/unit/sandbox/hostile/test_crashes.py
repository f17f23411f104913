"""A crash is a return code, and text passes through unchanged."""

import re
import sys

import pytest

# --- crashes

TOO_DEEP = -11 if sys.version_info < (3, 12) else 1  # from 3.12 on Python limits it, whatever a program sets


@pytest.mark.parametrize(
    ("code", "return_codes", "stderr"),
    [
        ("def f(): f()\nf()", [1], "RecursionError"),
        ("sys.setrecursionlimit(10**9)\nclass A:\n def __repr__(self): return repr([self])\nrepr(A())", [TOO_DEEP], ""),
        ("x = []\nfor _ in range(10 ** 6): x = [x]\nprint(x)", [1, -11], ""),
        ("exec('(' * 10_000)", [1], "SyntaxError|MemoryError|RecursionError"),
        ("exec('-' * 100_000 + '1')", [1, -11], ""),
        ("ctypes.string_at(0)", [-11], ""),
        ("os.abort()", [-6], ""),
        ("os.kill(os.getpid(), 8)", [-8], ""),
        ("os.kill(os.getpid(), 31)", [-31], ""),
        ("import faulthandler; faulthandler.enable(); ctypes.string_at(0)", [-11], "Segmentation fault"),
        ("sys.exit(300)", [44], ""),
        ("os._exit(255)", [255], ""),
        ("raise SystemExit('bye')", [1], "bye"),
        ("import threading; threading.Thread(target=os._exit, args=(9,)).start()", [9], ""),
        ("print(int('9' * 5000))", [1], "ValueError"),
        ("del sys.modules['sys'], sys.modules['os']", [0], ""),
        ("import builtins; vars(builtins).clear()", [1, 0], ""),
        ("import gc\nfor x in gc.get_objects():\n    if type(x) is dict: x.clear()", None, ""),
        ("for f in [sys._getframe(i) for i in range(3)]: f.f_globals.pop('os', None)", None, ""),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_crash_is_a_return_code(server, code, return_codes, stderr):
    result = server.result(code)
    assert result["status"] == "Finished"
    assert return_codes is None or result["return_code"] in return_codes
    assert re.search(stderr, result["stderr"])


# --- text


@pytest.mark.parametrize(
    ("code", "stdin", "stdout"),
    [
        ("print('\\0a')", None, "\0a\n"),
        ("os.write(1, b'\\xff\\xfe\\x80')", None, "\ufffd\ufffd\ufffd"),
        ("os.write(1, '\\ud800'.encode('utf-8', 'surrogatepass'))", None, "\ufffd\ufffd\ufffd"),
        ("print('\U0001f600\u202e\u0007')", None, "\U0001f600\u202e\u0007\n"),
        ("sys.stdout.write('a\\r\\nb\\rc')", None, "a\r\nb\rc"),
        ("print(ascii(sys.stdin.read()))", "\0\u2028\U0001f600", "'\\x00\\u2028\\U0001f600'\n"),
        ("print(sys.stdin.buffer.read())", "\ud800", "b'\\xed\\xa0\\x80'\n"),
        ("\u0394 = 1; print(\u0394)", None, "1\n"),
        ("print('held')\x0c", None, "held\n"),
    ],
    ids=["NUL", "not UTF-8", "surrogate", "wide", "line ends", "stdin", "stdin surrogate", "names", "form feed"],
)
def test_text_passes_unchanged(server, code, stdin, stdout):
    assert server.result(code, stdin=stdin)["stdout"] == stdout
