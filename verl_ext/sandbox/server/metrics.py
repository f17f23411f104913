"""The metrics of `GET /metrics`, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily

from verl_ext.sandbox.server.boxes import Boxes
from verl_ext.sandbox.server.pool import Pool
from verl_ext.sandbox.server.sessions import Sessions

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counts what the server answers, and asks the pool for the rest.

    `outcome` of a request is ok, code_error, timeout (as `client.RunResult`), sandbox_error, overloaded (504, 503),
    rejected (4xx) or hung_up (the client did not wait for the answer).
    """

    def __init__(self, pool: Pool, sessions: Sessions, boxes: Boxes) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, CPU time and file descriptors of the server's own process
        self.requests = Counter("sandbox_requests", "Requests to run code.", ["outcome"], registry=self._registry)
        self.queue_time = self._histogram("sandbox_queue_seconds", "Time that a request waited for a worker.")
        self.run_time = self._histogram("sandbox_run_seconds", "Time that a program ran.")
        for name, text, function in (
            ("sandbox_requests_waiting", "Requests that wait for a worker.", lambda: pool.waiting),
            ("sandbox_requests_running", "Requests that run.", lambda: pool.running),
            ("sandbox_sessions", "Sessions.", lambda: len(sessions)),
            ("sandbox_boxes", "Boxes.", lambda: len(boxes)),
        ):
            Gauge(name, text, registry=self._registry).set_function(function)
        self._workers = (pool.workers, boxes.workers)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=SECONDS)

    def collect(self) -> list[CounterMetricFamily]:
        """Return the counts that the pool keeps; called by the registry."""
        family = CounterMetricFamily("sandbox_restarts", "Processes that died or were killed.", labels=["process"])
        for process in ("zygote", "worker"):
            family.add_metric([process], sum(workers.restarts[process] for workers in self._workers))
        return [family]
