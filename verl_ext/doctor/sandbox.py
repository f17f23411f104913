"""The sandbox: there, isolating, and fast enough for the calls of a step."""

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.run import Run
from verl_ext.sandbox.client import SandboxClient
from verl_ext.sandbox.load import Load, load

topic = Topic("sandbox")
PING_S = 10.0
CALLS_PER_RESPONSE = 2.9  # (7.82 - 2) / 2: num_turns/mean of the published run's first step
SLOW_STEP_S = (
    120.0  # of all calls of a step, one after the other through the sandbox; the published step generates for 2,529 s
)
LAYERS_THAT_CONFINE = ("namespaces", "landlock", "seccomp")
MAX_CLIENTS = 128


def check_reachable(run: Run) -> Iterator[Finding]:
    """Each server executes a program, and says what isolates it. A server that only listens may answer nothing."""
    if not run.is_rl:
        return
    start = "Start it: python -m verl_ext.sandbox.server --port 8080 --workers N, or set SANDBOX_URL."
    for url in run.get("retool.sandbox.urls", []):
        base = url.rstrip("/")
        try:
            answer = json.loads(_request(f"{base}/run_code", {"code": "print(6 * 7)", "language": "python"}))
            printed = answer["run_result"]["stdout"]
        except (TimeoutError, urllib.error.HTTPError) as error:
            busy = isinstance(error, TimeoutError) or error.code in (503, 504)
            if busy and _layers(base) is not None:  # its ping runs a program past the queue
                yield topic.warn(f"{base} works, but is too busy to take a program", "More workers, or wait.")
                continue
            if isinstance(error, TimeoutError):
                yield topic.fail(f"{base} did not run print(6 * 7) within {PING_S:g} s", start)
                continue
            advice = "Set SANDBOX_TOKEN." if error.code == 401 else start
            yield topic.fail(f"{base} answers HTTP {error.code} {error.reason}", advice)
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield topic.fail(f"{base} does not run code: {getattr(error, 'reason', error)}", start)
            continue
        if printed != "42\n":
            yield topic.fail(f"{base}: print(6 * 7) gave {printed!r}, {answer.get('message', '')}", start)
            continue
        yield from _check_layers(base)


def _check_layers(base: str) -> Iterator[Finding]:
    layers = _layers(base)
    if layers is None:
        yield topic.warn(
            f"{base} runs code, and does not say what isolates it", "See to it that it is a container or VM of its own."
        )
    elif missing := [layer for layer in LAYERS_THAT_CONFINE if layer not in layers]:
        yield topic.warn(
            f"{base} runs code with {', '.join(layers) or 'no isolation'}; {', '.join(missing)} is off",
            "docs/sandbox.md: what each stops, and what a container must allow; else give it a VM.",
        )
    else:
        yield topic.ok(f"{base} runs code, isolated by {', '.join(layers)}")


def _layers(base: str) -> list[str] | None:
    """Of isolation, as the server's ping tells; None where it is not well, or another server than ours."""
    try:
        return json.loads(_request(f"{base}/v1/ping")).get("layers")
    except (OSError, ValueError, AttributeError):
        return None


def _request(url: str, body: dict | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("SANDBOX_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=PING_S) as response:
        return response.read()


def calls_per_step(run: Run) -> tuple[float, float]:
    """(expected, at the most): prompts x n x calls, and with dynamic sampling's most batches and all calls allowed."""
    responses = run.get("data.train_batch_size") * run.get("actor_rollout_ref.rollout.n")
    most = run.get("retool.max_tool_calls", 1)
    groups = run.get("algorithm.filter_groups", {}) or {}
    batches = (groups.get("max_num_gen_batches") or 1) if groups.get("enable") else 1
    return responses * min(CALLS_PER_RESPONSE, most), responses * most * batches


def check_load(run: Run, *, seconds: float) -> Iterator[Finding]:
    """Loads the sandbox as the run's agent loops would."""
    if not run.is_rl:
        return
    settings = run.get("retool.sandbox")
    workers = run.get("actor_rollout_ref.rollout.agent.num_workers", 1)
    clients = min(MAX_CLIENTS, workers * settings["max_concurrency"])

    async def measure() -> Load:
        client = SandboxClient(settings["urls"], max_concurrency=clients)
        try:
            return await load(
                client,
                clients=clients,
                seconds=seconds,
                timeout_s=settings["timeout_s"],
                memory_limit_mb=settings["memory_limit_mb"],
            )
        finally:
            await client.aclose()

    try:
        seen = asyncio.run(measure())
    except ValueError as error:  # a server refuses the request as such
        yield topic.fail(f"under load: {error}", "Correct retool.sandbox.")
        return
    if seen.faults:
        yield topic.fail(
            f"{len(seen.faults)} of {len(seen.latencies)} calls of {clients} clients failed: {seen.faults[0]}",
            "See the server's log; more workers or servers (SANDBOX_URL takes several), a larger memory_limit_mb.",
        )
        return
    yield from judge_load(run, seen, clients)


def judge_load(run: Run, seen: Load, clients: int) -> Iterator[Finding]:
    """What the load test means for a step."""
    expected, most = calls_per_step(run)
    step_s = expected / seen.rate
    prompts, n = run.get("data.train_batch_size"), run.get("actor_rollout_ref.rollout.n")
    text = (
        f"{clients} clients get {seen.rate:.0f} sympy programs a second (p50 {seen.p50 * 1e3:.0f} ms, p99 "
        f"{seen.p99 * 1e3:.0f} ms). A step of {prompts} prompts x {n} x {expected / prompts / n:.1f} calls = "
        f"{expected:,.0f} takes the sandbox {step_s:,.0f} s, at the most ({most:,.0f} calls) {most / seen.rate:,.0f} s"
    )
    limit_s = run.get("retool.sandbox.timeout_s")
    if seen.p99 > limit_s:
        yield topic.fail(f"{text}; the p99 is over retool.sandbox.timeout_s={limit_s:g}", "More workers, or less load.")
    elif step_s > SLOW_STEP_S:
        factor = step_s / SLOW_STEP_S
        yield topic.warn(
            text,
            f"About {factor:.1f} times the workers (a core each) make it {SLOW_STEP_S:g} s: --workers, or more URLs.",
        )
    else:
        yield topic.ok(text)
