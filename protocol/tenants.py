"""Whose a request is, as the broker tells controller workers and the state worker."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """A tenant: the clients of one key, or all without a key.

    The last attachment of ``START``, of messages for the store of modules (with the quota of the
    store), and of a ``VARIABLE`` of a tenant with a key (with its quota of variables).
    """

    key: str = ""
    quota_bytes: int | None = None
    """Its quota of what the message is about; None: it has none."""

    def encode(self) -> bytes:
        """As an attachment."""
        quota = "" if self.quota_bytes is None else f" {self.quota_bytes}"
        return f"{self.key}{quota}".encode()

    @classmethod
    def decode(cls, attachment: bytes) -> Tenant:
        """From an attachment; raises ValueError if it is not valid."""
        key, _, quota = attachment.decode().partition(" ")
        return cls(key, int(quota) if quota else None)
