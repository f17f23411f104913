"""The gateway's benchmark measures a server process, and tells the limits."""

import pytest

from scripts.bench import gateway


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_costs_more_than_a_direct_call(stream: bool) -> None:
    with gateway.server("tiny") as server:
        through, direct = server.measure(turns=3, sessions=20, stream=stream)
    assert through > 0.1 > direct >= 0
