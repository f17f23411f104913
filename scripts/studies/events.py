"""Simulate discrete events: inference servers that share their speed among turns, a sandbox with workers, a clock.

A server admits up to `slots` turns, first come first served; a response that comes back from the sandbox queues again,
as a new request does in vLLM. Every admitted turn gets one token per iteration, and an iteration takes
`iteration_s + context_s x (tokens in the contexts of all admitted turns)`. Prefill costs nothing.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scripts.studies.workload import Group, Response


@dataclass(frozen=True)
class Speed:
    """A server's speed: turns at once, seconds of an iteration, and additional seconds for each token of context."""

    slots: int
    iteration_s: float
    context_s: float


class Server:
    """One inference server. `position` counts iterations; a turn of n tokens admitted at position p ends at p + n."""

    def __init__(self, speed: Speed):
        self.speed = speed
        self.waiting: deque[Response] = deque()
        self.admitted: list[tuple[float, int, Response]] = []  # heap by end position
        self.position = self.context = 0.0
        self.is_paused = False
        self._order = itertools.count()

    def ask(self, response: Response) -> None:
        self.waiting.append(response)
        self.admit()

    def admit(self) -> None:
        while self.waiting and len(self.admitted) < self.speed.slots:
            response = self.waiting.popleft()
            self.context += response.context
            heapq.heappush(self.admitted, (self.position + response.turn_tokens, next(self._order), response))

    def seconds_to_next(self) -> float:
        """Return the seconds until the first admitted turn ends, if nothing changes earlier."""
        if self.is_paused or not self.admitted:
            return math.inf
        tokens = self.admitted[0][0] - self.position
        now, growth = self._rates()
        return tokens * (now + growth * tokens)

    def pass_time(self, seconds: float) -> None:
        """Let every admitted turn continue for `seconds`, which are at most `seconds_to_next`."""
        if self.is_paused or not self.admitted:
            return
        now, growth = self._rates()
        tokens = (math.sqrt(now**2 + 4 * growth * seconds) - now) / (2 * growth) if growth else seconds / now
        tokens = min(tokens, self.admitted[0][0] - self.position)
        self.position += tokens
        self.context += tokens * len(self.admitted)

    def end_first(self) -> Response:
        """Take out the first turn, which has ended."""
        self.context += (self.admitted[0][0] - self.position) * len(self.admitted)  # rounding
        self.position, _, response = heapq.heappop(self.admitted)
        response.context += response.turn_tokens
        self.context -= response.context
        self.admit()
        return response

    def _rates(self) -> tuple[float, float]:
        """Return rates: t tokens from now take t x (first + second x t) s, as each context grows per iteration."""
        speed = self.speed
        return speed.iteration_s + speed.context_s * self.context, speed.context_s * len(self.admitted) / 2


class Simulation:
    """Servers, a sandbox and a clock. `on_group` is called with each group whose responses are all there."""

    def __init__(self, servers: int, speed: Speed, *, workers: int, tool_s: float, on_group: Callable[[Group], None]):
        self.now_s = 0.0
        self.servers = [Server(speed) for _ in range(servers)]
        self.free_workers, self.tool_s = workers, tool_s
        self.calls: deque[tuple[Response, Server]] = deque()  # wait for a worker
        self.on_group = on_group
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._issued = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now_s + seconds, next(self._order), action))

    def issue(self, group: Group) -> None:
        """Send the responses of a group to the servers in rotation."""
        for response in group.responses:
            self._ask(response, self.servers[self._issued % len(self.servers)])
            self._issued += 1

    def pause(self, is_paused: bool) -> None:
        for server in self.servers:
            server.is_paused = is_paused

    def run(self, is_over: Callable[[], bool]) -> None:
        """Simulate events until `is_over`.

        Raises:
            RuntimeError: no event is left, and it is not over.
        """
        while not is_over():
            waits = [server.seconds_to_next() for server in self.servers]
            first = min(waits)
            timer = self._timers[0][0] - self.now_s if self._timers else math.inf
            if min(first, timer) == math.inf:
                raise RuntimeError(f"At {self.now_s:g} s nothing runs and nothing is due, but the end is not reached.")
            is_timer = timer <= first
            step = max(0.0, min(first, timer))
            for server in self.servers:
                server.pass_time(step)
            self.now_s += step
            if is_timer:
                heapq.heappop(self._timers)[2]()
            else:
                self._end_turn(self.servers[waits.index(first)])

    def _ask(self, response: Response, server: Server) -> None:
        response.asked_s = self.now_s
        server.ask(response)

    def _end_turn(self, server: Server) -> None:
        response = server.end_first()
        response.generate_s += self.now_s - response.asked_s
        response.turns -= 1
        if response.turns:
            self.calls.append((response, server))
            self._start_calls()
            return
        response.group.open -= 1
        if not response.group.open:
            self.on_group(response.group)

    def _start_calls(self) -> None:
        while self.calls and self.free_workers:
            self.free_workers -= 1
            response, server = self.calls.popleft()
            self.after(self.tool_s, lambda response=response, server=server: self._end_call(response, server))

    def _end_call(self, response: Response, server: Server) -> None:
        self.free_workers += 1
        response.context += response.tool_tokens
        self._ask(response, server)
        self._start_calls()
