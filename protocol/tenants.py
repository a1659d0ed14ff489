"""The tenant of a request, as the broker reports it to controller workers and the state worker."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """A tenant: the clients of one key, or all clients without a key.

    The tenant is the last attachment of a ``START`` and of a message for the store of modules. If
    the tenant has a key, it is also the last attachment of a ``VARIABLE``. In a message for the
    store, ``quota_bytes`` is the quota of the store. In a ``VARIABLE``, it is the quota of
    variables.
    """

    key: str = ""
    quota_bytes: int | None = None
    """The tenant's quota of the resource that the message concerns; None: unlimited."""

    def encode(self) -> bytes:
        """Encodes the tenant as an attachment."""
        quota = "" if self.quota_bytes is None else f" {self.quota_bytes}"
        return f"{self.key}{quota}".encode()

    @classmethod
    def decode(cls, attachment: bytes) -> Tenant:
        """The tenant in an attachment; raises ValueError if it is not valid."""
        key, _, quota = attachment.decode().partition(" ")
        return cls(key, int(quota) if quota else None)
