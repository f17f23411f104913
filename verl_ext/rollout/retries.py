"""What infrastructure failed in a validation is tried again; and when such a validation is void all the same."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

RETRY_PAUSE_S = 2.0  # before a failed part of a validation sample is tried again, longer by as much each time


@dataclass(frozen=True)
class FailedSamples:
    """Settings of `retool.validation`.

    Attributes:
        max_failed_share: of the samples of a data source. A validation that lost more, of any of its sources, is void.
        retries: how often what failed of a sample is tried again, at the most: a call of a tool, a verification, or
            the whole rollout where it was aborted or raised.
    Raises:
        ValueError: one of them is out of range.
    """

    max_failed_share: float = 0.25
    retries: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed_share < 1 or self.retries < 0:
            raise ValueError(f"retool.validation: expected 0 <= max_failed_share < 1 and retries >= 0, got {self}")

    @classmethod
    def from_config(cls, config: DictConfig) -> "FailedSamples":
        """From a run's config; what it does not set has its default.

        Raises:
            ValueError: a setting is unknown or out of range.
        """
        section = OmegaConf.select(config, "retool.validation") or {}
        if unknown := sorted(set(section) - {"max_failed_share", "retries"}):
            raise ValueError(f"retool.validation has {', '.join(unknown)}; expected max_failed_share and retries.")
        return cls(**section)
