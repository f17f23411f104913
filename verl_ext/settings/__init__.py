"""What can be set under `retool` of a run's YAML (`data.retool` of SFT), how a run is composed, and where files are.

There is one dataclass per section: the schema for the YAMLs in configs/, the doctor, and every start of a run. A field
without a default must be in the YAML. `checks.py` says what is wrong with a section.
In: YAMLs and overrides. Out: a run's config, a section's values, or an error that names every wrong key.
This module imports only the standard library: the sandbox and the doctor's quick part pay for nothing more.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from verl_ext.settings.checks import Option, check_phases, key, read_settings
from verl_ext.settings.overrides import quoted

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "shipped"  # in an installed wheel: folders of the repository's root (setup.py)
REPO = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent
CONFIGS = REPO / "configs"
START = Path() if REPO == _SHIPPED else REPO  # relative paths of a run count from it
_verl = importlib.util.find_spec("verl")
VERL = Path(((_verl and _verl.submodule_search_locations) or ["/verl is not installed"])[0])


# Sections; making one with values out of range raises ValueError -----------------------------------------------------

MAX_CODE_S = 86400  # of one program; as MAX_TIMEOUT_S of sandbox/limits.py, a room above this one
PROTOCOLS = ("code", "hermes", "text")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Which checkpoints are kept; verl_ext/checkpoints/rolling.py."""

    keep_last: int | None = key(None, within="[1, inf)", about="a number of checkpoints; null keeps all")
    best_metric: str | None = None
    best_mode: str = key("max", among=("max", "min"))


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Where and how code runs; verl_ext/sandbox/client.py."""

    urls: list
    timeout_s: float = key(within=f"(0, {MAX_CODE_S}]", about="a number of seconds of one program")
    memory_limit_mb: int = key(within="[1, inf)", about="a number of MB of one program")
    max_concurrency: int = key(within="[1, inf)", about="a number of calls in flight of an agent-loop worker")
    max_calls_per_s: float | None = key(within="(0, inf)", about="a number of calls of all workers together")
    queue_timeout_s: float = key(60.0, within="(0, inf)", about="a number of seconds beyond the program's own")
    echo_last_expression: bool = key()


@dataclass(frozen=True, kw_only=True)
class RecorderSettings(Option):
    """What a run keeps of its rollouts; verl_ext/records/recorder.py."""

    token_share: float = key(within="[0, 1]", about="a share of the groups that are trained on")
    keep_steps: int = key(within="[1, inf)", about="a number of training steps")
    max_gb: float = key(within="(0, inf)", about="a number of GiB of the records of training steps")


@dataclass(frozen=True)
class AdaptiveN(Option):
    """Responses per prompt by phase and difficulty; verl_ext/trainer/adaptive_n.py.

    Attributes:
        phases: [[first step, responses per prompt], ...]; the first one begins at 0.
        easy_above: a problem whose last `easy_visits` pass rates were all above this is easy,
        easy_visits: consecutive groups of the same problem,
        easy_n: and gets this many responses, or the phase's number if that is less.
        hard_below: a problem whose last pass rate was below this is hard,
        hard_n: and gets this many responses, or the phase's number if that is more.
    """

    phases: list
    easy_above: float
    easy_visits: int
    easy_n: int
    hard_below: float
    hard_n: int

    def __post_init__(self) -> None:
        check_phases("adaptive_n", self.phases, lowest=2)
        if min(self.easy_n, self.hard_n) < 2 or self.easy_visits < 1:  # a group of one has advantage 0
            raise ValueError(f"retool.adaptive_n: expected easy_n, hard_n >= 2 and easy_visits >= 1, got {self}")
        if not 0 <= self.hard_below <= self.easy_above <= 1:
            raise ValueError(f"retool.adaptive_n: expected 0 <= hard_below <= easy_above <= 1, got {self}")


@dataclass(frozen=True, kw_only=True)
class Curriculum(Option):
    """Problems that come again less often, by the pass rate of their newest group; verl_ext/trainer/curriculum.py.

    Attributes:
        easy_above: a problem with at least this pass rate is easy,
        easy_share: and is drawn in this share of the epochs.
        hard_below: a problem with at most this pass rate is hard,
        hard_share: and is drawn in this share of the epochs.
    """

    easy_above: float = key(within="[0, 1]", about="a pass rate")
    easy_share: float = key(within="[0, 1]", about="a share of the epochs")
    hard_below: float = key(within="[0, 1]", about="a pass rate")
    hard_share: float = key(within="[0, 1]", about="a share of the epochs")

    def __post_init__(self) -> None:
        if not self.hard_below < self.easy_above:
            raise ValueError(f"retool.curriculum: expected hard_below < easy_above, got {self}")


@dataclass(frozen=True)
class FailedSamples:
    """Validation samples that failed outside the model; verl_ext/trainer/failed_samples.py.

    Attributes:
        max_failed_share: of the samples of a data source. A validation that lost more, of any of its sources, is void.
        retries: at most how often the failed part of a sample is retried: a call of a tool, a verification, or the
            whole rollout if it was aborted or raised.
    """

    max_failed_share: float = 0.25
    retries: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed_share < 1 or self.retries < 0:
            raise ValueError(f"retool.validation: expected 0 <= max_failed_share < 1 and retries >= 0, got {self}")

    @classmethod
    def from_config(cls, config: "DictConfig") -> "FailedSamples":
        """Read a run's config; what it does not set has its default. Raises as `check`."""
        return read_settings(config, "validation", cls)


