"""Programs reach no file of the machine, neither by its path nor by what is fetched for them."""

import base64
import json
import os

import pytest

from tests.unit.sandbox.hostile.attacks import FILES, HARMFUL, MARK, NAMESPACES, PROC, ROOT, SECCOMP, Case, cases, need
from tests.unit.sandbox.server_process import REPOSITORY, SECRET

# --- the machine's files


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/hostname",
        "/etc/ssl",
        "/root",
        "/var/log",
        "/var/lib",
        "/sys/kernel",
        "/dev/kmsg",
        "/dev/vda",
        "/dev/shm/../pts",
        "/proc/kallsyms",
        "/proc/sys/kernel/hostname",
        "/proc/cmdline",
        "/proc/net/tcp",
        "/proc/1/environ",
        str(REPOSITORY / "setup.py"),
        str(REPOSITORY / ".git"),
    ],
)
def test_file_of_the_machine_cannot_be_read(server, path):
    if not os.path.exists(path):
        pytest.skip(f"this machine has no {path}, so nobody can read it")
    need(server, {"root", "proc"} if path.startswith("/proc") else FILES)
    code = f"path = {path!r}\n"
    code += "denied(lambda: os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1), OSError)"
    assert server.result(code)["stdout"] == "held\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}).read()",
        "open({path!r}, 'a').write('x')",
        "os.unlink({path!r})",
        "os.rename({path!r}, {path!r} + '2')",
        "os.chmod({path!r}, 0)",
        "os.stat({path!r})",
        "open('/proc/self/root' + {path!r}).read()",
        "open('/proc/self/cwd/' + '../' * 20 + {path!r}[1:]).read()",
        "open('../' * 20 + {path!r}[1:]).read()",
        "(os.symlink({path!r}, 'link'), open('link').read())",
        "os.link({path!r}, 'link')",
        "__import__('shutil').copy({path!r}, 'copy')",
        "os.mkfifo({path!r} + '-fifo')",
        "libc.truncate({path!r}.encode(), 0) and (_ for _ in ()).throw(OSError)",
    ],
)
def test_known_path_leads_to_no_file_of_the_machine(server, host_file, attempt):
    need(server, ROOT)
    server_result = server.result(f"denied(lambda: {attempt.format(path=str(host_file))}, OSError)")
    assert server_result["stdout"] == "held\n"
    assert host_file.read_text() == SECRET


OWNER = """
open('a', 'w')
before = os.stat('a')[4:6]
try: os.chown('a', 1, 1)
except OSError: pass  # without seccomp, which pretends that it succeeds
print('held' if os.stat('a')[4:6] == before else 'ESCAPED')
"""


@cases(
    Case("the interpreter's library", FILES, "denied(lambda: os.open(os.__file__, os.O_WRONLY), OSError)"),
    Case("a file in /usr", FILES, "denied(lambda: os.open('/usr/bin/env', os.O_WRONLY), OSError)"),
    Case("beside its folder", ROOT, f"denied(lambda: open('../{MARK}', 'w'), OSError)"),
    Case("in the root", ROOT, f"denied(lambda: os.mkdir('/{MARK}'), OSError)"),
    Case("its own limits in /proc", PROC, "denied(lambda: open('/proc/self/oom_score_adj', 'w').write('0'), OSError)"),
    Case("a block device", FILES, "denied(lambda: os.mknod('disk', 0o60600, os.makedev(254, 0)), OSError)"),
    Case("a character device", FILES, "denied(lambda: os.mknod('mem', 0o20600, os.makedev(1, 1)), OSError)"),
    Case("a root of its own", SECCOMP, "denied(lambda: os.chroot('.'))"),
    Case("the owner of a file", NAMESPACES, OWNER),
    Case("another user", NAMESPACES | {"uid"}, "denied(lambda: os.setuid(0), OSError)"),
    Case("a group", NAMESPACES | {"uid"}, "denied(lambda: os.setgroups([0]), OSError)"),
)
def test_nothing_outside_its_folder_can_be_changed(server, case):
    need(server, case.needs)
    assert server.result(case.code)["stdout"] == "held\n"


# --- files that are fetched


@pytest.mark.parametrize(
    ("make", "path"),
    [
        ("os.symlink({host!r}, 'f')", "f"),
        ("os.symlink({host!r}.rpartition('/')[0], 'd')", "d/host"),
        ("os.symlink('/proc/self/root', 'd')", "d/etc/passwd"),
        ("os.symlink('main.py', 'f')", "f"),
        ("os.symlink('f', 'f')", "f"),
        ("os.mkfifo('f')", "f"),
        ("os.mkdir('f')", "f"),
        ("os.rename('main.py', 'g'); os.symlink({host!r}, 'main.py')", "main.py"),
        ("os.symlink('/dev/zero', 'f')", "f"),
        ("os.rmdir('.') if 0 else os.chmod('.', 0)", "nothing"),
    ],
    ids=["link", "folder link", "root link", "inner link", "loop", "FIFO", "folder", "program", "device", "locked"],
)
def test_fetch_gives_no_file_but_regular_ones_below_the_folder(server, host_file, make, path):
    answer = server.run(make.format(host=str(host_file)), fetch_files=[path])
    assert (answer["status"], answer["files"]) == ("Success", {})
    assert f"{path} was not fetched" in answer["message"]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\0b", ""])
def test_path_outside_the_folder_is_refused(server, path):
    for fields in ({"files": {path: ""}}, {"fetch_files": [path]}):
        status, _, _ = server.post(json.dumps({"code": "1", "language": "python"} | fields).encode())
        assert status == 422


@HARMFUL
def test_files_too_large_to_fetch_are_left_out(server):
    need(server, ROOT)
    answer = server.run("for n in 'ab': open(n, 'wb').truncate(40 << 20)", fetch_files=["a", "b"])
    assert [len(base64.b64decode(content)) for content in answer["files"].values()] == [40 << 20]
    assert "b was not fetched: over the limit" in answer["message"]
