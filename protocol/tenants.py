"""Encodes the tenant of a request as an attachment. The broker adds this attachment to messages for
controller workers and the state worker."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """A tenant: the clients of one key, or all clients without a key.

    In a message about modules, the tenant is the last attachment. In a ``START``, the tenant is the
    first attachment, and the id of the session is the second (``owner_of``). A ``VARIABLE`` has the
    tenant as its last attachment, but only if the tenant has a key. In a ``VARIABLE``,
    ``quota_bytes`` is the quota of variables. In a message about modules, it is the quota of
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
    """Reads the owner of a request's guests from the attachments of a ``START``. The owner is the
    request's tenant or, if clients do not have keys, the request's session. Raises ValueError if
    the attachments are not valid."""
    tenant = attachments[0].decode()
    return tenant or " ".join(["session", *(each.decode() for each in attachments[1:2])])
