"""Reads a stream on a thread."""

from __future__ import annotations

import threading

from tokenbus.clients import TokenbusError
from tokenbus.clients.results import GeneratedSequence
from tokenbus.clients.streams import Stream

BOUND_S = 300.0
"""Seconds after which a stream counts as hung. All streams end sooner, even if processes are
killed."""


class Reader:
    """Reads a stream to its end on a thread."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.error: TokenbusError | None = None
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> TokenbusError | None:
        """Waits for the end of the stream; returns its error or None."""
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "a stream hangs"
        return self.error

    def whole(self) -> list[GeneratedSequence]:
        """Waits for the end of a stream without an error; returns its sequences."""
        error = self.end()
        assert error is None, error
        return self.stream.sequences

    @property
    def ended(self) -> bool:
        """Whether the stream has been read to its end."""
        return not self._thread.is_alive()

    @property
    def tokens(self) -> list[int]:
        return self.stream.sequences[0].tokens if self.stream.sequences else []

    def _run(self) -> None:
        try:
            for _ in self.stream:
                self.began.set()
        except TokenbusError as error:
            self.error = error
        except RuntimeError:
            pass  # The test closed the stream.
        self.began.set()
