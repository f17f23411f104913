"""What a server sent for one request, whichever client asked: tokens, log-probs, versions, servers that were lost."""

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from verl_ext.gateway.session import Sampled
from verl_ext.rollout.client import TURN, TurnRequests
from verl_ext.rollout.log_probs import checked_log_probs, wants_log_probs
from verl_ext.rollout.weight_versions import spans_of

# Stop reasons of a request that ended by neither the model nor its budget (vllm/v1/engine/__init__.py:43).
FAILED_STOPS = ("aborted", "abort", "error")


def sampled(output: TokenOutput, params: Mapping[str, Any]) -> Sampled:
    """Return what a client's output says; it is used up.

    Args:
        params: of the request; without log-probs in it, none are returned.
    Raises:
        ValueError: the log-probs are not one finite number for each token.
    """
    ids = list(output.token_ids)
    extra = output.extra_fields
    requests = extra.pop(TURN, None)
    if requests is None:  # of another client
        requests = TurnRequests(written=[(len(ids), extra.get("global_steps"))])
    return Sampled(
        ids=ids,
        log_probs=checked_log_probs(output.log_probs, ids) if wants_log_probs(params) else None,
        spans=spans_of(requests.written, 0, len(ids)),
        failed=output.stop_reason if output.stop_reason in FAILED_STOPS else None,
        server=requests.server or None,
        lost=requests.lost,
        from_server=extra,
    )
