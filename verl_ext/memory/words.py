"""Format bytes and counts for messages."""

GIB = 2**30


def size(number: float) -> str:
    """Format bytes: `61.0 GiB`, `4.5 MiB`."""
    return f"{number / GIB:,.1f} GiB" if number >= 0.1 * GIB else f"{number / 2**20:,.1f} MiB"


def count(number: int) -> str:
    """Format a count: `32.76 billion`, `390,400`."""
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number:,}"
