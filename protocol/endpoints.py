"""Addresses that processes listen on."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address, which only users of this machine can reach."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of ``127.0.0.1:8080``, ``localhost:8080`` or ``[::1]:8080``.

    Raises ValueError if it is not such an address.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path or parts.username is not None:
        raise ValueError(f"{address!r} is not an address; use one as 127.0.0.1:8080")
    return host, port
