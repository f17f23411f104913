"""Rollouts that tests of workers share; the fixture `roll_out_prompt` runs them."""

import asyncio
from collections import Counter


def samples_of(lengths: list[int]) -> list:
    """Samples that end in the order opposite to their number."""
    running: Counter[int] = Counter()

    async def sample(number: int, length: int) -> list[int]:
        running[number] += 1
        await asyncio.sleep(0.01)  # the others begin
        while any(running[other] for other in range(number + 1, len(lengths))):
            await asyncio.sleep(0)
        running[number] -= 1
        return list(range(length))

    return [lambda number=number, length=length: sample(number, length) for number, length in enumerate(lengths)]
