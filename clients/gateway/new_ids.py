"""Ids of answers and of their parts."""

from __future__ import annotations

import secrets

from .users.idempotency import current_named


def new_id(prefix: str) -> str:
    """An id for an answer or a part of it: ``cmpl-…``. If a client repeats a request with an
    idempotency key, the ids are the same."""
    named = current_named.get()
    return named.new_id(prefix) if named is not None else f"{prefix}{secrets.token_hex(12)}"
