"""Salts of the prefix cache: requests share cached prefixes only under the same salt."""

from __future__ import annotations

from hashlib import sha256


def key_salt(digest: bytes, more: bytes) -> bytes:
    """A cache salt that no other key can have, whatever ``more`` a request gives.

    Args:
        digest: of the key.
    """
    return sha256(b"weft cache salt" + digest + more).digest()[:16]
