"""The environment `skyrl_gym`: an environment written for SkyRL-gym (`init`, `step`, `close`), without that package.

    retool.environment: {name: skyrl_gym, env: my_env.py:MyEnv, success: 1.0}

Each turn of the model without a call is an action: its whole text, without the end token. The observations are the
user's next messages; a step that is `done` ends the episode. The reward of the last step is the score.
`postprocessed_action` is not used, because the tokens that train are those that were sampled. There are no further stop
strings: a turn ends at an end token.
"""

import asyncio
import copy
import inspect
from collections.abc import Mapping
from typing import Any

from verl_ext.environments import threads
from verl_ext.environments.base import REMEDY, Environment, Opening
from verl_ext.environments.rewards import check_success, finite, score_of, without_end
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable, who_is_at_fault
from verl_ext.episode import Episode, Score
from verl_ext.outcome import Fault
from verl_ext.settings.objects import load_object

CLOSE_S = 20.0  # that `close` waits for a step that still runs


class SkyRlGym(Environment):
    """An episode in an environment of SkyRL-gym, whose methods run in a thread.

    An exception of the environment is a bug, and raised with its name; except that connection errors and
    ToolUnavailable are the infrastructure's failure, and that the model reads a ToolError, as tool_errors.py says. A
    step that takes longer than `step_s` ends the episode, which keeps its reward so far: the action made it work for
    too long. So a step with a backend needs a shorter limit for that, after which it raises ToolUnavailable.

    Args:
        run: the run's config.
        env: FILE.py:NAME or package.module:NAME of a class with `init(prompt) -> (prompt, info)`, `step(action) ->
            {observations, reward, done, ...}` and, optionally, `close()`. It is made with `env_config` and `extras`:
            the row's columns, with `reward_spec` ({"ground_truth": ...}) and `max_turns`.
        config: becomes `env_config`.
        max_turns: becomes `extras["max_turns"]`, if given.
        step_s: seconds that a step may take; below 600, within which an environment must reply.
        success: the reward of a full success; acc is reward / success, within [0, 1]. None: the row's verifier scores.
    Raises:
        ValueError: a setting cannot be used.
    """

    def __init__(
        self,
        run: Any = None,
        /,
        *,
        env: str,
        config: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        step_s: float = 300.0,
        success: float | None = 1.0,
    ):
        super().__init__(run)
        check_success(success, "skyrl_gym")
        if not 0 < step_s < 600:
            raise ValueError(f"skyrl_gym: step_s is {step_s}; expected a number of seconds above 0 and below 600.")
        try:
            self._kind = load_object(env)
        except (ImportError, OSError, AttributeError, ValueError) as error:
            raise ValueError(f"skyrl_gym: env is {env!r}, which cannot be loaded: {error}.") from error
        if not isinstance(self._kind, type):
            raise ValueError(f"skyrl_gym: env is {env!r}, which is {self._kind!r:.80}; expected a class.")
        if missing := [name for name in ("init", "step") if not callable(getattr(self._kind, name, None))]:
            raise ValueError(f"skyrl_gym: env is {env!r}, which has no method {missing[0]}; expected SkyRL-gym's.")
        self._name, self._config, self._max_turns, self._success = env, dict(config or {}), max_turns, success
        self._step_s = step_s
        self._env: Any = None
        self._running: asyncio.Future | None = None
        self._reward: float | None = None

    @classmethod
    def schemas(cls, run: Any = None, /, **settings: Any) -> dict[str, dict]:
        """Return no schema, because there are no tools, once the settings are checked."""
        cls(run, **settings)
        return {}

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Make the environment, and begin with the prompt that its `init` returns.

        Raises:
            ToolUnavailable: something that it needs did not answer.
            Exception: any other that it raises, with a note.
        """
        model = task.get("reward_model") or {}
        extras = {name: value for name, value in task.items() if name != "raw_prompt"}
        extras.setdefault("reward_spec", {"method": model.get("style"), "ground_truth": model.get("ground_truth")})
        if self._max_turns is not None:
            extras["max_turns"] = self._max_turns
        self._env = await self._do("", self._kind, env_config=self._config, extras=extras)
        prompt = copy.deepcopy(list(task["raw_prompt"]))
        messages, _ = await self._do("", self._env.init, prompt)
        return Opening(list(messages), {})

    async def reply(self, text: str) -> list[dict[str, Any]] | None:
        """Make a step, and return its observations as the user's; None if it is done, or takes longer than `step_s`.

        Raises:
            ValueError: the reward is no finite number, or the step neither ends nor says anything.
        """
        try:
            step = await self._do(text, self._env.step, without_end(text), limit_s=self._step_s)
        except _TooLong:
            return None
        except ToolError as error:
            return [{"role": "user", "content": f"ToolError: {error}"}]
        self._reward = finite(step["reward"], self._name)
        if step["done"]:
            return None
        if not step["observations"]:
            raise ValueError(f"{self._name}: a step is not done, but has no observation for the model to answer.")
        return [{"role": "user", "content": str(each["content"])} for each in step["observations"]]

    async def score(self, episode: Episode) -> Score | None:
        return score_of(self._reward, self._success, "skyrl_gym")

    async def close(self) -> None:
        """Close the environment, after the step that still runs, for which it waits CLOSE_S at most."""
        env, self._env = self._env, None
        if self._running is not None:
            await asyncio.wait([self._running], timeout=CLOSE_S)
            if env is None and self._running.done() and not self._running.exception():
                made = self._running.result()  # the episode was given up while it was made
                env = made if isinstance(made, self._kind) else None
        if env is not None and hasattr(env, "close"):
            await self._do("", env.close)

    async def _do(self, text: str, method: Any, *args: Any, limit_s: float | None = None, **kwargs: Any) -> Any:
        """Return what a method of the environment returns.

        Args:
            text: what the model wrote, which may be at fault.
        Raises:
            _TooLong: it takes longer than `limit_s`.
        """
        self._running, limit = await threads.begin(method, *args, **kwargs), asyncio.timeout(limit_s)
        try:
            async with limit:
                said = await asyncio.shield(self._running)
                return await said if inspect.isawaitable(said) else said
        except (Exception, SystemExit) as error:  # the environment's code may raise anything
            if limit.expired():
                raise _TooLong from error
            error = threads.as_exception(error)
            fault = who_is_at_fault(error, {"action": text})
            if fault is Fault.MODEL:
                raise ToolError(str(error)) from error
            if fault is Fault.INFRASTRUCTURE:
                raise ToolUnavailable(f"{self._name}: {error!r}") from error
            error.add_note(f"Raised by the environment {self._name}. {REMEDY}")
            raise error


class _TooLong(Exception):
    """A step took longer than it may."""
