"""Whether the sandbox answers, isolates, is fast enough for a step's calls, and has each time-out within the next."""

import asyncio
import inspect
import math
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import Any, cast
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from verl_ext.datasets.peek import first_rows
from verl_ext.doctor.finding import Finding, Level, fail, ok, warn
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.environments import IN_BOXES
from verl_ext.sandbox.client import SandboxClient
from verl_ext.sandbox.limits import ANSWER_GRACE_S
from verl_ext.sandbox.load import Load, load
from verl_ext.sandbox.probe import Busy, NotWell, ping, probe

CALLS_PER_RESPONSE = 2.9  # (7.82 - 2) / 2: num_turns/mean of the published run's first step
# For all calls of a step, one after the other through the sandbox; the published step generates for 2,529 s.
SLOW_STEP_S = 120.0
LAYERS_THAT_CONFINE = ("namespaces", "landlock", "seccomp")
MAX_CLIENTS = 128
SHORT_LEASE_S = 60.0  # a process of agent loops that is busy for a quarter of it loses its notebooks
MAX_SESSIONS = 4000  # of one server (sandbox/server/workers.py)
START = "Start it with retool sandbox --port 8080 --workers N, or set SANDBOX_URL."
QUEUE_S, ATTEMPTS = (
    inspect.signature(SandboxClient).parameters[name].default for name in ("queue_timeout_s", "max_attempts")
)


def check_timeouts(run: Run) -> Iterator[Finding]:
    """Check the time-outs of the model's code, of its call with queueing and retries, and of what waits for that."""
    code_s = run.get("retool.sandbox.timeout_s")  # SFT has none; else check_config reports that it is missing
    if not is_needed(run):
        return
    is_wrong = any(each.key.endswith("timeout_s") for each in run.own_problems("value"))  # check_values reports it
    if code_s is None or is_wrong:
        return
    queue_s = run.get("retool.sandbox.queue_timeout_s", QUEUE_S)
    request_s = queue_s / ATTEMPTS + code_s + ANSWER_GRACE_S  # the first attempt, see SandboxClient._attempt
    call_s, calls = code_s + queue_s, run.get("retool.max_tool_calls", 1)
    if queue_s < code_s:
        yield warn(f"""a call may queue for {queue_s:g} s, less than the {code_s:g} s that one program may run: if all
            workers are busy with such programs, calls fail (`failure/sandbox_failure`)
            -> Set retool.sandbox.queue_timeout_s to {2 * code_s:g}, or lower retool.sandbox.timeout_s.""")
    path = run.get(f"{ROLLOUT}.multi_turn.tool_config_path")
    is_there = path and (run.folder / path).is_file()
    for tool in cast(DictConfig, OmegaConf.load(run.folder / path)).get("tools", []) if is_there else []:
        is_ours = tool.class_name.endswith("CodeInterpreter") and "timeout_s" in tool.config
        if is_ours and tool.config.timeout_s != code_s:
            name, other_s = tool.tool_schema.function.name, tool.config.timeout_s
            yield warn(f"""the tool YAML gives {name} {other_s:g} s, but the limit that applies is
                retool.sandbox.timeout_s={code_s:g} -> Set both to the same value.""")
    if request_s >= call_s:
        least = ANSWER_GRACE_S * ATTEMPTS / (ATTEMPTS - 1)
        yield warn(f"""a request may take {request_s:g} s, but its call ends after {call_s:g} s: a slow first attempt
            leaves no time for another
            -> Set retool.sandbox.queue_timeout_s to {QUEUE_S:g}; {least:.3g} is still too short.""")
        return
    yield ok(f"""code {code_s:g} s < request {request_s:g} s < call {call_s:g} s (queueing and {ATTEMPTS} attempts);
        the {calls} calls of a rollout take at most {calls * call_s:g} s, and verl's v1 trainer sets no limit for a
        rollout""")


def check_reachable(run: Run) -> Iterator[Finding]:
    """Check that each server executes a program, says what isolates it, and has the sessions that notebooks need."""
    are_well = True
    if not is_needed(run):
        yield ok("no sandbox is needed: the model has no tool, and no row is for the verifier of code")
        return
    for url in run.get("retool.sandbox.urls", []):  # SFT has none
        if is_address(url):
            finding = _look_at(url.rstrip("/"))
        else:
            finding = fail(f"""retool.sandbox.urls has {url!r}, expected http://HOST:PORT or https://..., without ? and
                # -> Correct it (SANDBOX_URL of the launcher).""")
        are_well &= finding.level is not Level.FAIL
        yield finding
    if are_well and run.is_rl and "notebook" in environments(run):
        yield from check_sessions(run)
    if are_well and run.is_rl and environments(run).intersection(IN_BOXES):
        yield from check_boxes(run)


