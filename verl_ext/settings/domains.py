"""The table `retool.domains`: what differs by a row's `data_source`, and a domain's share of the trained batch.

In: a run's config. Out: its domains, each with the run's own value for what its row leaves out, and their data files.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl_ext.settings import Domain, Retool
from verl_ext.settings.checks import check, key

if TYPE_CHECKING:
    from omegaconf import DictConfig

# keys of a domain whose value for the whole run has the same name under `retool`
_OF_RUN = ("environment", "protocol", "max_tool_calls", "max_tool_response_tokens", "turn_s", "episode_s")


@dataclass(frozen=True, kw_only=True)
class RunDomain(Domain):
    """A domain with the run's own values for what its row leaves out."""

    environment: str | dict | list = key()
    protocol: str = key()
    max_tool_calls: int = key()
    max_tool_response_tokens: int = key()
    response_tokens: int = key()


def read_domains(config: "DictConfig") -> dict[str, RunDomain]:
    """Return the domains of a run by `data_source`, in the table's order; none if it has no table.

    Raises:
        ValueError: a key is unknown or out of range, or no domain has a weight.
    """
    table = _plain(config, "retool.domains") or {}
    domains = {}
    for name, row in table.items():
        check(row, Domain, f"retool.domains.{name}")
        domains[str(name)] = with_run(Domain(**row), config)
    if domains and not any(domain.weight for domain in domains.values()):
        raise ValueError("retool.domains: every weight is 0, so nothing would be trained. Give one domain a weight.")
    return domains


def with_run(domain: Domain, config: "DictConfig") -> RunDomain:
    """Return a domain with the run's own values in place of None."""
    found = {name: _plain(config, f"retool.{name}") for name in _OF_RUN}
    if found["environment"] is None:  # not [], an environment without tools
        found["environment"] = Retool.environment
    found["response_tokens"] = _plain(config, "actor_rollout_ref.rollout.response_length")
    if found["response_tokens"] and domain.response_tokens:
        domain = replace(domain, response_tokens=min(domain.response_tokens, found["response_tokens"]))
    return RunDomain(**vars(domain) | {name: value for name, value in found.items() if getattr(domain, name) is None})


def of_whole_run(config: "DictConfig") -> RunDomain:
    """Return what holds for a row of no domain: the run's own values."""
    return with_run(Domain(), config)


def use_files(config: "DictConfig") -> None:
    """Put the data files of the domains, if any has some, in place of `data.train_files` and `data.val_files`.

    Raises:
        ValueError: as `read_domains`.
    """
    domains = read_domains(config).values()
    for split, name in (("train", "train_files"), ("val", "val_files")):
        if files := dict.fromkeys(file for domain in domains for file in _listed(getattr(domain, split))):
            config.data[name] = [*files]


def check_sources(config: "DictConfig", split: str, sources: Iterable[str]) -> None:
    """Check that the table has a domain for each row, training rows for each domain with a weight, and limits that
    hold.

    Args:
        sources: `data_source` of every row of the split.
    Raises:
        ValueError: names the domains that lack a row in the table, or rows in the data; or the limit.
    """
    domains = read_domains(config)
    if not domains:
        return
    most = _plain(config, "data.max_response_length")
    for name, row in _plain(config, "retool.domains").items():
        if most and (row.get("response_tokens") or 0) > most:
            raise ValueError(
                f"retool.domains.{name}.response_tokens is {row['response_tokens']}, above data.max_response_length="
                f"{most}, which bounds every response. Lower it, or raise the bound."
            )
    counts: dict[str, int] = {}
    for source in sources:
        counts[source] = counts.get(source, 0) + 1
    if unknown := {name: count for name, count in counts.items() if name not in domains}:
        shown = ", ".join(f"{name!r} ({count:,} rows)" for name, count in sorted(unknown.items()))
        raise ValueError(
            f"data.{split}_files has rows of data sources that retool.domains does not name: {shown}. It names "
            f"{', '.join(domains)}. Add a row to the table, with weight: 0 if it is only validated, or remove the rows."
        )
    if split == "train" and (empty := [name for name, each in domains.items() if each.weight and name not in counts]):
        raise ValueError(
            f"retool.domains gives {', '.join(empty)} a weight, but data.train_files has no row with that data_source. "
            "Name its files (retool.domains.NAME.train), or set its weight to 0."
        )


def _plain(config: "DictConfig", name: str) -> Any:
    from omegaconf import OmegaConf

    found = OmegaConf.select(config, name)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def _listed(files: list | str | None) -> list[str]:
    return [files] if isinstance(files, str) else list(files or [])
