"""Check that the processes of the agent loops are alive while the trainer waits for rollouts.

verl 0.9.1 hands prompts to these processes and polls the queue (trainer/ppo/v1/replay_buffer.py:408). Rollouts of a
process that is gone never end: the run would wait forever, without a message.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError

# Raised by a call whose process is gone, or whose answer was lost with its node; OwnerDiedError is an ObjectLostError.
GONE = (RayActorError, OutOfMemoryError, NodeDiedError, ObjectLostError)
LOOK_S = 5.0  # between two checks; each costs one message per process


class AgentLoops:
    """The actors that run a run's agent loops.

    Args:
        actors: handles, or objects with their `__ray_ready__`.
    """

    def __init__(self, actors: Sequence[Any], clock: Callable[[], float] = time.monotonic):
        self._asked = [(actor, actor.__ray_ready__.remote()) for actor in actors]
        self._clock, self._next = clock, clock() + LOOK_S

    def check(self) -> None:
        """Check all actors without waiting: a busy one answers at a later check.

        Raises:
            RuntimeError: an actor is gone.
        """
        if self._clock() < self._next:
            return
        self._next = self._clock() + LOOK_S
        for number, (actor, answer) in enumerate(self._asked):
            if not ray.wait([answer], timeout=0)[0]:
                continue
            try:
                ray.get(answer)
            except ActorUnavailableError:  # a network that is silent for a while
                pass
            except GONE as error:
                raise RuntimeError(
                    f"A process of the agent loops is gone, and its rollouts with it: {error}. If it was killed for "
                    "lack of memory, the system's log says so. The same command continues from the newest checkpoint."
                ) from error
            self._asked[number] = actor, actor.__ray_ready__.remote()
