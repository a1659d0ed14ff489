"""``BaseClient``: the common base of the blocking client and the asyncio client."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.keys import OwnKey, own_key
from ..protocol.settings import load
from .connection import Connection
from .lanes import Delivery
from .request_options import Prompt
from .session import ClientSession


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The parameters of ``Client`` and ``AsyncClient`` that select the broker and the session. None
    stands for the default, which may depend on the settings."""

    front: str | None
    patience_s: float | None
    key: OwnKey | None
    keep_s: float
    session: str | None = None
    """The token of a named session; None begins a new session."""


class BaseClient:
    """A client's connection to a broker."""

    def __init__(self, options: ClientOptions, deliver: Callable[[Delivery], None]) -> None:
        """``deliver`` receives events on the connection's thread. Raises KeyFault if the key cannot
        be read, and AddressError if ``front`` is not a valid address."""
        front, patience_s = options.front, options.patience_s
        settings = load(front=front)
        self.front = settings.front_endpoint if front is None else settings.front
        if patience_s is None:
            patience_s = max(settings.session_timeout_s, options.keep_s)
        key = options.key or own_key(settings, "client")
        session = ClientSession(self.front, patience_s, time.monotonic(), options.session)
        session.keep_s = options.keep_s
        self._connection = Connection(session, key, deliver)
        self._close = weakref.finalize(self, self._connection.close)
        self._sent_buffers: dict[str, Prompt] = {}
        """The contents of the buffers that this client has sent, by name. Recordings need them."""

    @property
    def broker(self) -> str:
        """The address in ``front`` that the client currently uses."""
        return self._connection.broker
