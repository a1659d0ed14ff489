"""Addresses that processes listen on."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this machine's users can connect to a host's address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
