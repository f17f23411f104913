"""The outcome of one program, and what the model sees of it."""

import signal
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "code_error", "timeout", "sandbox_failure"]


@dataclass(frozen=True)
class RunResult:
    """The outcome of one program.

    `ok`: it ended with exit code 0. `code_error`: it ended with another. `timeout`: it was killed at its time limit;
    stdout and stderr hold what it had printed. `sandbox_failure`: the sandbox failed, the code is not to blame, and
    `message` says what happened. A program that takes its worker with it each time is a `code_error` (-9) if the server
    says so: what a program does to itself must not excuse it.
    """

    status: Status
    stdout: str
    stderr: str
    return_code: int | None  # -N after signal N; None after a timeout or a sandbox failure
    queue_s: float  # wait for a free slot of this client and for a worker of the server, in the last attempt
    run_s: float  # time that the program ran
    attempts: int  # requests sent
    message: str  # empty unless sandbox_failure
    session_ended: bool = False  # the program died, or was killed: the next call of its session begins a new one
    program_lost: bool = False  # of a sandbox_failure: the program was lost with its worker, perhaps by its own doing
    found_no_place: bool = False  # of a sandbox_failure: our server was well, but had no worker for it in time

    def error_text(self, timeout_s: float) -> str:
        """Return `stderr`, and how the program ended if it did not say so itself; for the model.

        An exit code of 1 is omitted if stderr has text, because Python writes one for each exception.

        Args:
            timeout_s: the time limit that the program had.
        """
        if self.status == "timeout":
            return f"{self.stderr}\nTimeoutError: stopped after {timeout_s:g} s"
        code = self.return_code or 0
        if code < 0:
            return f"{self.stderr}\nKilled by signal {-code} ({_signal_name(-code)})"
        if code and not self.stderr.strip():
            return f"Exited with code {code}"
        # On the last line, which may be all that the model is shown.
        return f"{self.stderr.rstrip()} [exited with code {code}]" if code > 1 else self.stderr


def _signal_name(number: int) -> str:
    try:
        return signal.strsignal(number) or "unknown"
    except ValueError:  # of another sandbox's machine
        return "unknown"