@dataclass(frozen=True)
class ValidationSchedule(Option):
    """When a run validates, [[first step, steps between validations], ...]; verl_ext/trainer/validation.py."""

    phases: list

    def __post_init__(self) -> None:
        check_phases("validation_schedule", self.phases, lowest=1)


@dataclass(frozen=True)
class LightValidation(Option):
    """Validations on a part of the problems; verl_ext/trainer/validation.py.

    Attributes:
        problems: of the validation set, evenly spaced, the same ones every time.
        n: responses per problem.
        full_every: steps; a validation at a multiple of it is full. So are the one before step 1 and the last.
    """

    problems: int
    n: int
    full_every: int

    def __post_init__(self) -> None:
        if min(self.problems, self.n, self.full_every) < 1:
            raise ValueError(f"retool.light_validation: expected numbers of at least 1, got {self}")


@dataclass(frozen=True)
class EarlyStop(Option):
    """When a run ends before its last step; verl_ext/trainer/early_stop.py.

    Attributes:
        metric: name of a validation metric for which higher is better; None takes the mean of
            `val-core/*/acc/mean@*` over the data sources, in full validations.
        patience: validations in a row without progress that end the run.
        min_delta: progress is a value that exceeds the best one at the last progress by at least this.
        max_drop: a value more than this below the best one ends the run at once; None: never.
    """

    metric: str | None
    patience: int
    min_delta: float
    max_drop: float | None

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0 or (self.max_drop is not None and self.max_drop <= 0):
            raise ValueError(f"retool.early_stop: expected patience >= 1, min_delta >= 0, max_drop > 0, got {self}")


