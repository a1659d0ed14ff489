"""``python fork_server.py DESCRIPTOR MODULE…``: imports the modules, then forks processes.

``forks.py`` starts this program. It is a separate program, so that its forks begin only with these
modules imported. It receives orders from the socket DESCRIPTOR. When the other end of the socket
closes, it kills the processes that it has forked, and ends.
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
"""Maximum size of an order, which contains an environment, in bytes."""


class Order(TypedDict):
    """An order to run ``python -m module arguments…`` in a folder with an environment, and to
    append the output of the module to a log.

    The descriptor of a pipe is sent with the order. The server writes the return code of the
    process to this pipe.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    log: str


def main() -> None:
    """Serves orders. In a forked process, runs the module of the order."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    # This entry is the folder of this file, from which a forked process must not import modules.
    del sys.path[0]
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # When transformers loads its first model, it compiles a thousand patterns, which takes 0.3 s.
    if conversion := sys.modules.get("transformers.conversion_mapping"):
        conversion.get_checkpoint_conversion_mapping("llama")
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{sys.argv[2:]} start {len(threads) - 1} threads when imported"
    gc.collect()
    gc.freeze()
    # Ctrl-C at the terminal also reaches the tests and the forked processes. The server ignores it,
    # because the server must end after them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = serve(orders)
    if order is not None:
        sys.argv[:] = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def serve(orders: socket.socket) -> Order | None:
    """Forks a process for each order, and reports the return code of each process that ends.

    In a forked process, returns the order. In the server, returns None after the last order.
    """
    running: dict[int, tuple[int, int]] = {}
    """For each running process, by its descriptor: the process's id, and the pipe for its return
    code."""
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
    """The descriptors of all running processes, and of the pipes for their return codes."""
    return [fd for process, (_, pipe) in running.items() for fd in (process, pipe)]


def _report(process: int, pid: int, pipe: int) -> None:
    """Collects the status of a process that has ended, and writes its return code to ``pipe``."""
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with suppress(BrokenPipeError):
        os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(pipe)


def _become(order: Order, server: int) -> None:
    """Gives this forked process the environment, the folder and the log of its order, and lets
    Ctrl-C interrupt it. The process is killed when ``server``, the process that forked it, ends."""
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
    # Python's random generator gets a new seed in each fork. The generator of numpy does not.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


if __name__ == "__main__":
    main()
