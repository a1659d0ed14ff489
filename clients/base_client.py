"""``BaseClient``: the common base of the blocking client and the asyncio client."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..protocol.keys import OwnKey, own_key
from ..protocol.settings import load
from .connection import Connection
from .lanes import Delivery
from .request_options import Prompt


class BaseClient:
    """A client's connection to a broker. The parameters are those of ``Client``."""

    def __init__(
        self,
        front: str | None,
        deliver: Callable[[Delivery], None],
        patience_s: float | None,
        key: OwnKey | None,
        session: str | None = None,
        keep_s: float = 0.0,
    ) -> None:
        """``deliver`` receives events on the connection's thread. ``session``: the token of a
        session that the client begins or takes over; None: a session with a new token. Raises
        KeyFault if the key cannot be read, and AddressError if ``front`` is not a valid address."""
        settings = load(front=front)
        self.front = settings.front_endpoint if front is None else settings.front
        if patience_s is None:
            patience_s = max(settings.session_timeout_s, keep_s)
        self._connection = Connection(
            self.front,
            deliver,
            patience_s,
            key or own_key(settings, "client"),
            session,
            keep_s,
        )
        self._close = weakref.finalize(self, self._connection.close)
        self._sent_buffers: dict[str, Prompt] = {}
        """The contents of the buffers that this client has sent, by name. Recordings need them."""

    @property
    def broker(self) -> str:
        """The address in ``front`` that the client currently uses."""
        return self._connection.broker
