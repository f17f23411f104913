"""Run a program that the agent wrote so that it cannot reach the tests that run it: `as-agent CMD ARGS`.

It is on the PATH of every box. Where CMD runs there are the system, /app, which it may change, and an empty /tmp of its
own ($HOME and $TMPDIR), which the tests see as /tmp/as-agent; no other file of /tests, /logs, /solution or /tmp, and no
process of the tests. CMD keeps stdin, stdout and stderr, the environment and the limits (`ulimit`), and no other open
file. What it starts ends with it, and it ends with this process: bound its time by `timeout 10 as-agent CMD`.

Exit code: that of CMD; 128 + N after signal N; 127 or 126 if CMD cannot be run; 125 if it could not be confined. This
process only asks the box's worker (agent_runs.py), which runs CMD, and waits for its end.
"""

import ctypes
import fcntl
import os
import signal
import sys

CREATE_RULESET, OF_AS_AGENT = 444, 0x61676E74  # no ruleset is made: the worker answers this call, and nobody else's


def main() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    end = libc.syscall(CREATE_RULESET, 0, 0, OF_AS_AGENT) if len(sys.argv) > 1 else -1
    if end < 0:
        why = os.strerror(ctypes.get_errno()) if len(sys.argv) > 1 else "usage: as-agent CMD ARGS"
        print(f"as-agent: could not be confined: {why}", file=sys.stderr)
        return 125
    end = fcntl.fcntl(end, fcntl.F_DUPFD, 3)  # a caller may have closed a standard stream
    stopped_by = []

    def stop(number: int, _frame: object) -> None:
        stopped_by.append(number)
        os.write(end, b"s")  # it answers once everything is dead

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    os.closerange(0, 3)  # whoever reads what CMD prints waits for CMD only
    code = os.read(end, 1)
    if stopped_by:
        return 128 + stopped_by[0]
    return code[0] if code else 125


if __name__ == "__main__":
    os._exit(main())
