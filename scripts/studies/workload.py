"""Draw the responses of a step from the few numbers that a run logs about them.

Lengths are log-normal, cut at the longest: the two parameters follow from the mean and from the share of responses that
are as long as the longest. Calls are binomial. Lengths, calls and groups are independent of each other, and a response
is split evenly over its turns, because a run's log says nothing else.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Shape:
    """What the responses of a step are like.

    Attributes:
        prompts: number generated in the step.
        n: responses per prompt.
        prompt_tokens: mean of a prompt.
        tokens: mean of a response, tool output included.
        longest: tokens of the longest response.
        share_longest: share of the responses that have `longest` tokens; above 0.
        decoded: share of a response's tokens that the model generates; the rest is tool output.
        calls: mean of a response.
        most_calls: maximum of a response.
        tool_s: seconds of a call in the sandbox, without waiting for a worker.
    """

    prompts: int
    n: int
    prompt_tokens: float
    tokens: float
    longest: float
    share_longest: float
    decoded: float
    calls: float
    most_calls: int
    tool_s: float


@dataclass
class Response:
    """One response in progress. `turns` are left; `asked_s` is when the current turn was requested."""

    group: "Group"
    turn_tokens: float
    turns: int
    context: float
    tool_tokens: float  # output of a call
    asked_s: float = 0.0
    generate_s: float = 0.0  # time from request to answer, over all turns


@dataclass(eq=False)
class Group:
    """The responses of one prompt. `useful`: their rewards differ."""

    responses: list[Response]
    useful: bool
    version: int = 0  # weights when it was issued
    open: int = 0
    tokens: float = 0.0  # of prompts and responses, once all are done


def shape_of(metrics: Mapping[str, float], *, prompts: int, n: int) -> Shape:
    """Return the shape of a logged step. `prompts` x `n` were trained on; if not logged, as many were generated.

    Raises:
        KeyError: a metric is missing.
    """
    tokens, turns = metrics["response_length/mean"], metrics["num_turns/mean"]
    calls = turns / 2 - 1  # verl counts the prompt, and a message for each call and each answer of a tool
    old_log = "timing_s/agent_loop/tool_calls/mean"  # published run: seconds of all calls of a response
    if old_log in metrics:
        tool_s = metrics[old_log] / max(calls, 1e-9)
    else:
        tool_s = metrics.get("tool/seconds", 0.0) - metrics.get("tool/queue_s", 0.0)
    return Shape(
        prompts=round(metrics.get("filter_groups/generated", prompts)),
        n=n,
        prompt_tokens=metrics["prompt_length/mean"],
        tokens=tokens,
        longest=metrics["response_length/max"],
        share_longest=max(metrics["response_length/clip_ratio"], 1 / (prompts * n)),
        decoded=min(1.0, metrics.get("train/model_tokens", tokens) / tokens),
        calls=calls,
        most_calls=max(1, round(metrics["num_turns/max"] / 2 - 1)),
        tool_s=tool_s,
    )


def cut_log_normal(mean: float, longest: float, share: float) -> tuple[float, float]:
    """Return (mu, sigma) with P(x > longest) = share and E[min(x, longest)] = mean.

    Raises:
        ValueError: there is no such distribution, because the mean is not below the longest.
    """
    if not 0 < mean < longest or not 0 < share < 1:
        raise ValueError(f"No distribution has a mean of {mean:g} tokens if a share of {share:.3g} has {longest:g}.")
    z = _NORMAL.inv_cdf(1 - share)
    low, high = 1e-6, 10.0  # sigma: the mean falls with it
    for _ in range(80):
        sigma = (low + high) / 2
        mu = math.log(longest) - z * sigma
        if math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + longest * share > mean:
            low = sigma
        else:
            high = sigma
    return math.log(longest) - z * sigma, sigma


def draw(shape: Shape, groups: int, useful: float, rng: random.Random) -> list[Group]:
    """Return groups whose lengths are the distribution's quantiles, shuffled: their mean hardly depends on the seed.

    Args:
        useful: share of groups whose rewards differ.
    """
    count = groups * shape.n
    mu, sigma = cut_log_normal(shape.tokens, shape.longest, shape.share_longest)
    lengths = [min(shape.longest, math.exp(mu + sigma * _NORMAL.inv_cdf((i + 0.5) / count))) for i in range(count)]
    rng.shuffle(lengths)
    is_useful = [i < round(useful * groups) for i in range(groups)]
    rng.shuffle(is_useful)
    drawn = []
    for number in range(groups):
        group = Group([], is_useful[number], open=shape.n)
        for length in lengths[number * shape.n : (number + 1) * shape.n]:
            calls = sum(rng.random() < shape.calls / shape.most_calls for _ in range(shape.most_calls))
            tool = length * (1 - shape.decoded) / calls if calls else 0.0
            turn = (length - tool * calls) / (calls + 1)
            group.responses.append(Response(group, turn, calls + 1, shape.prompt_tokens, tool))
            group.tokens += shape.prompt_tokens + length
        drawn.append(group)
    return drawn
