"""What a program prints, in memory that no later program inherits; see worker.py."""

import os

from .program import CHUNK
from .wire import unshared


class Buffer:
    """The first `max_bytes` bytes of a stream, and the count of all its bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.total = max_bytes, 0
        self.memory = memoryview(unshared(max_bytes + CHUNK))

    def reset(self) -> None:
        self.total = 0

    def read_from(self, fd: int) -> int:
        """Read once from a pipe, beyond `max_bytes` over earlier bytes; return 0 at its end, -1 if there is nothing.

        The program can also open its pipe for reading, and take what `poll` saw. Data that it has spliced there can be
        unreadable (EIO, ENODATA), and then stays in front of all that follows: the stream ends there.
        """
        start = min(self.total, self.max_bytes)
        try:
            count = os.readv(fd, [self.memory[start : start + CHUNK]])
        except BlockingIOError:
            return -1
        except OSError:
            return 0
        self.total += count
        return count

    def append(self, text: bytes) -> None:
        """Add a line from the worker; if there is no room, it replaces the last bytes that are kept."""
        start = min(self.total, self.max_bytes - len(text))
        if start >= 0:
            self.memory[start : start + len(text)] = text
            self.total += len(text)

    def kept(self) -> memoryview:
        return self.memory[: min(self.total, self.max_bytes)]
