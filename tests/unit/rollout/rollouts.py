"""Rollouts that tests of workers share; the fixture `roll_out_prompt` runs them."""

import asyncio


def samples_of(lengths: list[int]) -> list:
    """Samples that end in the order opposite to their number."""

    async def sample(number: int, length: int) -> list[int]:
        await asyncio.sleep(0.01 * (len(lengths) - number))
        return list(range(length))

    return [lambda number=number, length=length: sample(number, length) for number, length in enumerate(lengths)]
