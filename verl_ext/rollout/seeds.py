"""Seeds of single requests and samples, made of what names them: the same in whatever order they run."""

import hashlib


def seed_of(*names: object) -> int:
    """A seed from 0 to 2**63 - 1, as servers take it, by a hash of `names` as text."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
