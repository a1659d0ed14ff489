"""The zygote, which forks guest processes that can be taken over: see ``takeovers.py``."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from tokenbus.workers.controller.guests import guest, zygote

from .takeovers import ARGUMENT, load_library

_library = load_library()
_worker = os.getppid()
_begin = guest.GuestProcess._begin
_run = guest.run
_control: list[int] = []


def _run_noting(control: Any, *rest: Any) -> None:
    _control.append(control.fileno())
    _run(control, *rest)


def _begin_or_take_over(self: Any, handle: int, program: Any, spec: Any) -> Any:
    if spec.arg.startswith(ARGUMENT):
        channel = guest._this_thread.channel
        memory = ctypes.addressof(ctypes.c_char.from_buffer(channel._map))
        name = spec.arg.removeprefix(ARGUMENT)
        events = channel._theirs, channel._mine
        _library.take_over(name, memory, *events, *_control, handle, os.getppid(), _worker)
    return _begin(self, handle, program, spec)


guest.GuestProcess._begin = _begin_or_take_over  # type: ignore[method-assign]
guest.run = _run_noting  # type: ignore[assignment]

if __name__ == "__main__":
    zygote._main()
