"""Time-outs, each within the next: the model's code, its call with queueing and retries, and who waits for that."""

import inspect
from collections.abc import Iterator

from omegaconf import OmegaConf

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.run import Run
from verl_ext.sandbox.client import ANSWER_GRACE_S, SandboxClient
from verl_ext.settings import MAX_CODE_S

topic = Topic("time-outs")
QUEUE_S, ATTEMPTS = (
    inspect.signature(SandboxClient).parameters[name].default for name in ("queue_timeout_s", "max_attempts")
)


def check_timeouts(run: Run) -> Iterator[Finding]:
    if not run.is_rl:
        return
    code_s = run.get("retool.sandbox.timeout_s", 0)
    queue_s = run.get("retool.sandbox.queue_timeout_s", QUEUE_S)
    if not 0 < code_s <= MAX_CODE_S:
        yield topic.fail(f"retool.sandbox.timeout_s={code_s}: the sandbox takes (0, {MAX_CODE_S}] s", "Correct it.")
        return
    if queue_s <= 0:
        yield topic.fail(
            f"retool.sandbox.queue_timeout_s={queue_s}: a call would have no time beyond its code's", "Set it to 60."
        )
        return
    request_s = queue_s / ATTEMPTS + code_s + ANSWER_GRACE_S  # the first attempt, see SandboxClient._attempt
    call_s, calls = code_s + queue_s, run.get("retool.max_tool_calls", 1)
    if queue_s < code_s:
        yield topic.warn(
            f"a call may queue for {queue_s:g} s, less than the {code_s:g} s that one program may run: when all "
            "workers are busy with such programs, calls are lost (`failure/sandbox_failure`)",
            f"Set retool.sandbox.queue_timeout_s to {2 * code_s:g}, or lower retool.sandbox.timeout_s.",
        )
    for tool, tool_code_s in _tool_timeouts(run):
        if tool_code_s != code_s:
            yield topic.warn(
                f"the tool YAML gives {tool} {tool_code_s:g} s, but code runs by retool.sandbox.timeout_s={code_s:g}",
                "Set both to the same.",
            )
    if request_s >= call_s:
        least = ANSWER_GRACE_S * ATTEMPTS / (ATTEMPTS - 1)
        yield topic.warn(
            f"a request may take {request_s:g} s, but its call ends after {call_s:g} s: a slow first attempt leaves no "
            "time for another",
            f"Set retool.sandbox.queue_timeout_s to {QUEUE_S:g}; {least:.3g} is too little.",
        )
        return
    yield topic.ok(
        f"code {code_s:g} s < request {request_s:g} s < call {call_s:g} s (queueing and {ATTEMPTS} attempts); {calls} "
        f"calls of a rollout take {calls * call_s:g} s at the worst, and nothing in verl's v1 trainer limits a rollout"
    )


def _tool_timeouts(run: Run) -> Iterator[tuple[str, float]]:
    """(name, seconds) of the code interpreter in the tool YAML, where there is one."""
    path = run.get("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    if not path or not (run.folder / path).is_file():
        return
    for tool in OmegaConf.load(run.folder / path).get("tools", []):
        if tool.class_name.endswith("CodeInterpreter") and "timeout_s" in tool.config:
            yield tool.tool_schema.function.name, tool.config.timeout_s
