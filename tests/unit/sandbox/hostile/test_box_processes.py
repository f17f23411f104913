"""What processes of a box can do to others, to their worker and to the machine."""

import asyncio
import socket
import time

import pytest

from tests.unit.sandbox.hostile.box_attacks import attack


@pytest.mark.parametrize(
    "bomb",
    [
        ":(){ :|:& };:; sleep 9",
        "python3 -c 'import os\nwhile True:\n    try: os.fork() or os.setsid()\n    except OSError: pass'",
        "while true; do setsid nohup bash -c 'trap \"\" TERM HUP; sleep 50' & done",
    ],
    ids=["bash", "python, sessions of their own", "detached"],
)
async def test_fork_bomb_ends_with_its_call(boxes, bomb):
    async with attack(boxes) as box:
        result = await box.run(bomb, timeout_s=2)
        assert result.status in ("timeout", "code_error")
        await box.still_works()
        assert (await box.run("pgrep -c .")).stdout == "1\n"  # its bash


@pytest.mark.nightly
async def test_what_a_fork_of_the_worker_has_open_is_out_of_reach(boxes):
    """Until it becomes bash, a command has the worker's descriptors: pipes that report, and files of memory."""
    spy = """
import os, signal
signal.alarm(20)
open("ready", "w")
while not os.path.exists("seen"):
    for pid in os.listdir("/proc"):
        try:
            if pid.isdecimal():
                found = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
                if any("memfd" in each for each in found):
                    print(found, file=open("seen", "w"))
        except OSError:
            pass
"""
    async with attack(boxes, {"app/spy.py": spy}) as box:
        await box.run(
            "setsid python3 -I spy.py > /dev/null 2>&1 < /dev/null & while [ ! -e ready ]; do sleep 0.05; done"
        )
        for _ in range(100):
            await box.run("sleep 0.02")
        assert (await box.run("pkill python3; cat seen 2>&1")).stdout == "cat: seen: No such file or directory\n"


@pytest.mark.parametrize("signal", ["KILL", "STOP", "TERM", "HUP", "INT"])
async def test_signal_to_all_costs_only_the_call(boxes, signal):
    async with attack(boxes) as box:
        await box.run("sleep 100 & setsid sleep 100 &")
        await box.run(f"kill -{signal} -1; kill -{signal} 1; sleep 0.2", timeout_s=2)
        await box.run(f"kill -{signal} $$; sleep 0.2", timeout_s=2)
        await box.still_works()


@pytest.mark.parametrize(
    "code",
    [
        "denied(lambda: open('/proc/1/mem'), OSError)",
        "denied(lambda: open('/proc/1/environ').read(), OSError)",
        "denied(lambda: os.listdir('/proc/1/fd'), OSError)",
        "denied(lambda: os.listdir('/proc/1/root'), OSError)",
        "denied(lambda: os.readlink('/proc/1/exe'), OSError)",
        "denied(lambda: open('/proc/1/oom_score_adj', 'w'), OSError)",
        "denied(lambda: open('/proc/self/oom_score_adj', 'w'), OSError)",
        "call_denied(101, 0x4206, 1, 0, 0)  # PTRACE_SEIZE",
        "call_denied(101, 16, os.getppid(), 0, 0)  # PTRACE_ATTACH",
        "call_denied(310, 1, 0, 0, 0, 0, 0)  # process_vm_readv",
        "call_denied(438, os.pidfd_open(os.getppid()), 0, 0)  # pidfd_getfd",
        "call_denied(272, 0x10000000)  # unshare(CLONE_NEWUSER)",
        "call_denied(56, 0x10000011, 0, 0, 0, 0)  # clone(CLONE_NEWUSER)",
        "call_denied(165, 0, 0, 0, 0, 0)  # mount",
        "call_denied(166, 0, 0)  # umount2",
        "call_denied(161, 0)  # chroot",
        "call_denied(319, 0, 0)  # memfd_create",
        "call_denied(425, 1, 0)  # io_uring_setup",
        "call_denied(321, 0, 0, 0)  # bpf",
        "call_denied(444, 0, 0, 0)  # landlock_create_ruleset: rules that nothing counts",
        "call_denied(445, 0, 1, 0, 0)  # landlock_add_rule",
        "call_denied(317, 1, 0, 0)  # seccomp",
        "call_denied(291, 0)  # epoll_create1",
        "call_denied(41, 2, 1, 0)  # socket(AF_INET)",
        "call_denied(41, 1, 1, 0)  # socket(AF_UNIX)",
        "call_denied(41, 16, 3, 0)  # socket(AF_NETLINK)",
        "denied(lambda: os.mknod('/app/null', 0o20666, os.makedev(1, 3)))",
        "import mmap\ndenied(lambda: mmap.mmap(-1, 1 << 20))",
        "import resource\ndenied(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)), ValueError, OSError)",
        "import resource\ndenied(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)), ValueError, OSError)",
        "denied(lambda: os.setuid(0), OSError)",
        "denied(lambda: os.nice(-5))",
    ],
)
async def test_call_is_denied(boxes, code):
    async with attack(boxes) as box:
        assert await box.python(code) == "held\n"


