"""A TCP connection between a client and a server that a test can cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

from ..processes import free_port


class Wire:
    """Carries the connections that are opened to ``front`` to the server at ``target``
    (``tcp://HOST:PORT``). While the wire is cut, no connection can be opened."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        # While the wire is cut, no outgoing connection takes a port of ``free_port``.
        self._address = "127.0.0.1", free_port()
        self.front = f"tcp://127.0.0.1:{self._address[1]}"
        """The address of this end of the wire."""
        self._server = socket.create_server(self._address)
        self._accept()

    def cut(self) -> None:
        """Closes all connections and refuses new ones."""
        with self._lock:
            for end in (self._server, *self._open):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._open.clear()

    def mend(self) -> None:
        """Accepts connections again."""
        self._server = socket.create_server(self._address)
        self._accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def _accept(self) -> None:
        threading.Thread(target=self._serve, args=[self._server], daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open += (near, far)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=[one, other], daemon=True).start()


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Carries bytes in one direction until an end is closed."""
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
