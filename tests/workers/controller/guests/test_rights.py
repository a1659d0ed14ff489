"""The operating system refuses a guest process everything that guests do not need. Each layer of
protection also works alone."""

from __future__ import annotations

import json
import os
import platform
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenbus.protocol.guest_user import GuestUser
from tokenbus.workers.controller.guests.messages import Close
from tokenbus.workers.controller.guests.process import GuestDied
from tokenbus.workers.controller.guests.system_calls import (
    ALLOWED,
    CLONE,
    CLONE3,
    FCNTL,
    MEMFD_CREATE,
    MMAP,
    TGKILL,
)

from .remote_guests import CALM, Sequence, running

pytestmark = pytest.mark.process

BEGIN = """
import ctypes, errno, fcntl, json, os, signal, socket, sys, threading
from tokenbus.workers.controller.guests import rights
libc = ctypes.CDLL(None, use_errno=True)
def tried(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def called(*arguments):
    ctypes.set_errno(0)
    libc.syscall(*map(ctypes.c_long, arguments))
    return errno.errorcode.get(ctypes.get_errno(), "done")
"""


def in_a_process(code: str) -> Any:
    """The JSON output of a Python program. ``code`` itself gives up the rights of the program."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_layer_is_there_or_named() -> None:
    assert in_a_process("""print(json.dumps(rights.drop_rights()))""") == []


def test_fewer_descriptors_than_a_guest_process_may_have_are_enough() -> None:
    """The hard limit of the worker is below the limit of guest processes."""
    in_a_process("""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
rights._no_capabilities()
print(json.dumps(rights.drop_rights()))
""")


def test_a_guest_process_reaches_neither_files_nor_sockets_nor_other_processes() -> None:
    tries = in_a_process("""
parent, own = os.getppid(), os.getpid()
reader, writer = os.pipe()
rights.drop_rights()
tries = {
    "open": lambda: open("/etc/passwd"),
    "proc": lambda: open(f"/proc/{parent}/mem", "rb"),
    "own maps": lambda: open("/proc/self/maps"),
    "write": lambda: open("/tmp/guest", "w"),
    "list": lambda: os.listdir("/"),
    "link": lambda: os.symlink("/etc", "/tmp/guest"),
    "unlink": lambda: os.unlink("/tmp/guest"),
    "chdir": lambda: os.chdir("/"),
    "tcp": lambda: socket.socket(socket.AF_INET),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "kill parent": lambda: os.kill(parent, signal.SIGTERM),
    "stop itself": lambda: os.kill(own, signal.SIGSTOP),
    "pidfd": lambda: os.pidfd_open(parent),
    "setuid": lambda: os.setuid(12345),
    "nice": lambda: os.nice(1),
    "blocking": lambda: fcntl.fcntl(reader, fcntl.F_SETFL, 0),
    "lock": lambda: fcntl.flock(reader, fcntl.LOCK_EX),
    "pipe": os.pipe,
}
print(json.dumps({name: tried(act) for name, act in tries.items()}))
""")
    assert set(tries.values()) == {"EPERM"}


def test_a_file_that_a_guest_process_received_cannot_grow() -> None:
    assert in_a_process("""
memory = os.memfd_create("channel")
os.ftruncate(memory, 4096)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rights.drop_rights()
print(json.dumps([tried(lambda: os.write(memory, bytes(1))),
                  tried(lambda: os.ftruncate(memory, 8192)),
                  tried(lambda: os.memfd_create("more"))]))
""") == ["EFBIG", "EPERM", "ENOSYS"]


def test_a_guest_process_starts_threads_and_uses_memory() -> None:
    assert in_a_process("""
rights.drop_rights()
found = []
thread = threading.Thread(target=lambda: found.append(len(bytearray(50_000_000))))
thread.start()
thread.join()
print(json.dumps(found))
""") == [50_000_000]


def test_the_kernel_bounds_the_memory_of_a_guest_process() -> None:
    assert in_a_process("""
rights.drop_rights(memory_bytes=300_000_000)
found = [len(bytearray(100_000_000))]
try:
    bytearray(400_000_000)
except MemoryError:
    found.append("refused")
print(json.dumps(found))
""") == [100_000_000, "refused"]


def test_memory_that_no_limit_counts_is_refused() -> None:
    assert in_a_process("""
import mmap
rights.drop_rights(memory_bytes=300_000_000)
kinds = {
    "private": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    "shared": mmap.MAP_SHARED | mmap.MAP_ANONYMOUS,
    "validated": 0x03 | mmap.MAP_ANONYMOUS,
    "grows down": 0x100 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
}
print(json.dumps({
    name: tried(lambda: mmap.mmap(-1, 4096, flags=flags)) for name, flags in kinds.items()
}))
""") == {"private": "done", "shared": "EPERM", "validated": "EPERM", "grows down": "EPERM"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the call numbers are of x86-64")
def test_every_system_call_that_is_not_listed_is_refused() -> None:
    listed = {numbers[0] for numbers in ALLOWED.values()}
    listed |= {numbers[0] for numbers in (CLONE, TGKILL, FCNTL, MMAP)}
    # The kernel does not pass uretprobe and uprobe to seccomp; a program that calls them ends.
    others = sorted(set(range(462)) - listed - {335, 336})
    refused = in_a_process(f"""
