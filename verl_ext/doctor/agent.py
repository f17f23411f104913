"""Whether the agent of `retool.agent.run` can be started, and plays an episode."""

import asyncio
import copy
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.run import Run
from verl_ext.doctor.template import load_tools, template_kwargs
from verl_ext.gateway.audit import audit
from verl_ext.outcome import RolloutEnd
from verl_ext.settings import OUTSIDE, TOKEN, AgentSettings
from verl_ext.settings.checks import read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_ext.episode import Episode

MAX_TURNS, PLAY_S = 4, 60.0  # of the episode that is played
ANSWER = "\\boxed{0}"  # the scripted model's, to whatever it is asked


def check_start(run: Run, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check that a command exists, and that agents from outside have the token that they need."""
    if (settings := _settings(run)) is None:
        return
    if problem := settings.token_problem(environ.get(TOKEN, "")):
        problem, _, advice = problem.partition(". Set ")
        yield fail(f"{problem} -> Set {advice}")
    if isinstance(settings.run, list):
        from verl_ext.rollout.starters import found_command

        try:
            found_command(settings.run)
        except ValueError as error:
            yield fail(f"{error} -> Correct retool.agent.run.")


def check_play(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """Check that a function can be loaded, try the chat template, and play an episode with a scripted model. Imports
    verl."""
    if (settings := _settings(run)) is None:
        return
    from verl_ext.rollout.starters import load_agent

    if isinstance(settings.run, str) and settings.run != OUTSIDE:
        try:
            load_agent(settings.run)
        except ValueError as error:
            yield fail(f"{error} -> Correct the file or retool.agent.run.")
            return
    yield from _check_template(run, tokenizer)
    row = next((row for _, row in run.rows("train")), None)
    if settings.run == OUTSIDE or row is None:
        return
    try:
        episode = asyncio.run(_play(run, tokenizer, row))
    except Exception as error:  # of an agent's or an environment's author
        yield fail(f"""the agent cannot play the first row of the data with a model that says {ANSWER}:
            {type(error).__name__}: {error} -> Correct the agent, or start what it needs.""")
        return
    yield _told(episode)


def _settings(run: Run) -> AgentSettings | None:
    """Return the settings of an own agent; None without one, or if they are wrong, which check_config reports."""
    try:
        settings = read_settings(run.config, "agent", AgentSettings) if run.is_rl else AgentSettings()
    except ValueError:
        return None
    return settings if settings.run is not None else None


def _check_template(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    found = audit(tokenizer, template_kwargs(run), tools=run.protocol == "hermes")
    names = {level: ", ".join(each.check for each in found if each.level == level) for level in ("fail", "fork")}
    more = f"retool gateway audit {run.model_path} prints what differs."
    if names["fail"]:
        yield warn(f"""the chat template does not show the model what an agent may say ({names["fail"]})
            -> Let the agent do without, or set model.custom_chat_template. {more}""")
    if names["fork"]:
        yield warn(f"""the chat template shows earlier turns in another way than the model wrote them, and each such
            turn begins a row ({names["fork"]}) -> Expect more rows, or set model.custom_chat_template. {more}""")


async def _play(run: Run, tokenizer: "PreTrainedTokenizerBase", row: Mapping[str, Any]) -> "Episode":
    from verl_ext.environments.shared_client import shared_client
    from verl_ext.rollout.scripted import play_agent

    config = copy.deepcopy(run.config)
    limits = {"timeout_s": min(PLAY_S, config.retool.agent.timeout_s), "max_turns": MAX_TURNS}
    OmegaConf.update(config, "retool.agent", limits)
    task = {**row, "raw_prompt": row[run.text_column], "uid": "doctor", "session_id": 0}
    try:
        return await play_agent(config, task, ANSWER, tokenizer=tokenizer, tools=load_tools(run))
    finally:
        await shared_client(config.retool.sandbox).aclose()


def _told(episode: "Episode") -> Finding:
    use, reason = episode.agent, episode.finish_reason
    if reason == RolloutEnd.AGENT_ERROR:
        return warn(f"""the agent crashed when the model said {ANSWER}. A response whose agent crashes is scored as it
            stands, as the model's failure: {episode.exception} -> Let the agent take any text of the model.""")
    if use is None or reason == RolloutEnd.SANDBOX_FAILURE:  # None: the environment could not be opened
        return fail("""the environment failed while the agent played an episode (see the warnings above)
            -> Start what it needs, such as the sandbox.""")
    forks = ", ".join(f"{count} by {name}" for name, count in use.forks.items())
    text = f"""the agent played an episode with a model that says {ANSWER}: it ended as {reason} after {use.turns}
        answer(s), with {use.rows} row(s) to train on"""
    if forks:
        return warn(f"""{text}, because it changed what was said before ({forks}) -> Append to the messages, and repeat
            the earlier ones as they were, unless several rows are what you want.""")
    return ok(text)
