"""Sends tasks to a process over its standard input, and receives the replies."""

from __future__ import annotations

import selectors
import struct
import subprocess
from contextlib import suppress
from typing import IO

_LENGTH = struct.Struct("<I")


def read(source: IO[bytes]) -> bytes | None:
    """Reads the next message of a pipe; returns None if the pipe ends before the end of the
    message."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    message = source.read(size)
    return message if len(message) == size else None


def write(target: IO[bytes], message: bytes) -> None:
    """Writes a message to a pipe."""
    target.write(_LENGTH.pack(len(message)) + message)
    target.flush()


def exchange(process: subprocess.Popen[bytes], task: bytes, wall_s: float) -> bytes | None:
    """The reply of a process to a task; None if the process has ended. Raises TimeoutError if the
    reply takes longer than ``wall_s`` seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        write(process.stdin, task)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(wall_s):
                raise TimeoutError
        return read(process.stdout)
    except BrokenPipeError:
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Closes the pipes of a process, so that it ends. Waits for its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()
