"""Tokenbus within one process: broker, workers and clients as threads, without a socket.

    from tokenbus.inprocess import InProcess

    with InProcess() as system, system.connect() as lmtp:
        lmtp.send('GENERATE {"stream_id": 1, "prompt": "def add(a, b):", "text": true}')
        for line in lmtp:
            print(line)

The same code as in processes of their own, joined by queues in place of sockets; the protocol does
not know the difference. For tests, notebooks, and programs that bring their own model server.
"""

from .connection import Connection
from .system import InProcess

__all__ = ["Connection", "InProcess"]
