"""The system calls of a guest process, and the seccomp program that refuses all others.

A guest process has no interface to the kernel except the calls in this file. A compromised process
cannot open files or sockets, start programs, send signals to other processes or read their memory.
"""

from __future__ import annotations

import errno
import fcntl
import platform
import signal
import struct

ALLOWED = {
    # Calls that wait for the worker and answer it.
    "poll": (7, None),
    "ppoll": (271, 73),
    "read": (0, 63),
    "write": (1, 64),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "rt_sigtimedwait": (128, 137),
    # Calls that receive the descriptors of channels.
    "recvmsg": (47, 212),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    # Memory of the process and of its guests.
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "membarrier": (324, 283),
    # Threads.
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "gettid": (186, 178),
    "getpid": (39, 172),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # Signals of the process itself: traps of guests, and the tick.
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "setitimer": (38, 103),
    "restart_syscall": (219, 128),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "getrandom": (318, 278),
}
"""System calls that are allowed with any arguments, with their numbers on x86-64 and on arm64. A
number is None if the architecture does not have the call. The most frequent calls come first."""

MMAP = (9, 222)
"""mmap is allowed only for mappings that RLIMIT_DATA counts, or that have a file. Anonymous shared
memory and memory that grows downwards would not count towards any limit."""
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN = 0x01, 0x20, 0x100
CLONE = (56, 220)
"""clone may start threads, but not processes. The bits of its first argument distinguish the
two."""
CLONE_THREAD = 0x0001_0000
CLONE3 = (435, 435)
"""clone3 is refused, because seccomp cannot read its arguments. The error is ENOSYS, after which
libc uses ``clone``."""
MEMFD_CREATE = (319, 279)
"""memfd_create is refused, because files in memory do not count towards any limit. The error is
ENOSYS, after which wasmtime copies the initial memory of a module into each instance."""
TGKILL = (234, 131)
"""tgkill may send signals only to the process itself, as abort() does. The signals in
``OTHERS_SIGNALS`` are refused."""
OTHERS_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
"""Signals that a guest process may not send to itself. If the process ended itself with SIGKILL,
the worker would assume that another party had killed it, and would not suspect the guest's
module."""
FCNTL = (72, 25)
"""fcntl may have only the commands in ``FCNTL_COMMANDS``. F_SETFL is not among them, because it
would also change the flags of the worker's descriptor."""
FCNTL_COMMANDS = (
    fcntl.F_GETFD,
    fcntl.F_SETFD,
    fcntl.F_GETFL,
    fcntl.F_DUPFD_CLOEXEC,
)

_MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""For each machine name, the index of its system call numbers in the pairs above, and the kernel's
number of the architecture."""
COLUMN, ARCHITECTURE = _MACHINES.get(platform.machine(), (0, 0))
"""``COLUMN`` is the index of this machine's number in each pair. ``ARCHITECTURE`` is 0 if the
architecture is unknown."""

_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_KILL = 0x8000_0000
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_AT, _SECOND_AT, _THIRD_AT, _FOURTH_AT = 0, 4, 16, 24, 32, 40

_Instruction = tuple[int, int, int, int]
"""An instruction of BPF: the operation, the distances of its two jumps (if true, if false), and its
constant."""


def program(pid: int) -> bytes:
    """The BPF program for the process ``pid``, as an array of ``struct sock_filter``."""
    made: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, ARCHITECTURE),
        # Calls of another architecture, such as those of the 32-bit interface, have other numbers.
        # Such calls kill the process.
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for numbers in ALLOWED.values():
        number = numbers[COLUMN]
        if number is not None:
            made += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    made += _mmap()
    made += _conditional(CLONE[COLUMN], _FIRST_AT, [(_BITS, 0, 1, CLONE_THREAD)])
    made += _tgkill(pid)
    commands = [(_EQUAL, 0, 1, command) for command in FCNTL_COMMANDS]
    made += _conditional(FCNTL[COLUMN], _SECOND_AT, commands)
    for absent in (CLONE3, MEMFD_CREATE):
        made += [(_EQUAL, 0, 1, absent[COLUMN]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    made.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *one) for one in made)


def _mmap() -> list[_Instruction]:
    """Allows or refuses a mapping, depending on the low half of its flags."""
    body: list[_Instruction] = [
        (_LOAD, 0, 0, _FOURTH_AT),
        (_BITS, 3, 0, _MAP_GROWSDOWN),
        (_BITS, 0, 1, _MAP_ANONYMOUS),
        (_BITS, 1, 0, _MAP_SHARED),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    return [(_EQUAL, 0, len(body), MMAP[COLUMN]), *body]


def _tgkill(pid: int) -> list[_Instruction]:
    """Allows or refuses a signal, depending on the receiving process and the number of the
    signal."""
    body: list[_Instruction] = [
        (_LOAD, 0, 0, _FIRST_AT),
        (_EQUAL, 1, 0, pid),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _THIRD_AT),
    ]
    for refused in OTHERS_SIGNALS:
        body += [(_EQUAL, 0, 1, refused), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    body.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(body), TGKILL[COLUMN]), *body]


def _conditional(number: int, argument_at: int, tests: list[_Instruction]) -> list[_Instruction]:
    """Allows a call if one of the tests holds for the low half of an argument."""
    body: list[_Instruction] = [(_LOAD, 0, 0, argument_at)]
    for test in tests:
        body += [test, (_RETURN, 0, 0, _ALLOW)]
    body.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return [(_EQUAL, 0, len(body), number), *body]
