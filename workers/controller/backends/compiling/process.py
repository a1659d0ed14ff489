"""The program of a process that compiles and checks grammars: ``python -m
tokenbus.workers.controller.backends.compiling.process``.

The process reads tasks from stdin and writes their outcomes to stdout. A timer bounds the CPU time
of each task, and a resource limit bounds the memory of the process. The thread that runs the tasks
has a stack of bounded size. The process ends if a task exceeds one of these bounds.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

import msgspec

from .....protocol.decoders import msgpack_decoder
from .....protocol.errors import RequestError
from ...priority import long_call, lower_priority
from ...task_pipes import read, write
from .bounds import STACK_BYTES
from .tasks import Done, Task

SHARE = 0.75
"""The search for a grammar's shortest text stops after this share of the task's limit on CPU
time."""


def _done(task: Task) -> Done:
    """Runs a task. Modules are imported here, because a process may never receive a task that needs
    them."""
    match task.kind:
        case "llguidance":
            from ..llguidance.trial import check

            return Done(refused=check(task.grammar.decode()))
        case "shortest":
            from ..llguidance.completion import shortest_text

            until = time.thread_time() + SHARE * task.cpu_s
            return Done(shortest=shortest_text(task.grammar.decode(), until))
        case "blame":
            from ..llguidance.blame import blamed

            return Done(refused=blamed(task.grammar.decode(), task.failed, task.cpu_s))
        case "rewrite":
            from ..llguidance.schemas import implemented

            return Done(tables=implemented(task.grammar.decode()).encode())
        case "relax":
            from ..llguidance.schemas import relaxed_text

            return Done(tables=relaxed_text(task.grammar))
    from ..grammar.automata import MAKERS

    try:
        return Done(tables=MAKERS[task.kind](task.grammar, task.cpu_s))
    except RequestError as error:
        return Done(refused=error.message)


def _serve() -> None:
    while (message := read(sys.stdin.buffer)) is not None:
        task = msgpack_decoder(Task).decode(message)
        # Tasks of all kinds except ``llguidance`` and ``shortest`` check their CPU time themselves.
        # Their timer ends later, so that they can report an error before the kernel ends the
        # process.
        spare = 0.0 if task.kind in ("llguidance", "shortest") else 0.3 + task.cpu_s / 4
        signal.setitimer(signal.ITIMER_PROF, task.cpu_s + spare)
        with long_call():
            reply = msgspec.msgpack.encode(_done(task))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write(sys.stdout.buffer, reply)
    os._exit(0)


if __name__ == "__main__":
    memory = int(sys.argv[1])
    lower_priority()
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve).start()
    threading.stack_size(0)  # The other threads have the usual stack.
