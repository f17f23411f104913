"""Ray's actors in this process, as far as our code calls them."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any


class Remote:
    """The handle of an actor whose methods run as tasks of this event loop."""

    def __init__(self, actor: Any):
        self.actor = actor

    def __getattr__(self, name: str) -> SimpleNamespace:
        getattr(self.actor, name)  # like Ray's handle, it has what its actor has

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self.actor, name)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs)))