def environments(run: Run) -> set[str]:
    """Return the names of the environments of a run and of its domains."""
    entries = [
        run.get("retool.environment"),
        *(row.get("environment") for row in run.get("retool.domains", {}).values()),
    ]
    flat = [each for entry in entries for each in (entry if isinstance(entry, list) else [entry])]
    return {str(each.get("name") if isinstance(each, dict) else each) for each in flat if each}


def is_needed(run: Run) -> bool:
    """Tell whether a run may execute code: if an environment may have a tool, or a row goes to the verifier of code."""
    if not run.is_rl or run.protocol != "text" or environments(run):
        return True
    from verl_ext.reward.verifiers import Verifiers  # 0.1 s
    from verl_ext.reward.verifiers.code import CodeVerifier

    with suppress(Exception):  # from whatever a verifier's author wrote; check_verifiers reports it
        verifiers = Verifiers.of_run(run.config)
        rows = (row for _, path in run.all_files() for row in first_rows(path, ["data_source", "ability"], None))
        kinds = {(str(row.get("data_source") or ""), str(row.get("ability") or "")) for row in rows}
        return any(issubclass(verifiers.find_class(*kind), CodeVerifier) for kind in kinds)
    return True


def check_sessions(run: Run) -> Iterator[Finding]:
    """Check that every response that is written at one time can have a notebook, and that none is ended meanwhile."""
    urls = [url.rstrip("/") for url in run.get("retool.sandbox.urls")]
    limits = [ping(url) or {} for url in urls]
    for url, said in zip(urls, limits, strict=True):
        if not said.get("max_sessions"):
            why = (
                "forbids sessions"
                if "max_sessions" in said
                else "reports no sessions; only this package's server has them"
            )
            yield fail(f"""{url} {why}, and `notebook` needs one for each response -> Start
                retool sandbox there, without --max-sessions 0, or set retool.environment=python.""")
            return
        if said["session_idle_s"] < SHORT_LEASE_S:
            yield warn(f"""{url} ends a notebook {said["session_idle_s"]:g} s after its last call or renewal, so a
                process that is busy for a quarter of that loses it -> Start the server with --session-idle-s 600.""")
    yield _room_for_all(run, sum(said["max_sessions"] for said in limits), "notebooks", "--max-sessions")


def check_boxes(run: Run) -> Iterator[Finding]:
    """Check that each server has boxes, and enough of them for every response that is written at one time."""
    urls = [url.rstrip("/") for url in run.get("retool.sandbox.urls")]
    limits = [ping(url) or {} for url in urls]
    needs = " and ".join(sorted(environments(run).intersection(IN_BOXES)))
    for url, said in zip(urls, limits, strict=True):
        if not said.get("max_boxes"):
            why = said.get("no_boxes") or "only this package's server has them"
            yield fail(f"""{url} has no boxes ({why}), and {needs} needs one for each response
                -> Start retool sandbox there, without --max-boxes 0, and see docs/guides/sandbox.md
                for what a container must allow.""")
            return
    yield _room_for_all(run, sum(said["max_boxes"] for said in limits), "boxes", "--max-boxes")


def _room_for_all(run: Run, allowed: int, what: str, option: str) -> Finding:
    """Say whether the servers allow as many notebooks or boxes as there are responses at one time."""
    wanted, number = responses_at_once(run), len(run.get("retool.sandbox.urls"))
    text = f"up to {wanted:,} responses are written at one time"
    if wanted <= allowed:
        return ok(f"{text}, and {allowed:,} {what} may exist")
    each, wait_s = math.ceil(wanted / number), run.get("retool.sandbox.queue_timeout_s", QUEUE_S)
    start = f"Start {'each' if number > 1 else 'the'} server with {option} {min(each, MAX_SESSIONS)}"
    more = f", and {math.ceil(wanted / MAX_SESSIONS)} servers (SANDBOX_URL)" if each > MAX_SESSIONS else ""
    return warn(f"""{text}, but {allowed:,} {what} may exist: further ones wait for at most
        retool.sandbox.queue_timeout_s={wait_s:g}, and then fail -> {start}{more}.""")