@dataclass(frozen=True, kw_only=True)
class HealthSettings(Option):
    """When a server counts as dead, and what becomes of its requests; verl_ext/fleet/health.py.

    Attributes:
        every_s: seconds from one heartbeat of a server to the next.
        suspect_s: a server that is silent for longer gets no new requests until it answers.
        dead_s: a server that is silent for longer is dead. It is dead at once if its process is gone.
        update_s: replaces `dead_s` while weights change.
        start_s: replaces `dead_s` for this long after a server's start, and after its first weights.
        attempts: requests of a turn that may be lost with their servers before the rollout counts as failed.
        wait_s: how long a request waits for a server if there is none.
        max_replacements: servers that a run may start in place of dead ones, including starts that fail.
    """

    every_s: float = key(within="(0, 60]", about="a number of seconds")  # of 120 s without a round: fleet/transfer.py
    suspect_s: float = key(within="(0, inf)", about="a number of seconds")
    dead_s: float = key(within="(0, inf)", about="a number of seconds")
    update_s: float = key(within="(0, inf)", about="a number of seconds")
    start_s: float = key(within="[0, inf)", about="a number of seconds")
    attempts: int = key(within="[1, inf)", about="a number of requests")
    wait_s: float = key(within="[0, inf)", about="a number of seconds")
    max_replacements: int = key(within="[0, inf)", about="a number of servers")

    def __post_init__(self) -> None:
        if not 2 * self.every_s <= self.suspect_s < self.dead_s <= self.update_s:
            raise ValueError(f"retool.fleet.health: expected 2 x every_s <= suspect_s < dead_s <= update_s, got {self}")


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The servers that rollouts come from; verl_ext/fleet."""

    weight_update: str = key("abort", among=("abort", "drain", "keep"))
    routing: str = key("verl", among=("verl", "ring"))
    health: HealthSettings | None = None


TOKEN = "RETOOL_AGENT_TOKEN"  # environment variable: what agents outside must know, if there is one
OUTSIDE = "outside"  # `retool.agent.run` of agents that come by themselves and take a task
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Who plays the episodes: the built-in loop, or an agent of yours; verl_ext/rollout/agents.py.

    Attributes:
        run: None: the built-in loop; FILE.py:NAME or package.module:NAME of a function; a command as a list; OUTSIDE.
        timeout_s: an agent that works for longer, without a request to the model or a tool, ends its episode.
        max_turns: answers of the model in an episode.
        max_rows: rows that an episode is trained on at most, the newest; a linear conversation is one.
        max_processes: commands, threads of functions that are no coroutines, or tasks outside, at a time for each
            agent-loop worker; others wait.
        host: address on which the gateways listen.
    """

    run: str | list | None = None
    timeout_s: float = key(600.0, within="(0, inf)", about="a number of seconds of the agent itself")
    max_turns: int = key(64, within="[1, inf)", about="a number of answers of the model in an episode")
    max_rows: int = key(8, within="[1, inf)", about="a number of rows of an episode")
    max_processes: int = key(64, within="[1, inf)", about="a number of processes of an agent-loop worker")
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        run = self.run
        is_command = isinstance(run, list) and run and all(isinstance(part, str) for part in run)
        is_function = isinstance(run, str) and all(run.rpartition(":"))
        if not (run is None or run == OUTSIDE or is_command or is_function):
            raise ValueError(
                f"retool.agent.run is {run!r}: expected null (the built-in loop), FILE.py:NAME or package.module:NAME "
                f'of a function, a command as a list, such as [python, my_agent.py], or "{OUTSIDE}"'
            )
        if self.host in ("", "0.0.0.0", "::"):  # agents are told this address
            raise ValueError(f"retool.agent.host is {self.host!r}: expected one address of this machine, or its name")

    def token_problem(self, token: str) -> str | None:
        """Return why agents from outside cannot be let in with this token of the environment; None if they can."""
        if self.run != OUTSIDE or self.host in LOOPBACK or token:
            return None
        return (
            f"retool.agent.host is {self.host}, which other machines may reach, but the environment has no {TOKEN}. "
            "Set it to a long random text for the run and its agents, or use 127.0.0.1."
        )


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A row of `retool.domains`: what holds for the rows with its name as `data_source`. None: as for the whole run."""

    weight: float = key(
        1.0, within="[0, inf)", about="share of the trained batch, relative to others; 0: validated only"
    )
    train: list | str | None = key(None, about="data files; if a domain names some, they replace data.train_files")
    val: list | str | None = key(None, about="the same for data.val_files")
    environment: str | dict | list | None = key(None, about="as retool.environment")
    protocol: str | None = key(None, among=PROTOCOLS, about="as retool.protocol")
    verifier: str | dict | None = key(None, about="name or path of a verifier, or a section with its path and settings")
    n: int | None = key(None, within="[2, inf)", about="responses per prompt in training, as rollout.n")
    max_tool_calls: int | None = key(None, within="[0, inf)", about="as retool.max_tool_calls")
    max_tool_response_tokens: int | None = key(None, within="[1, inf)", about="as retool.max_tool_response_tokens")
    response_tokens: int | None = key(
        None, within="[1, inf)", about="tokens of a response, up to data.max_response_length"
    )
    turn_s: float | None = key(None, within="(0, inf)", about="as retool.turn_s")
    episode_s: float | None = key(None, within="(0, inf)", about="as retool.episode_s")
    max_staleness: int | None = key(None, within="[0, inf)", about="as the sampler's max_staleness")


@dataclass(frozen=True, kw_only=True)
class Retool:
    """`retool` of an RL run; configs/shared/retool.yaml and every_run.yaml say next to each key what it does."""

    checkpoints: CheckpointSettings = CheckpointSettings()
    protocol: str = key(among=PROTOCOLS)
    environment: str | dict | list = "python"
    agent: AgentSettings = AgentSettings()
    turn_s: float | None = key(None, within="(0, inf)", about="a number of seconds of a turn's calls")
    episode_s: float | None = key(None, within="(0, inf)", about="a number of seconds of an episode's calls")
    repair_json: bool = key()
    max_tool_calls: int = key(within="[0, inf)", about="a number of calls of a response")
    run_last_code: bool = key()
    max_malformed_calls: int = key(within="[0, inf)", about="a number of calls of a response")
    max_tool_response_tokens: int = key(within="[1, inf)", about="a number of tokens of one output")
    traceback: str = key(among=("full", "last_line"))
    sandbox: SandboxSettings
    recorder: RecorderSettings
    fleet: FleetSettings = FleetSettings()
    repeatable: bool = False
    adaptive_n: AdaptiveN | None = None
    curriculum: Curriculum | None = None
    validation: FailedSamples = FailedSamples()
    validation_schedule: ValidationSchedule | None = None
    light_validation: LightValidation | None = None
    early_stop: EarlyStop | None = None
    observers: list = key(())
    domains: dict | None = key(None, table_of=Domain)


@dataclass(frozen=True, kw_only=True)
class SftRetool:
    """`retool` of an SFT run."""

    checkpoints: CheckpointSettings = CheckpointSettings()


@dataclass(frozen=True, kw_only=True)
class SftData:
    """`data.retool` of an SFT run; verl_ext/datasets/sft.py."""

    protocol: str = key(among=PROTOCOLS)
    bad_rows: str = key(among=("error", "drop"))


# Composing -----------------------------------------------------------------------------------------------------------


def compose_run(
    name: str, overrides: Sequence[str] = (), *, folder: Path = CONFIGS, beside: Sequence[Path] = ()
) -> "DictConfig":
    """Compose a run's YAML with Hydra. `objective=NAME` comes after all of the run's own values, as in the launchers.

    Args:
        beside: further folders of YAMLs, if the run's is not in configs/.
    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: there is no such YAML, or an override does
            not fit.
    """
    from hydra import compose, initialize_config_dir

    overrides = [f"+{each}" if each.startswith("objective=") else each for each in overrides]
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name, overrides=[search_path(*beside), *overrides])


def named_file(path: str, folder: Path = START) -> Path:
    """Return the file of a relative path in a run, as verl finds it: in `folder`, or beside the package."""
    return folder / path if (folder / path).exists() else _PACKAGE.parent / path


def registered_loops(config: "DictConfig", folder: Path = START) -> dict[str, str | None]:
    """Return the agent loops that `agent_loop_config_path` names -> protocol, None for the run's or the domain's.

    Raises:
        FileNotFoundError: there is no such file.
    """
    from omegaconf import OmegaConf

    path = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path")
    entries = OmegaConf.load(named_file(path, folder)) if path else ()
    return {each.name: each.get("protocol") for each in cast("ListConfig", entries)}


def search_path(*beside: Path) -> str:
    """Return Hydra's override with the folders of further YAMLs, and verl's, which verl's own main would add."""
    folders = (quoted(f"file://{each}") for each in (*beside, VERL / "trainer" / "config"))
    return f"hydra.searchpath=[{','.join(folders)}]"
