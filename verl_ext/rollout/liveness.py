"""Whether the processes of the agent loops live, asked while the trainer waits for rollouts.

verl 0.9.1 hands prompts to these processes and polls the queue (trainer/ppo/v1/replay_buffer.py:408). Rollouts of a
process that is gone never end: the run would wait without end, and say nothing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError

# Of a call whose process is gone, or whose answer went with its node; OwnerDiedError is an ObjectLostError.
GONE = (RayActorError, OutOfMemoryError, NodeDiedError, ObjectLostError)
LOOK_S = 5.0  # from a look to the next: a message for each process


class AgentLoops:
    """The actors that run a run's agent loops.

    Args:
        actors: handles, or what has their `__ray_ready__`.
    """

    def __init__(self, actors: Sequence[Any], clock: Callable[[], float] = time.monotonic):
        self._asked = [(actor, actor.__ray_ready__.remote()) for actor in actors]
        self._clock, self._next = clock, clock() + LOOK_S

    def check(self) -> None:
        """Waits for nobody: one that is busy answers a later look.

        Raises:
            RuntimeError: one is gone.
        """
        if self._clock() < self._next:
            return
        self._next = self._clock() + LOOK_S
        for number, (actor, answer) in enumerate(self._asked):
            if not ray.wait([answer], timeout=0)[0]:
                continue
            try:
                ray.get(answer)
            except ActorUnavailableError:  # the network's silence
                pass
            except GONE as error:
                raise RuntimeError(
                    f"A process of the agent loops is gone, and its rollouts with it: {error}. If it was killed for "
                    "memory, the system's log says so. The same command goes on from the newest checkpoint."
                ) from error
            self._asked[number] = actor, actor.__ray_ready__.remote()
