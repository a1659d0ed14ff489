"""The keys that may connect, as the broker has last read them from the folder of keys."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.errors import Code, RequestError
from ..protocol.keys import Allowed, Role


class Keyring:
    """The public keys that may connect, by role. Empty if the broker has no keys."""

    def __init__(self) -> None:
        self.counts_tokens = False
        """Whether any client has a quota of tokens."""
        self._allowed: dict[Role, dict[str, tuple[str, Allowed]]] = {"client": {}, "worker": {}}

    def admits(self, role: Role, key: str) -> bool:
        """Whether a public key may connect in a role."""
        return key in self._allowed[role]

    def client(self, key: str) -> Allowed | None:
        """The rights of a client with this public key; None for an unknown key."""
        found = self._allowed["client"].get(key)
        return found[1] if found is not None else None

    def replace(self, role: Role, allowed: Mapping[str, Allowed]) -> set[str]:
        """Replaces the keys of a role. ``allowed``: the new keys by the names of their holders.
        Returns the keys that may not connect any more."""
        before = self._allowed[role]
        now = {entry.public: (name, entry) for name, entry in allowed.items()}
        self._allowed[role] = now
        if role == "client":
            self.counts_tokens = any(a.tokens_per_minute is not None for _, a in now.values())
        return before.keys() - now.keys()


def revoked(role: Role, key: str) -> RequestError:
    """The error for a client or worker whose key was revoked."""
    return RequestError(
        Code.NOT_ALLOWED,
        f"the key {key} of this {role} was revoked; ask the operator for another key",
    )
