"""Reads the file with the hashes of API keys. This module does not import packages of the extra
``gateway``."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from ....protocol.keys import KeyFault, OwnKey

LINE = re.compile(r"(?P<name>\S+)\s+(?P<hash>[0-9a-f]{64})(\s+(?P<key>\S.*))?")
OPERATOR = "+operator"
"""The third part of a line. It says that the API key is the operator's."""


class KeyFileError(ValueError):
    """A file of API keys cannot be read."""


class ApiKeys:
    """The API keys of a file. Each line has the holder's name and the hexadecimal SHA-256 of an API
    key. If the holder is a tenant of the bus, the path of the tenant's CURVE key file follows,
    relative to this file. Instead of the path, a line may have the word ``+operator``: the API key
    then allows the operator's requests over HTTP. The gateway sends these requests with its own
    CURVE key.

    The API keys themselves, 256 random bits each, are not in the file. Empty lines and lines that
    begin with ``#`` are skipped.
    """

    def __init__(
        self,
        names: dict[str, str],
        tenants: dict[str, OwnKey] | None = None,
        operators: frozenset[str] = frozenset(),
    ) -> None:
        self._names = names
        self._tenants = tenants or {}
        """The tenants' CURVE keys, by the holder's name."""
        self._operators = operators
        """The hashes of the API keys with ``+operator``. The same holder may have further API keys
        without this word."""

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Reads a file of API keys; raises KeyFileError, which names the faulty line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"cannot read the API keys of {path}: {error}") from None
        names: dict[str, str] = {}
        tenants: dict[str, OwnKey] = {}
        operators = set[str]()
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            entry = LINE.fullmatch(text)
            if entry is None:
                raise KeyFileError(
                    f"line {number} of {path} is not valid; expected a name and a SHA-256 (64 "
                    "hexadecimal digits), as 'tokenbus api-key NAME' writes them"
                )
            names[entry["hash"]] = entry["name"]
            if entry["key"] == OPERATOR:
                operators.add(entry["hash"])
            elif entry["key"]:
                try:
                    tenants[entry["name"]] = OwnKey.read(path.parent / entry["key"])
                except KeyFault as fault:
                    raise KeyFileError(f"line {number} of {path}: {fault}") from None
        if not names:
            raise KeyFileError(f"{path} has no API key; 'tokenbus api-key NAME' makes one")
        return cls(names, tenants, frozenset(operators))

    def name_of(self, key: str) -> str | None:
        """The name of the holder of a key; None for an unknown key."""
        return self._names.get(hash_of(key))

    def is_operator(self, key: str) -> bool:
        """Whether a key may send the operator's requests over HTTP."""
        return hash_of(key) in self._operators

    def tenant_of(self, name: str) -> OwnKey | None:
        """The CURVE key with which requests of a holder are sent; None for the gateway's own
        key."""
        return self._tenants.get(name)


def new_key() -> str:
    """A new API key: 256 random bits."""
    return "tb-" + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """The hash of a key for the file. A plain hash is enough, because the key is random."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
