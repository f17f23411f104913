"""What a program of the agent can do to the tests that run it with as-agent."""

import pytest

from tests.unit.sandbox.hostile.box_attacks import SECRET, attack

FILES = {"tests/secret": SECRET, "logs/old": SECRET, "solution/solve.sh": SECRET, "tmp/expected": SECRET, "app/in": "7"}


@pytest.mark.parametrize(
    "command",
    [
        "cat /tests/secret /logs/old /solution/solve.sh /tmp/expected",
        "ls /tests /logs /solution /tmp /home/agent /",
        "for of in self/root self/cwd/.. 1/root; do cat /proc/$of/tests/secret; done",
        "ln -s /tests/secret /app/l; cat /app/l",
        "ln /tests/secret /app/h; cat /app/h",
        "mv /tests/secret /app/h; cat /app/h",
        "cp -r /tests /app/t; cat /app/t/secret",
        "cat <&5; cat /proc/self/fd/5; cat /dev/fd/5",
        "cat /proc/$PPID/environ /proc/$PPID/cmdline /proc/$PPID/fd/5",
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/cwd/secret",
        "as-agent cat /tests/secret",
        "find / -name secret -exec cat {} +",
        "python3 -c 'import mmap; mmap.mmap(open(\"/tests/secret\").fileno(), 0)'",
        "tar cf - /tests | cat",
        "git -C /tests init; git hash-object /tests/secret -w",
    ],
)
async def test_program_reads_nothing_of_the_tests(boxes, command):
    async with attack(boxes, FILES) as box:
        await box.run("cd /tests; exec 5< secret; export KEPT=1")
        script = (
            f"cd /tests; exec 5< secret; SECRET={SECRET} true; as-agent bash -c '{_quoted(command)}' 2>&1; echo ended"
        )
        result = await box.run(script)
    assert SECRET not in result.stdout and result.stdout.endswith("ended\n"), result


@pytest.mark.parametrize(
    "command",
    [
        "echo x > /tests/test.sh; echo x > /logs/reward; echo x > /solution/x; echo x > /tmp/x; echo x > /home/agent/x",
        "rm -rf /tests /logs /solution /tmp/expected /home/agent",
        "mv /tests /app/; mv /app /app2; ln -sf /app/in /tests/secret",
        "touch /tests/secret; chmod 0 /tests/secret /tests /logs; truncate -s 0 /logs/old",
        "mkdir /tests/d /logs/verifier; mkfifo /tests/f; ln /app/in /tests/in; ln -s /app/in /logs/in",
        "echo x > /proc/$PPID/comm; echo x > /proc/$PPID/fd/1; echo x > /run/box/bin/as-agent; echo x > /etc/passwd",
        "umount /tests; umount -l /app; mount -t tmpfs x /tests; unshare -Ur true; chroot /app",
        'python3 -c \'import os; os.setxattr("/tests/secret", "user.x", b"")\'',
    ],
)
async def test_program_changes_nothing_of_the_tests(boxes, command):
    look = "find /tests /logs /solution /tmp/expected /home/agent -printf '%p %m %s %T@\\n' | sort; cat /tests/secret"
    async with attack(boxes, FILES) as box:
        before = await box.run(look)
        assert (await box.run(f"as-agent bash -c '{_quoted(command)}' > /dev/null 2>&1")).status != "timeout"
        assert (await box.run(look)).stdout == before.stdout


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 -1; kill -9 0; kill -9 $PPID",
        "for pid in $(seq 1 99); do kill -9 $pid; done",
        "kill -STOP -1; for pid in $(seq 1 99); do kill -STOP $pid; done",
        "python3 -c 'import os, signal\nfor n in range(1, 99):\n  try: os.killpg(n, 9)\n  except OSError: pass'",
        "for pid in $(seq 1 99); do renice 19 $pid; taskset -p 1 $pid; prlimit --pid $pid --nproc=1; done",
        "ulimit -u 1; ulimit -f 0; ulimit -n 4",
        "exec 1>&- 2>&-; sleep 0.1",
    ],
)
async def test_program_does_not_touch_the_processes_of_the_tests(boxes, command):
    async with attack(boxes, FILES) as box:
        script = f"sleep 30 & other=$!; timeout 3 as-agent bash -c '{_quoted(command)}' > /dev/null 2>&1"
        result = await box.run(
            f"{script}; kill -0 $other && echo alive; ps -o s= -p $other; ulimit -u; kill $other; seq 3 | tail -1"
        )
    assert result.stdout.replace(" ", "") == "alive\nS\n128\n3\n", result