def responses_at_once(run: Run) -> int:
    """Return how many responses may be written at one time: of the batch, of those that replace its useless groups, or
    of those that an asynchronous mode keeps ahead of it."""
    mode = run.get("trainer.v1.trainer_mode", "sync")
    if mode == "sync":
        return round(run.batch * run.n * _most_batches(run))
    return math.ceil(run.batch * run.n * (1 + run.get(f"trainer.v1.{mode}.num_warmup_batches", 0)))


def is_address(url: Any) -> bool:
    """Tell whether `/run_code` can be appended to it."""
    try:
        parts = urlsplit(url)
        is_host = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return is_host and not set("?#") & set(url)
    except (ValueError, TypeError, AttributeError):  # port not a number; brackets without an address; not text
        return False


def _look_at(base: str) -> Finding:
    try:
        layers = probe(base)
    except Busy as error:
        return warn(f"{error} -> Use more workers, or wait.")
    except NotWell as error:
        return fail(f"{error} -> {'Set SANDBOX_TOKEN.' if error.status == 401 else START}")
    if layers is None:
        return warn(f"""{base} runs code, but does not report what isolates it
            -> Make sure that it runs in a separate container or VM.""")
    if missing := [layer for layer in LAYERS_THAT_CONFINE if layer not in layers]:
        return warn(f"""{base} runs code with {", ".join(layers) or "no isolation"}; {", ".join(missing)} is off
            -> See docs/guides/sandbox.md for what each stops and what a container must allow, or use a VM.""")
    return ok(f"{base} runs code, isolated by {', '.join(layers)}")


def calls_per_step(run: Run) -> tuple[float, float]:
    """Return (expected, at most): prompts x n x calls; at most means all calls and dynamic sampling's most batches."""
    responses, most = run.batch * run.n, run.get("retool.max_tool_calls", 1)
    return responses * min(CALLS_PER_RESPONSE, most), responses * most * _most_batches(run)


def _most_batches(run: Run) -> float:
    groups = run.get("algorithm.filter_groups", {})
    return (groups.get("max_num_gen_batches") or 1) if groups.get("enable") else 1


def check_load(run: Run, *, seconds: float) -> Iterator[Finding]:
    """Load the sandbox as the run's agent loops would."""
    if not (run.is_rl and is_needed(run)):
        return
    settings = run.get("retool.sandbox")
    clients = min(MAX_CLIENTS, run.get(f"{ROLLOUT}.agent.num_workers", 1) * settings["max_concurrency"])
    limits = {name: settings[name] for name in ("timeout_s", "memory_limit_mb")}

    async def measure() -> Load:
        async with aclosing(SandboxClient(settings["urls"], max_concurrency=clients)) as client:
            return await load(client, clients=clients, seconds=seconds, **limits)

    try:
        seen = asyncio.run(measure())
    except ValueError as error:  # a server refuses the request itself
        yield fail(f"the load test was refused: {error} -> Correct retool.sandbox.")
        return
    if seen.faults:
        yield fail(f"""{len(seen.faults)} of {len(seen.latencies)} calls of {clients} clients failed: {seen.faults[0]}
            -> See the server's log. Use more workers or servers (SANDBOX_URL takes several), or raise
            memory_limit_mb.""")
        return
    yield from judge_load(run, seen, clients)


def judge_load(run: Run, seen: Load, clients: int) -> Iterator[Finding]:
    """Report what the load test means for a step."""
    expected, most = calls_per_step(run)
    step_s, limit_s = expected / seen.rate, run.get("retool.sandbox.timeout_s")
    text = f"""{clients} clients get {seen.rate:.0f} sympy programs a second (p50 {seen.p50 * 1e3:.0f} ms, p99
        {seen.p99 * 1e3:.0f} ms). A step of {run.batch} prompts x {run.n} x {expected / run.batch / run.n:.1f} calls =
        {expected:,.0f} takes the sandbox {step_s:,.0f} s, and at most {most / seen.rate:,.0f} s ({most:,.0f} calls)"""
    if seen.p99 > limit_s:
        yield fail(f"{text}; the p99 is above retool.sandbox.timeout_s={limit_s:g} -> Use more workers, or less load.")
    elif step_s > SLOW_STEP_S:
        yield warn(f"""{text}
            -> Use about {step_s / SLOW_STEP_S:.1f} times as many workers (a core each), or more URLs, to reach
            {SLOW_STEP_S:g} s.""")
    else:
        yield ok(text)
