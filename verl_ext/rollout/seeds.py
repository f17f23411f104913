"""Seeds of single requests and samples, derived from their names: the order in which they run does not matter."""

import hashlib


def seed_of(*names: object) -> int:
    """Return a seed from 0 to 2**63 - 1, the range that servers take: a hash of `names` as text."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