@pytest.mark.parametrize("call", ["101, 0x4206, PID, 0, 0", "310, PID, 0, 0, 0, 0, 0", "311, PID, 0, 0, 0, 0, 0"])
async def test_program_does_not_trace_or_read_the_tests(boxes, call):
    async with attack(boxes, FILES) as box:
        code = f"PID = os.getppid()\ncall_denied({call})\ndenied(lambda: open(f'/proc/{{PID}}/mem', 'rb+'), OSError)"
        assert await box.python(code, with_="as-agent python3") == "held\nheld\n"


@pytest.mark.parametrize(
    "leave",
    [
        "sleep 77 &",
        "setsid sleep 77 &",
        "setsid bash -c 'setsid sleep 77 & disown' &",
        "trap '' TERM HUP INT; nohup sleep 77 & sleep 0.1; kill -STOP $!",
        "python3 -c 'import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(77)'",
    ],
)
async def test_nothing_outlives_the_program(boxes, leave):
    async with attack(boxes, FILES) as box:
        result = await box.run(f"as-agent bash -c '{_quoted(leave)}' > /dev/null 2>&1; pgrep -l 'sleep|python'")
        assert result.stdout == "", result
        result = await box.run(
            f"timeout 0.5 as-agent bash -c '{_quoted(leave)}; sleep 78'; pgrep -l 'sleep|python'; echo $?"
        )
        assert result.stdout == "1\n", result


async def test_fork_bomb_under_as_agent_ends_with_it(boxes):
    async with attack(boxes, FILES) as box:
        result = await box.run(
            "timeout 1 as-agent bash -c 'bomb() { bomb | bomb & }; bomb; sleep 9' 2> /dev/null; true"
        )
        assert result.status == "ok"
        assert (await box.run("pgrep -c .")).stdout == "1\n"


async def test_program_works_where_it_may(boxes):
    script = """
echo 6 | as-agent bash -c 'read n; echo $((n * $(cat in))); pwd; echo $TMPDIR; touch $TMPDIR/a out; ls /tmp/a; exit 9'
echo $?
as-agent python3 -c 'import tempfile, sqlite3, os, sys
with tempfile.TemporaryDirectory() as folder:
    sqlite3.connect(folder + "/d").execute("create table t (x)").connection.commit()
open(os.devnull, "w").write("x"); print(sorted(os.listdir("/app")), os.urandom(1) != b""); sys.exit(4)'; echo $?
as-agent ./nothing; echo $?; as-agent ./in; echo $?; as-agent bash -c 'kill -9 $$'; echo $?; as-agent; echo $?
cd /tests; as-agent pwd; as-agent as-agent as-agent cat in; echo
ulimit -f 1; as-agent bash -c 'ulimit -f; X=$Y; echo $Y' ; Y=set as-agent bash -c 'echo $Y'; cat /tmp/as-agent/a
as-agent cp in /tmp/b; cat /tmp/as-agent/b; echo; as-agent bash -c 'chmod 700 in; stat -c %a in; echo $$'
"""
    async with attack(boxes, FILES) as box:
        result = await box.run(script)
    lines = ["42", "/app", "/tmp", "/tmp/a", "9", "['in', 'out'] True", "4", "127", "126", "137", "125", "/app", "7"]
    lines += ["1", "", "set", "7", "700", "2"]
    assert result.stdout.splitlines() == lines, result


async def test_streams_that_are_closed_or_pipes_reach_the_program_as_they_are(boxes):
    script = (
        "as-agent cat <&-; echo $?; as-agent echo out >&-; echo $?; as-agent sh -c 'echo err >&2; exit 3' 2>&-; echo $?"
    )
    script += "; (echo a; sleep 0.2; echo b) | as-agent cat | as-agent tac; as-agent yes | head -1; echo done"
    async with attack(boxes, FILES) as box:
        result = await box.run(f"timeout 5 bash <<'END'\n{script}\nEND")
    assert result.stdout.split() == ["0", "0", "3", "b", "a", "y", "done"], result


async def test_program_that_cannot_be_confined_does_not_run(boxes):
    """The worker has 32 runs at once."""
    async with attack(boxes, FILES) as box:
        result = await box.run("as-agent " * 33 + "touch /app/ran; echo $?; ls /app")
    assert result.stdout == "125\nin\n", result
    assert "could not be confined" in result.stderr


async def test_command_line_that_is_too_long_is_refused_and_not_cut(boxes):
    """The worker reads 1 MiB of it, and the kernel takes 2 MiB."""
    words = "word=$(printf %0100000d 0); for n in 10 11; do as-agent echo $(yes $word | head -n $n) | wc -c; "
    async with attack(boxes, FILES) as box:
        result = await box.run(words + "echo ${PIPESTATUS[0]}; done")
    assert result.stdout.split() == ["1000010", "0", "0", "125"], result
    assert result.stderr == "as-agent: could not be confined: Argument list too long\n"


def _quoted(command: str) -> str:
    return command.replace("'", "'\\''")
