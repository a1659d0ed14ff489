"""The functions of WASI that guests can import. They give access to a log, but not to the system,
and their results are deterministic.

The guest imports them from the module ``wasi_snapshot_preview1``. ``fd_write`` to descriptors 1 and
2 writes to the log; the arguments and the environment are empty; random bytes are zeros; the clock
is constant; the functions in ``_REFUSED`` return ``BADF``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from ....protocol.errors import Code, ControllerError
from .host_functions import HostFunction
from .instance import Guest

if TYPE_CHECKING:
    from ..host import Host

MODULE = "wasi_snapshot_preview1"

OK = 0
BADF = 8
CHARACTER_DEVICE = 2
CLOCK_NS = 1_700_000_000_000_000_000
"""The time of every clock, in nanoseconds."""
MAX_PIECES = 1024
"""Maximum buffers of one ``fd_write`` that are written to the log; further buffers are ignored."""
PIECE_WORK = 1024
"""Processing one buffer takes about as long as copying this number of bytes."""


class Served(Protocol):
    """The state that the host functions of a guest use."""

    guest: Guest
    host: Host


def start_function(exports: Iterable[str]) -> str | None:
    """The function that the host calls first, ``_initialize`` or ``_start``; None if the module
    exports neither."""
    return next((name for name in ("_initialize", "_start") if name in exports), None)


def _fd_write(state: Served, fd: int, pieces: int, count: int, written_at: int) -> int:
    if fd not in (1, 2):
        return BADF
    guest = state.guest
    written = 0
    guest.charge(PIECE_WORK * min(count, MAX_PIECES))
    table = guest.read(pieces, 8 * min(count, MAX_PIECES))
    for i in range(0, len(table), 8):
        address = int.from_bytes(table[i : i + 4], "little")
        size = int.from_bytes(table[i + 4 : i + 8], "little")
        guest.check(address, size)
        # Bytes that do not fit into the log are not read. ``room`` counts them as dropped.
        log = state.host.log
        log.write(guest.read(address, log.room(size)))
        written += size
    guest.word(written_at, written)
    return OK


def _proc_exit(state: Served, code: int) -> None:
    raise ControllerError(Code.CONTROLLER_FAILED, f"the guest exited with code {code}")


def _two_zeros(state: Served, first_at: int, second_at: int) -> int:
    state.guest.word(first_at, 0)
    state.guest.word(second_at, 0)
    return OK


def _fd_fdstat_get(state: Served, fd: int, into: int) -> int:
    if fd > 2:
        return BADF
    state.guest.write(into, bytes([CHARACTER_DEVICE]) + bytes(23))
    return OK


def _random_get(state: Served, into: int, size: int) -> int:
    state.guest.charge(size)
    state.guest.zero(into, size)
    return OK


def _clock_time_get(state: Served, clock: int, precision: int, into: int) -> int:
    state.guest.write(into, CLOCK_NS.to_bytes(8, "little"))
    return OK


def _clock_res_get(state: Served, clock: int, into: int) -> int:
    state.guest.write(into, (1).to_bytes(8, "little"))
    return OK


def _ok(state: Served, *arguments: int) -> int:
    return OK


def _badf(state: Served, *arguments: int) -> int:
    return BADF


_ANSWERED = {
    "fd_write": HostFunction("iiii", "i", _fd_write),
    "proc_exit": HostFunction("i", "", _proc_exit),
    "args_sizes_get": HostFunction("ii", "i", _two_zeros),
    "args_get": HostFunction("ii", "i", _ok),
    "environ_sizes_get": HostFunction("ii", "i", _two_zeros),
    "environ_get": HostFunction("ii", "i", _ok),
    "fd_fdstat_get": HostFunction("ii", "i", _fd_fdstat_get),
    "random_get": HostFunction("ii", "i", _random_get),
    "clock_time_get": HostFunction("iIi", "i", _clock_time_get),
    "clock_res_get": HostFunction("ii", "i", _clock_res_get),
    "sched_yield": HostFunction("", "i", _ok),
    "fd_sync": HostFunction("i", "i", _ok),
}
_REFUSED = {
    "fd_advise": "iIIi",
    "fd_allocate": "iII",
    "fd_close": "i",
    "fd_datasync": "i",
    "fd_fdstat_set_flags": "ii",
    "fd_fdstat_set_rights": "iII",
    "fd_filestat_get": "ii",
    "fd_filestat_set_size": "iI",
    "fd_filestat_set_times": "iIIi",
    "fd_pread": "iiiIi",
    "fd_prestat_get": "ii",
    "fd_prestat_dir_name": "iii",
    "fd_pwrite": "iiiIi",
    "fd_read": "iiii",
    "fd_readdir": "iiiIi",
    "fd_renumber": "ii",
    "fd_seek": "iIii",
    "fd_tell": "ii",
    "path_create_directory": "iii",
    "path_filestat_get": "iiiii",
    "path_filestat_set_times": "iiiiIIi",
    "path_link": "iiiiiii",
    "path_open": "iiiiiIIii",
    "path_readlink": "iiiiii",
    "path_remove_directory": "iii",
    "path_rename": "iiiiii",
    "path_symlink": "iiiii",
    "path_unlink_file": "iii",
    "poll_oneoff": "iiii",
    "proc_raise": "i",
    "sock_accept": "iii",
    "sock_recv": "iiiiii",
    "sock_send": "iiiii",
    "sock_shutdown": "ii",
}

WASI: dict[tuple[str, str], HostFunction] = {
    **{(MODULE, name): function for name, function in _ANSWERED.items()},
    **{(MODULE, name): HostFunction(params, "i", _badf) for name, params in _REFUSED.items()},
}
"""Every function of WASI preview 1, by module and name."""
