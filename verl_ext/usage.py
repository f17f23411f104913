"""What was used of a model behind an endpoint that is paid by the token."""

from dataclasses import astuple, dataclass

USAGE = "usage"  # key of `Episode.from_server`


@dataclass(frozen=True)
class Usage:
    """What was used of a model; tokens as its server counts them."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refusals: int = 0  # answers that the endpoint gave by its own rules in place of the model's

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))