rights.drop_rights()
print(json.dumps([called(number, -1, -1, -1, -1, -1, -1) for number in {others}]))
""")
    odd = {number: said for number, said in zip(others, refused, strict=True) if said != "EPERM"}
    assert odd == {CLONE3[0]: "ENOSYS", MEMFD_CREATE[0]: "ENOSYS"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the call numbers are of x86-64")
def test_calls_are_listed_with_their_arguments_only() -> None:
    assert (
        in_a_process(f"""
parent, own = os.getppid(), os.getpid()
rights.drop_rights()
print(json.dumps([
    called({CLONE[0]}, signal.SIGCHLD, 0, 0, 0, 0),
    called({TGKILL[0]}, parent, parent, 0),
    called({TGKILL[0]}, own, own, signal.SIGKILL),
    called({TGKILL[0]}, own, own, signal.SIGSTOP),
    called({FCNTL[0]}, 1, fcntl.F_DUPFD, 9),
]))
""")
        == ["EPERM"] * 5
    )


def test_landlock_alone_refuses_files() -> None:
    assert in_a_process("""
libc.prctl(38, 1, 0, 0, 0)
assert not rights._landlock()
print(json.dumps([tried(lambda: open("/etc/passwd")), tried(lambda: open("/tmp/guest", "w"))]))
""") == ["EACCES", "EACCES"]


def status_of(sequence: Sequence) -> dict[str, str]:
    """The fields of ``/proc/<pid>/status`` for the process of a sequence, by name."""
    pid = sequence.controller._process.pid  # type: ignore[attr-defined]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines)


def test_a_guest_process_has_an_empty_network_and_file_system_and_no_capabilities(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        missing = runtime.runtime.missing_layers()
        assert not {"network", "mount", "seccomp", "landlock"} & set(" ".join(missing).split())
        assert f"guest processes run without {', '.join(missing)}" in caplog.text
        pid = sequence.controller._process.pid  # type: ignore[attr-defined]
        for name in ("net", "mnt"):
            assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
        assert os.listdir(f"/proc/{pid}/root/") == []
        status = status_of(sequence)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may change its user")
def test_guest_processes_run_under_a_user_of_their_own() -> None:
    nobody = pwd.getpwnam("nobody")
    user = GuestUser(nobody.pw_uid, nobody.pw_gid)
    with running(user=user) as runtime:
        assert not any("a user of their own" in each for each in runtime.runtime.missing_layers())
        sequence = Sequence(runtime.program(CALM))
        status = status_of(sequence)
        assert set(status["Uid"].split()) == {str(user.uid)}
        assert set(status["Gid"].split()) == {str(user.gid)}
        assert status["Groups"].split() == []
        # The worker can still kill the process, and repeats its sequences.
        sequence.controller._process.kill("the test ends it")  # type: ignore[attr-defined]
        sequence.round()
        assert sequence.allowed() == [2]


@pytest.mark.skipif(os.getuid() != 0, reason="the test itself changes its user")
def test_a_user_without_rights_gets_namespaces_with_a_namespace_of_users() -> None:
    assert in_a_process("""
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(json.dumps([rights.isolate(same_users=False), os.listdir("/"), rights.drop_rights()]))
""") == [[], [], []]


@pytest.mark.skipif(os.getuid() != 0, reason="the test itself changes its user")
def test_a_user_without_rights_that_keeps_its_users_lacks_namespaces() -> None:
    assert in_a_process("""
os.setresuid(65534, 65534, 65534)
print(json.dumps(rights.isolate(same_users=True)))
""") == ["a network namespace (EPERM)", "a mount namespace (EPERM)"]


def test_the_kernel_ends_guest_processes_first_if_memory_runs_out() -> None:
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        pid = sequence.controller._process.pid  # type: ignore[attr-defined]
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 1000


def test_each_guest_process_has_a_process_group() -> None:
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        pid = sequence.controller._process.pid  # type: ignore[attr-defined]
        assert os.getpgid(pid) == pid


def test_a_guest_process_cannot_write_to_the_log_of_its_worker() -> None:
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        pid = sequence.controller._process.pid  # type: ignore[attr-defined]
        assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {os.devnull}


def test_the_error_of_a_guest_process_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with running() as runtime:
        sequence = Sequence(runtime.program(CALM))
        process = sequence.controller._process  # type: ignore[attr-defined]
        with process.channel() as channel, pytest.raises(GuestDied):
            process.request(channel, Close("not a number"), 1.0)  # type: ignore[arg-type]
    [failed] = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert "ValidationError" in failed
    assert "\n" not in failed
