from verl.tools.function_tool import function_tool

from verl_ext.environments.tool_errors import ToolError

PRICES = {"bread": 7, "cheese": 12}


@function_tool
def price_of(item: str) -> str:
    """Look up what one of an item costs.

    Args:
        item: the item's name
    """
    if item not in PRICES:
        raise ToolError(f"there is no item {item!r}; there are {', '.join(PRICES)}")
    return str(PRICES[item])
