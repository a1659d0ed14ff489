"""Makes session tokens, session ids, and ids that no other run of a broker assigns. Ids are u64
numbers below 2^63."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator

MAX_ID = 0x7FFF_FFFF_FFFF_FFFF

_TOKEN = re.compile("[0-9a-f]{32}")


def new_boot() -> int:
    """The number of one run of a broker: 31 random bits.

    The number is not derived from the time, because it could then repeat after the clock was set
    back.
    """
    return secrets.randbits(31)


def counting_ids(boot: int) -> Iterator[int]:
    """Yields the ids of one broker run. The upper 32 bits of an id are the number of the run, the
    lower 32 bits a counter.

    Two runs with different numbers never assign the same id. So a worker that outlives its broker
    cannot confuse the requests of the two runs.
    """
    base = (boot & 0x7FFF_FFFF) << 32
    number = 0
    while True:
        number += 1
        yield (base + number) & MAX_ID


def boot_of(number: int) -> int:
    """The number of the broker run that assigned an id."""
    return number >> 32


def new_session_token() -> str:
    """A new session token: 128 random bits, in hexadecimal. A client that has the token, and
    connects with the session's key, can take the session over."""
    return secrets.token_hex(16)


def is_session_token(text: str) -> bool:
    """Whether ``text`` has the form of a session token."""
    return _TOKEN.fullmatch(text) is not None


def session_id(token: str, key: str = "") -> int:
    """Computes the id of a session from its token and from its client's CURVE public key.

    Workers report the ids of sessions to a restarted broker. When a client sends a token, the
    broker can check whether the token belongs to one of these sessions.
    """
    digest = hashlib.sha256(f"{token}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_ID
