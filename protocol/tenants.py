"""Whose a request is, as the broker tells controller workers and the state worker."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """A tenant: the clients of one key, or all without a key. The last attachment of what concerns
    the store of modules and of ``START``: the key, then a quota of the store if it has one."""

    key: str = ""
    upload_bytes: int | None = None
    """Of its modules in the store, their compiled forms included."""

    def encode(self) -> bytes:
        """As an attachment."""
        quota = "" if self.upload_bytes is None else f" {self.upload_bytes}"
        return f"{self.key}{quota}".encode()

    @classmethod
    def decode(cls, attachment: bytes) -> Tenant:
        """From an attachment; raises ValueError where it is none."""
        key, _, quota = attachment.decode().partition(" ")
        return cls(key, int(quota) if quota else None)
