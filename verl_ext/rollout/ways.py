"""How the episodes of a domain run: protocol, environments, limits. The agent loop (loop.py) has one `Way` of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.environments.by_name import Environments
from verl_ext.protocols.base import CODE_TOOL, ToolProtocol
from verl_ext.protocols.hermes import HermesProtocol
from verl_ext.protocols.text import TextProtocol
from verl_ext.rollout.stops import Stops
from verl_ext.settings.domains import RunDomain, of_whole_run, read_domains


@dataclass(frozen=True)
class Way:
    """How the episodes of a domain run; limits are those of `RunDomain`."""

    protocol: ToolProtocol
    stops: Stops
    environments: Environments
    limits: RunDomain


class Ways:
    """The ways of a run's domains, and the one for rows of no domain.

    Args:
        config: the run's.
        protocol: of the agent loop; None takes the domain's or the run's.
        make_protocol: name -> protocol.
        tools: of the run's tool YAML and file of functions; only the hermes protocol can call them.
    Raises:
        ValueError: an environment cannot be made, or has no tool that its protocol can call.
    """

    def __init__(
        self,
        config: Any,
        protocol: str | None,
        make_protocol: Callable[[str], ToolProtocol],
        tokenizer: Any,
        tools: Sequence[Any],
    ):
        self._config, self._tokenizer, self._tools = config, tokenizer, tools
        self._protocol, self._make_protocol = protocol, make_protocol
        self._of_others = self._make("retool", of_whole_run(config))
        self._domains, self._of_domain = read_domains(config), dict[str, Way]()
        if protocol is None:  # else only few domains may have rows for this loop
            for name in self._domains:
                self.of({"data_source": name})

    def of(self, task: Mapping[str, Any]) -> Way:
        """Return the way of a row, by its `data_source`."""
        name = str(task.get("data_source"))
        if name not in self._domains:
            return self._of_others
        if name not in self._of_domain:
            self._of_domain[name] = self._make(f"retool.domains.{name}", self._domains[name])
        return self._of_domain[name]

    def __iter__(self) -> Any:
        return iter((self._of_others, *self._of_domain.values()))

    def _make(self, where: str, limits: RunDomain) -> Way:
        name = self._protocol or limits.protocol
        protocol = self._make_protocol(name)
        can_call_tools = isinstance(protocol, HermesProtocol)
        environments = Environments(limits.environment, self._config, self._tools if can_call_tools else ())
        others = sorted(environments.schemas.keys() - {CODE_TOOL})
        if environments.schemas and isinstance(protocol, TextProtocol):
            raise ValueError(
                f"{where}: the protocol text calls no tool, but the environment has {', '.join(environments.schemas)}. "
                f"Set {where}.environment=[], as +tool=none does, or another protocol."
            )
        if others and not can_call_tools:
            raise ValueError(
                f"{where}: the protocol {name} can call only the interpreter, but the environment has "
                f"{', '.join(others)}. Set {where}.protocol=hermes."
            )
        return Way(protocol, Stops(protocol, self._tokenizer), environments, limits)
