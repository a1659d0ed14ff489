"""Addresses that processes listen on."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def separate(addresses: str) -> list[str]:
    """Splits a list of addresses at its commas. If the list is empty, the result is one empty
    address."""
    return [part.strip() for part in addresses.split(",") if part.strip()] or [""]


def numbered(address: str, number: int) -> str:
    """Derives the address of the broker ``number`` from ``address``, the address of broker 0. A TCP
    port increases by 10 from each broker to the next. The name of a socket file gets ``-NUMBER``,
    before its suffix if it has one.

    Raises ValueError if ``number`` is not 0, and the address is neither a ``tcp://`` address with a
    port nor an ``ipc://`` address.
    """
    if not number:
        return address
    if address.startswith("ipc://"):
        head, dot, suffix = address.rpartition(".")
        if dot and "/" not in suffix:
            return f"{head}-{number}.{suffix}"
        return f"{address}-{number}"
    head, _, port = address.rpartition(":")
    if not (address.startswith("tcp://") and port.isdecimal()):
        raise ValueError(f"{address!r} has no port; use an address like tcp://127.0.0.1:5555")
    return f"{head}:{int(port) + 10 * number}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or a loopback address. Only users of this machine can reach
    such a host."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int]:
    """The host and the port of an address such as ``127.0.0.1:8080``, ``localhost:8080`` or
    ``[::1]:8080``.

    Raises ValueError if ``address`` does not consist of a host and a port above 0.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path or parts.username is not None:
        raise ValueError(
            f"{address!r} is not an address of a host and a port; use one like 127.0.0.1:8080"
        )
    return host, port
