"""Chooses the kind of connection to the broker, by the scheme of the broker's address."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ..protocol.frames import Frames
from ..protocol.keys import OwnKey
from . import memory
from .dealer import Dealer, Peer


class Carrier(Protocol):
    """A connection with its own thread, over a socket (``Dealer``) or in memory
    (``MemoryCarrier``)."""

    @property
    def address(self) -> str:
        """The address of the broker to which the carrier connects at the moment."""

    @property
    def started(self) -> bool:
        """Whether the thread was started."""

    @property
    def forked(self) -> bool:
        """Whether this object is a copy in a forked process. The connection's thread does not exist
        there."""

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if the system cannot start another thread."""

    def wake(self) -> None:
        """Makes the connection's thread call the peer's ``outgoing`` soon. Any thread and any
        finalizer may call this method."""

    def send(self, queue: deque[Frames]) -> None:
        """Sends the messages of ``queue`` in order, on the calling thread if possible. If this is
        not possible, the connection's thread soon calls the peer's ``outgoing``, which must yield
        the messages of ``queue``. Any thread may call ``send``."""

    def close(self) -> None:
        """Sends the peer's remaining messages, and ends the connection and its thread."""


def carrier(
    address: str,
    peer: Peer,
    name: str,
    linger_ms: int,
    *,
    packed: bool = False,
    key: OwnKey | None = None,
) -> Carrier:
    """Connects ``peer`` to the broker at ``address``; ``name`` is the name of the thread.

    ``linger_ms``: maximum time in milliseconds that ``close`` spends on sending the remaining
    messages. ``packed``: whether messages on a socket are packed, as between broker and workers
    (``protocol/packing.py``). ``key``: the key with which a socket connects, if any. Raises
    AddressError if the address is not valid.
    """
    if address.startswith(memory.SCHEME):
        return memory.MemoryCarrier(address, peer, name)
    return Dealer(address, peer, name, linger_ms, packed=packed, key=key)
