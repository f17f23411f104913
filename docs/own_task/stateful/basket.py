"""A shop with a basket: calls fill it, and what is in it at the end is the score."""

import json

from verl_ext.environments.base import Environment, tool
from verl_ext.environments.tool_errors import ToolError
from verl_ext.episode import Score

PRICES = {"cheese": 4, "bread": 3}


class Basket(Environment):
    async def open(self, task):
        self.wanted, self.items = json.loads(task["reward_model"]["ground_truth"]), {}
        return await super().open(task)

    @tool
    def put(self, item: str, count: int) -> str:
        """Put something into the basket.

        Args:
            item: name of the item.
            count: how many of it.
        """
        if item not in PRICES:
            raise ToolError(f"there is no item {item!r}")
        self.items[item] = self.items.get(item, 0) + count
        return f"the basket costs {sum(PRICES[name] * number for name, number in self.items.items())}"

    async def score(self, episode):
        return Score.graded(float(self.items == self.wanted), str(self.items), "basket")
