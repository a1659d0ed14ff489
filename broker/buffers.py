"""Prompt parts that sessions keep, for their requests to name."""

from __future__ import annotations

from ..protocol.buffers import buffer_bytes
from ..protocol.errors import Code, RequestError
from ..protocol.messages import Buffer
from .settings import BrokerSettings
from .tables import Session


class Buffers:
    """Keeps the buffers of each session within their bounds."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings

    def on_message(self, session: Session, message: Buffer, attachments: list[bytes]) -> None:
        """A client's ``BUFFER``: keeps one, or drops it."""
        kept = buffer_bytes(message, tuple(attachments))
        if kept is None:
            session.buffer_bytes -= len(session.buffers.pop(message.name, b""))
        else:
            self.keep(session, message.name, kept)

    def keep(self, session: Session, name: str, kept: bytes) -> None:
        """Keeps a buffer for a session; raises ``too_large`` where it does not fit."""
        total = session.buffer_bytes - len(session.buffers.get(name, b"")) + len(kept)
        if total > self._settings.max_buffer_bytes:
            raise RequestError(
                Code.TOO_LARGE,
                f"with the buffer {name!r} this session's buffers would have {total} bytes; "
                f"{self._settings.max_buffer_bytes} are allowed",
            )
        session.buffers[name] = kept
        session.buffer_bytes = total

    def named(self, session: Session, names: list[str]) -> list[bytes]:
        """The buffers that a request names; raises ``unknown_buffer``."""
        for index, name in enumerate(names):
            if name not in session.buffers:
                raise RequestError(
                    Code.UNKNOWN_BUFFER,
                    f"this session has no buffer {name!r}; send it with BUFFER first",
                    path=f"$.buffers[{index}]",
                )
        return [session.buffers[name] for name in names]
