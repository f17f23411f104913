"""The environments by name, as `retool.environment` and the table `retool.domains` choose them.

An entry is a name of BUILT_IN (`__init__.py`), `FILE.py:NAME` or `package.module:NAME` of a class derived from
`Environment`; a section with that as `name` and the settings of the class next to it; or a list of entries, whose tools
an episode has together. With an empty list the model has no tools.

    retool:
      environment: [notebook, {name: search, corpus: corpus.jsonl}]
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from verl_ext.environments import BUILT_IN, OF_SANDBOX
from verl_ext.environments.base import Environment, Opening
from verl_ext.environments.toolbox import Toolbox
from verl_ext.episode import CallResult, Episode, Score
from verl_ext.protocols.base import Call
from verl_ext.protocols.tool_schemas import schemas_of
from verl_ext.settings.domains import RunDomain, of_whole_run, read_domains
from verl_ext.settings.objects import load_object


class Environments:
    """Makes the environments of the episodes that one entry describes.

    Args:
        entry: see the module's docstring.
        config: the run's.
        tools: of the run's tool YAML and file of functions (`toolbox.load_tools`), which `python` and `notebook` have.
    Attributes:
        schemas: name -> schema of the tools that an episode may have, as a prompt shows them
            (protocols/tool_schemas.py).
    Raises:
        ValueError: an entry cannot be loaded, refuses its settings, or has a tool of another's name.
    """

    def __init__(self, entry: Any, config: Any, tools: Sequence[Any] = ()):
        entry = OmegaConf.to_container(entry, resolve=True) if OmegaConf.is_config(entry) else entry
        self._makers, self.schemas = [], dict[str, dict]()
        for each in entry if isinstance(entry, list) else [entry]:
            make, schemas = _maker(each, config, tools)
            if each not in OF_SANDBOX:  # in the form that those of traces have in SFT
                schemas = schemas_of(list(schemas.values())) if schemas else {}
            if twice := sorted(schemas.keys() & self.schemas.keys()):
                raise ValueError(f"retool.environment has two tools with the name {twice[0]!r} in {entry!r}. Drop one.")
            self._makers.append(make)
            self.schemas |= schemas

    def make(self) -> Environment:
        """Return the environment of one episode."""
        parts = [make() for make in self._makers]
        return parts[0] if len(parts) == 1 else Combined(parts)


def shown_tools(config: Any, tools: Sequence[Any]) -> dict[str | None, tuple[str, dict[str, dict]]]:
    """Return, by `data_source`, the protocol of a run's domains and the schemas of their tools; None: of other rows.

    Raises:
        ValueError: as `Environments`.
    """
    ways: dict[str | None, RunDomain] = {None: of_whole_run(config), **read_domains(config)}
    return {name: (way.protocol, Environments(way.environment, config, tools).schemas) for name, way in ways.items()}


class Combined(Environment):
    """Several environments as one, `parts`: the tools of all. The first that replies or scores does so for all."""

    def __init__(self, parts: Sequence[Environment]):
        super().__init__()
        self.parts, self._of_tool = parts, dict[str, Environment]()

    @property
    def is_stateless(self) -> bool:
        return all(part.is_stateless for part in self.parts)

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Open each with the messages that the one before gave."""
        tools: dict[str, dict] = {}
        for part in self.parts:
            opening = await part.open(task)
            task = {**task, "raw_prompt": opening.messages}
            tools |= opening.tools
            self._of_tool |= dict.fromkeys(opening.tools, part)
        return Opening(task["raw_prompt"], tools)

    async def call(self, call: Call) -> CallResult:
        return await self._of_tool[call.tool].call(call)

    async def reply(self, text: str) -> list[dict[str, Any]] | None:
        for part in self.parts:
            if (messages := await part.reply(text)) is not None:
                return messages
        return None

    async def score(self, episode: Episode) -> Score | None:
        for part in self.parts:
            if (score := await part.score(episode)) is not None:
                return score
        return None

    async def score_again(self, task: Mapping[str, Any], evidence: bytes) -> Score | None:
        for part in self.parts:
            if (score := await part.score_again(task, evidence)) is not None:
                return score
        return None

    async def close(self) -> None:
        closed = await asyncio.gather(*(part.close() for part in self.parts), return_exceptions=True)
        for error in closed:
            if error is not None:
                raise error


def _maker(entry: Any, config: Any, tools: Sequence[Any]) -> tuple[Any, dict[str, dict]]:
    """Return what makes an environment of one entry, and the schemas of its tools."""
    settings = {"name": entry} if isinstance(entry, str) else dict(entry or {})
    name = settings.pop("name", None)
    if name in OF_SANDBOX:
        if settings:
            raise ValueError(f"retool.environment: {name} has no settings of its own, got {sorted(settings)}.")
        toolbox = Toolbox(config.retool, tools)
        return partial(toolbox.environment, has_state=name == "notebook"), toolbox.schemas
    kind = _load(str(name))
    try:
        inspect.signature(kind).bind(config, **settings)
    except TypeError as error:
        raise ValueError(f"retool.environment: {name} got the settings {settings}: {error}.") from error
    return partial(kind, config, **settings), kind.schemas(config, **settings)


def _load(name: str) -> type[Environment]:
    try:
        kind = load_object(BUILT_IN.get(name, name))
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise ValueError(
            f"retool.environment is {name!r}, which cannot be loaded: {error}. Expected one of "
            f"{', '.join((*OF_SANDBOX, *BUILT_IN))}, or FILE.py:NAME or package.module:NAME of a class derived from "
            "verl_ext.environments.base.Environment."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ValueError(
            f"retool.environment is {name!r}, which is {kind!r:.100}; expected a class derived from "
            "verl_ext.environments.base.Environment."
        )
    return kind
