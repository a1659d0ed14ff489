"""Encodes the tenant of a request, which the broker reports to controller workers and the state
worker."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """A tenant: the clients of one key, or all clients without a key.

    In a message for the store of modules, the tenant is the last attachment. In a ``START``, the
    tenant is the first attachment, and the id of the session is the second (``owner_of``). A
    ``VARIABLE`` has the tenant as its last attachment if the tenant has a key. ``quota_bytes`` is
    the quota of variables in a ``VARIABLE``, and the quota of modules in a message for the store of
    modules.
    """

    key: str = ""
    quota_bytes: int | None = None
    """The tenant's quota of the resource that the message concerns; None if it is unlimited."""

    def encode(self) -> bytes:
        """Encodes the tenant as an attachment."""
        quota = "" if self.quota_bytes is None else f" {self.quota_bytes}"
        return f"{self.key}{quota}".encode()

    @classmethod
    def decode(cls, attachment: bytes) -> Tenant:
        """The tenant in an attachment; raises ValueError if it is not valid."""
        key, _, quota = attachment.decode().partition(" ")
        return cls(key, int(quota) if quota else None)


def owner_of(attachments: list[bytes]) -> str:
    """The owner of a request's guests, from the attachments of a ``START``: the request's tenant,
    or its session if clients do not have keys. Raises ValueError if the attachments are not
    valid."""
    tenant = attachments[0].decode()
    return tenant or " ".join(["session", *(each.decode() for each in attachments[1:2])])
