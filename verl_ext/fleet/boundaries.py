"""Where the requests of a server crossed a weight update. It only counts: no engine, no clock."""

from collections.abc import Mapping

Run = tuple[int, int | None]  # tokens, and the version of the weights that sampled them


class Boundaries:
    """The running requests of one server, each with the version of its admission and the updates since then."""

    def __init__(self) -> None:
        self._of: dict[str, list[Run]] = {}  # (tokens that were there, the version from then on)

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self._of)

    def admit(self, request_id: str, version: int | None) -> None:
        """Note that a request goes to the engine, which holds weights of `version`."""
        self._of[request_id] = [(0, version)]

    def cross(self, written: Mapping[str, int], version: int | None) -> list[str]:
        """Note that all further tokens are of `version`; return the crossing requests that have no token yet.

        Args:
            written: request -> tokens that it has so far. Requests that were not admitted here are ignored.
        """
        crossing = [
            request_id for request_id, runs in self._of.items() if request_id in written and runs[-1][1] != version
        ]
        for request_id in crossing:
            self._of[request_id].append((written[request_id], version))
        return [request_id for request_id in crossing if not written[request_id]]

    def end(self, request_id: str, tokens: int) -> list[Run]:
        """Return the runs of a request that ended with `tokens` tokens, oldest first, without empty runs."""
        starts = self._of.pop(request_id, [(0, None)])  # None: nobody admitted it
        ends = [start for start, _ in starts[1:]] + [tokens]
        runs = [(min(end, tokens) - start, version) for (start, version), end in zip(starts, ends, strict=True)]
        return [(length, version) for length, version in runs if length > 0]

    def forget(self, request_id: str) -> None:
        """Drop a request that ended without an output; one that has ended already is ignored."""
        self._of.pop(request_id, None)