async def test_setuid_gives_no_rights(boxes):
    async with attack(boxes) as box:
        result = await box.run("cp /usr/bin/id x; chmod 6755 x; ./x -u; chmod u+s /usr/bin/id; su -c id; sudo id")
        assert result.stdout == "1000\n" and result.return_code != 0


async def test_nothing_reaches_a_listener_of_the_machine(boxes):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with attack(boxes) as box:
            result = await box.run(f"echo > /dev/tcp/127.0.0.1/{port} || echo held")
            assert result.stdout == "held\n"
            assert (await box.run(f"git clone http://127.0.0.1:{port}/x || echo held")).stdout == "held\n"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_boxes_see_nothing_of_each_other(boxes):
    async with attack(boxes) as first, attack(boxes) as second:
        await first.run("sleep 1234 & for f in /app /tmp /tests /logs /home/agent; do echo mine > $f/mark; done")
        seen = await second.run(
            "pgrep sleep; cat /app/mark /tmp/mark /tests/mark /logs/mark /home/agent/mark; kill -9 -1; echo"
        )
        assert seen.stdout == "\n", seen
        assert (await first.run("pgrep -c sleep; cat /tests/mark")).stdout == "1\nmine\n"


async def test_memory_in_pipes_sockets_and_locks_is_limited(boxes):
    pipes = """
import os, time
for _ in range(40):
    if not os.fork():
        ends = [os.pipe() for _ in range(100)]
        for _, end in ends:
            os.set_blocking(end, False)
            os.write(end, bytes(65536))
        time.sleep(9)
time.sleep(9)
"""
    locks = """
import fcntl, time
file = open('/app/f', 'w')
for i in range(20_000):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * i)
time.sleep(9)
"""
    async with attack(boxes, memory_mb=100) as box:
        for code, why in ((pipes, "memory limit"), (locks, "lock limit")):
            result = await box.run(f"python3 - <<'END'\n{code}\nEND")
            assert result.return_code == -9 and why in result.stderr, result
            await box.still_works()


async def test_disk_and_inodes_are_limited_and_what_fills_them_can_be_sealed(boxes):
    async with attack(boxes, disk_mb=16) as box:
        result = await box.run("dd if=/dev/urandom of=large bs=1M count=99")
        assert "No space left" in result.stderr
        assert (await box.run("echo lives")).stdout == "lives\n"
        assert "No space left" in (await box.box.run("cat", timeout_s=9, stdin="x" * 100_000)).stderr
        result = await box.run("rm large; python3 -c 'for i in range(30_000): open(str(i), \"w\")'", timeout_s=60)
        assert "No space left" in result.stderr
        sealed = await box.box.seal(["/app"], max_bytes=64 << 10)
        assert len(sealed.archive) < 64 << 10 and sealed.dropped["..."].endswith("more")


async def test_output_is_limited(boxes):
    async with attack(boxes) as box:
        result = await box.run("yes", timeout_s=1)
        assert result.status == "timeout" and len(result.stdout) < (1 << 20) + 100
        await box.still_works()


async def test_timer_that_continues_a_stopped_process_gives_it_no_time(boxes):
    code = """
import os, signal, time
signal.signal(signal.SIGALRM, lambda *_: None)
if not os.fork():
    child = os.getpid()
    if not os.fork():
        while True:
            open('/app/ticks', 'a').write('x')
    while True:
        os.kill(-1, signal.SIGCONT)
"""
    async with attack(boxes) as box:
        await box.run(f"python3 - <<'END'\n{code}\nEND", timeout_s=2)
        size = int((await box.run("stat -c %s ticks; pkill -9 python")).stdout.split()[0])
        await asyncio.sleep(0.3)
        assert size > 0
        await box.still_works()


@pytest.mark.parametrize(
    "command", ["x" * 200_000, "echo \0", "echo '\ud800'", "exec 1>&-; exit 0", "exec 198>&-; cd /tmp"]
)
async def test_command_that_bash_cannot_take_is_its_own_fault(boxes, command):
    async with attack(boxes) as box:
        await box.run(command)
        await box.still_works()


async def test_where_a_command_ends_may_be_anything(boxes):
    async with attack(boxes) as box:
        for said in ("relative", "/proc/1/root", "/nowhere", "/app\\nx", "/" + "y" * 9000, "\\xff"):
            await box.run(f"printf '{said}' >&198; exec true")
            assert (await box.run("pwd")).status == "ok"


async def test_call_ends_at_its_time_whatever_ignores_signals(boxes):
    async with attack(boxes) as box:
        started = time.monotonic()
        result = await box.run("trap '' TERM INT HUP CONT; while true; do sleep 1; done", timeout_s=1)
        assert result.status == "timeout" and time.monotonic() - started < 5
