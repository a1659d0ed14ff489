"""A zygote whose second guest process cannot be forked, as if the machine had no room for another
process."""

from __future__ import annotations

import errno
import itertools
import os

from tokenbus.workers.controller.guests import zygote

REFUSED = 3
"""The number of the fork that fails. The first fork finds the missing layers of isolation."""

_fork = os.fork
_numbers = itertools.count(1)


def _refusing_fork() -> int:
    if next(_numbers) == REFUSED:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


if __name__ == "__main__":
    os.fork = _refusing_fork
    zygote._main()
