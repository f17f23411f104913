"""One client for each process: its bound on concurrent calls must hold over all rollouts that the process runs."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from verl_ext.sandbox.client import SandboxClient
from verl_ext.sandbox.rate_limit import RateLimit

SETTINGS = ("urls", "max_concurrency", "queue_timeout_s", "max_calls_per_s")


def shared_client(settings: Mapping[str, Any]) -> SandboxClient:
    """Return the process's client for `retool.sandbox` of a run, or for the `config` of a tool.

    Args:
        settings: `urls`; optional `max_concurrency` (calls in flight per process), `queue_timeout_s`,
            `max_calls_per_s` (of all processes of the Ray cluster together). Other keys are ignored.
    """
    chosen = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    return _client(tuple(chosen.pop("urls")), tuple(sorted(chosen.items())))


@cache
def _client(urls: tuple[str, ...], settings: tuple[tuple[str, float], ...]) -> SandboxClient:
    options = dict(settings)
    acquire = None
    if "max_calls_per_s" in options:
        acquire = RateLimit(options.pop("max_calls_per_s")).acquire
    return SandboxClient(urls, acquire=acquire, **options)
