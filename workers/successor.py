"""Asks supervisord whether it will start a successor when this process has ended.

supervisord restarts a process that has ended, unless supervisord itself is ending. The question is
sent to supervisord's Unix socket. supervisord sets the path of this socket in the environment of
each process that it starts.
"""

from __future__ import annotations

import logging
import os
import socket
import xmlrpc.client
from http.client import HTTPConnection, HTTPException
from typing import Any

log = logging.getLogger(__name__)

ASK_S = 2.0
"""Maximum time for supervisord's answer, in seconds."""
UNIX = "unix://"


def successor_comes() -> bool | None:
    """True if supervisord will start this process again. None if supervisord is ending. False if
    supervisord does not answer, or has not started this process.

    The result is also True after ``supervisorctl stop``, because this command looks like the first
    half of ``supervisorctl restart``.
    """
    path = os.environ.get("SUPERVISOR_SERVER_URL", "")
    group, name = (os.environ.get(f"SUPERVISOR_{kind}_NAME") for kind in ("GROUP", "PROCESS"))
    if not path.startswith(UNIX) or not group or not name:
        return False
    transport = _Transport(path.removeprefix(UNIX))
    try:
        proxy: Any = xmlrpc.client.ServerProxy("http://localhost", transport=transport)
        # When supervisord is ending, it answers with a fault.
        process = proxy.supervisor.getProcessInfo(f"{group}:{name}")
        return bool(process["pid"] == os.getpid())
    except xmlrpc.client.Fault as fault:
        log.info("supervisord does not start a successor: %s", fault.faultString)
        return None if fault.faultString.startswith("SHUTDOWN_STATE") else False
    except (OSError, HTTPException, xmlrpc.client.Error, KeyError, TypeError) as error:
        log.warning("supervisord did not answer whether it starts a successor: %s", error)
    finally:
        transport.close()
    return False


class _Transport(xmlrpc.client.Transport):
    """XML-RPC over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: object) -> HTTPConnection:
        return _Connection(self._path)


class _Connection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ASK_S)
        self.sock.connect(self._path)
