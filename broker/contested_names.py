"""Handles processes that register with the name of another worker, which is still alive.

If two processes with one name could replace each other, both would lose their leases again and
again, and the broker would quarantine their requests (``quarantine.py``). So the first process
keeps the name until its lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..protocol.errors import Code, RequestError
from ..protocol.worker_messages import Register
from .worker import Worker


@dataclass(slots=True)
class Contender:
    """A process that has registered with a name of another process, and waits for this name."""

    peer: bytes
    frames: list[bytes]
    """The last REGISTER of the process."""
    since: float
    """The time at which the process first registered, in seconds."""
    at: float
    """The time at which the process last registered, in seconds."""
    refused: bool = False


class ContestedNames:
    """For each contested name, the process that contended for it last."""

    def __init__(self, expiry_s: float) -> None:
        """``expiry_s``: a contender that has not registered again within this number of seconds
        does not receive the name."""
        self._expiry_s = expiry_s
        self._by_name: dict[str, Contender] = {}

    def contend(self, name: str, peer: bytes, frames: list[bytes], now: float) -> Contender:
        """Records that a process registers with a name that another process has."""
        contender = self._by_name.get(name)
        if contender is None or contender.peer != peer:
            contender = self._by_name[name] = Contender(peer, frames, now, now)
        contender.frames, contender.at = frames, now
        return contender

    def left(self, name: str, now: float) -> Contender | None:
        """Handles the end of a worker's lease; returns the contender that receives its name."""
        contender = self._by_name.pop(name, None)
        if contender is None or now - contender.at > self._expiry_s:
            return None
        return contender

    def on_gone(self, peer: bytes) -> None:
        """Handles the end of a connection: drops the contender on this connection, if any."""
        for name in [name for name, one in self._by_name.items() if one.peer == peer]:
            del self._by_name[name]


def process_of(message: Register) -> int:
    """The random number that identifies the registering process (``Register.process``), or its pid
    if the message does not have this number."""
    return message.process or message.pid


def taken(holder: Worker) -> RequestError:
    """The error for a process that registers with the name of the worker ``holder``."""
    return RequestError(
        Code.NOT_ALLOWED,
        f"the name {holder.name!r} belongs to process {holder.pid} on {holder.host}, which is "
        "alive; stop that process, or run this worker under another name (by default, the worker's "
        "host name and pid). This worker registers when that process has ended",
    )
