"""``python fork_server.py DESCRIPTOR MODULE…``: forks processes that have these modules imported.

A program for ``forks.py``, by itself so that it starts with nothing else imported. It takes orders
from the socket DESCRIPTOR, and ends with all that it has started when the other end closes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import TypedDict

PR_SET_PDEATHSIG = 1
MAX_ORDER_BYTES = 1 << 20
"""In bytes; it holds an environment."""


class Order(TypedDict):
    """Run ``python -m module arguments…`` in a folder, with an environment, its output appended to
    a log.

    With the order comes the descriptor of a pipe, into which its return code is written.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    log: str


def main() -> None:
    """Serves orders; in a process that is forked, runs its module."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    # A module of the folder where a process runs comes before all others, none of this file's does.
    del sys.path[0]
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{sys.argv[2:]} start {len(threads) - 1} threads when imported"
    gc.collect()
    gc.freeze()
    # A key at the terminal goes to the tests and to the processes; this one ends after them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = serve(orders)
    if order is not None:
        sys.argv[:] = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def serve(orders: socket.socket) -> Order | None:
    """Forks a process for each order, and tells when one has ended.

    Returns the order in the process that was forked for it; None here, after the last one.
    """
    running: dict[int, tuple[int, int]] = {}
    """By the descriptor of a process: its id, and the pipe that waits for its return code."""
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    _report(key.fd, *running.pop(key.fd))
                    continue
                text, pipes, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
                if not text:
                    for child, _ in running.values():
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                    return None
                order: Order = json.loads(text)
                server = os.getpid()
                child = os.fork()
                if child == 0:
                    for descriptor in (orders.detach(), *pipes, *_all(running)):
                        os.close(descriptor)
                    _become(order, server)
                    return order
                orders.send(str(child).encode())
                process = os.pidfd_open(child)
                running[process] = child, pipes[0]
                selector.register(process, selectors.EVENT_READ)


def _all(running: dict[int, tuple[int, int]]) -> list[int]:
    """Descriptors that belong to the server alone."""
    return [fd for process, (_, pipe) in running.items() for fd in (process, pipe)]


def _report(process: int, pid: int, pipe: int) -> None:
    """Collects a process that has ended, and writes its return code."""
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with suppress(BrokenPipeError):
        os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(pipe)


def _become(order: Order, server: int) -> None:
    """Makes the forked process what a started one is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path.insert(0, order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, descriptor)
    os.close(log)
    tempfile.tempdir = None
    # Python's own generator takes a new seed in each fork by itself.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


if __name__ == "__main__":
    main()
