"""Tokenbus within one process: broker, workers and clients as threads, without a socket.

    from tokenbus.inprocess import InProcess

    with InProcess() as system, system.connect() as lmtp:
        lmtp.send('GENERATE {"stream_id": 1, "prompt": "def add(a, b):", "text": true}')
        for line in lmtp:
            print(line)

The threads run the same code as the separate processes, and exchange the same messages. Queues
replace the sockets. The package is meant for tests, notebooks, and programs that contain their own
model server.
"""

from .connection import Connection
from .system import InProcess

__all__ = ["Connection", "InProcess"]
