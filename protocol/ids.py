"""Ids: u64 numbers that stay unique over restarts of the broker, and session tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

MAX_ID = 0x7FFF_FFFF_FFFF_FFFF


def counting_ids(boot: int) -> Iterator[int]:
    """Ids of one broker run: its start, in seconds since 1970, above a 32-bit counter.

    Two runs that start in different seconds never assign the same id, so that a worker that
    outlives its broker cannot confuse requests of the two.
    """
    base = (boot & 0x7FFF_FFFF) << 32
    number = 0
    while True:
        number += 1
        yield (base + number) & MAX_ID


def new_session_token() -> str:
    """A session token: 128 random bits, hexadecimal. Its holder can take the session over."""
    return secrets.token_hex(16)
