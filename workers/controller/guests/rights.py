"""Functions with which a guest process gives up its rights before it runs code of clients.

Isolation consists of several independent layers. If the system does not support a layer, this layer
is reported as missing, and the other layers still apply. System calls are refused by
``system_calls.py``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Callable

from ....protocol.guest_user import GuestUser
from .system_calls import ARCHITECTURE, COLUMN, program

MAX_FILES = 1024
"""Maximum descriptors of a guest process. Each channel uses two descriptors."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x2008_0522
_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000
_CLONE_NEWIPC = 0x0800_0000
_MS_RESTRICTED = 2 | 4 | 8
"""Flags of a mount: set-user-ID bits and devices have no effect, and programs cannot be
executed."""
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 0x4000, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = (155, 41)
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION = 1
_LANDLOCK_FILES = (0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
"""All rights to files that a version of landlock has, as bits. The first number is for version
1."""
_LANDLOCK_NET, _LANDLOCK_SCOPES = 3, 3
"""Rights to TCP connections (from version 4), and to abstract Unix sockets and signals (from
version 6), as bits."""

_libc = ctypes.CDLL(None, use_errno=True)


def isolate(*, same_users: bool) -> list[str]:
    """Moves this process and its later forks to an empty network and an empty file system. Called
    by the only thread of this process. Returns the layers that are missing.

    ``same_users``: whether this process must keep its user ids. If false, the process may enter a
    new user namespace, in which it has the rights to enter the other namespaces.
    """
    spaces = {
        "a network namespace": _CLONE_NEWNET | _CLONE_NEWIPC,
        "a mount namespace": _CLONE_NEWNS,
    }
    every = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWNS
    missing = [_missing(name) for name, flags in spaces.items() if _libc.unshare(flags)]
    if missing and (same_users or _libc.unshare(_CLONE_NEWUSER | every)):
        return missing
    return [_missing("a mount namespace")] if _empty_mounts() else []


def _empty_mounts() -> int:
    """Replaces all file systems of this mount namespace by an empty file system. Returns 0 on
    success, 1 on failure."""
    place = b"/proc"
    failed = _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    failed = failed or _libc.mount(b"none", place, b"tmpfs", _MS_RESTRICTED, b"size=4k,mode=0555")
    if failed:
        return 1
    os.chdir(place)
    # pivot_root mounts the old root over the new root. The old root is then unmounted.
    if _libc.syscall(_PIVOT_ROOT[COLUMN], b".", b".") or _libc.umount2(b".", _MNT_DETACH):
        return 1
    os.chdir("/")
    read_only = _MS_RESTRICTED | _MS_REMOUNT | _MS_RDONLY
    return int(_libc.mount(None, b"/", None, read_only, b"size=4k,mode=0555"))


def bound_memory(memory_bytes: int) -> None:
    """Limits the private writable memory of this process. Shared memory is not limited."""
    # A limit on addresses (RLIMIT_AS) is not possible, because wasmtime reserves 4 GiB of addresses
    # for each Wasm memory.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def drop_rights(
    memory_bytes: int = resource.RLIM_INFINITY, user: GuestUser | None = None
) -> list[str]:
    """Gives up the rights of this process. Called by the only thread of this process. Returns the
    layers that are missing. ``memory_bytes``: bound on the private writable memory of the process.
    ``user``: the new user of the process; None if the user does not change."""
    bound_memory(memory_bytes)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if most == resource.RLIM_INFINITY else min(MAX_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    layers: list[Callable[[], str]] = [
        lambda: _change_user(user) if user is not None else "",
        _no_capabilities,
        _not_dumpable,
        _no_new_privileges,
        _landlock,
        _seccomp,
    ]
    return [missing for layer in layers if (missing := layer())]


def _change_user(user: GuestUser) -> str:
    try:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    except OSError as error:
        return f"a user of their own ({errno.errorcode[error.errno or errno.EPERM]})"
    # The signal that ends this process with its parent is set again, because the change of the user
    # has cleared the setting.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return ""


def _no_capabilities() -> str:
    """Gives up all capabilities. The user root has all of them, and other users may have some."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    return _missing("a user without capabilities") if _libc.capset(header, bytes(24)) else ""


def _not_dumpable() -> str:
    """Prevents other processes of the same user from reading this process's memory."""
    failed = _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    return _missing("PR_SET_DUMPABLE") if failed else ""


def _no_new_privileges() -> str:
    failed = _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return _missing("PR_SET_NO_NEW_PRIVS") if failed else ""


def _landlock() -> str:
    """Makes landlock prevent this process from opening or changing files, making TCP connections,
    and sending signals to other processes."""
    call = _libc.syscall
    version = call(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return _missing("landlock")
    files = _LANDLOCK_FILES[min(version, len(_LANDLOCK_FILES)) - 1]
    handled = [files]
    if version >= 4:
        handled.append(_LANDLOCK_NET)
    if version >= 6:
        handled.append(_LANDLOCK_SCOPES)
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    size = ctypes.c_size_t(len(attributes))
    rules = call(_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    if rules < 0:
        return _missing("landlock")
    try:
        return _missing("landlock") if call(_LANDLOCK_RESTRICT_SELF, rules, 0) else ""
    finally:
        os.close(rules)


def _seccomp() -> str:
    """Makes the kernel check each system call with the program of ``system_calls.py``."""
    if not ARCHITECTURE:
        return "seccomp (no list of system calls for this architecture)"
    code = program(os.getpid())
    instructions = ctypes.create_string_buffer(code, len(code))
    address = ctypes.addressof(instructions)
    described = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, address))
    if _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0):
        return _missing("seccomp")
    return ""


def _missing(layer: str) -> str:
    return f"{layer} ({errno.errorcode.get(ctypes.get_errno(), 'unknown error')})"
