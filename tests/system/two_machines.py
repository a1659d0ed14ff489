"""Two machines that are network namespaces, and a link that can delay and lose packets or be cut.

Each machine has its own interfaces, addresses and host name. The link consists of a TUN device in
each machine, and of a thread that carries IP packets from one device to the other. The thread
delays and drops packets like a bad network, and TCP cannot detect a difference. The link needs no
programs of the operating system, and no kernel module except ``tun``.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
IFF_UP, IFF_RUNNING = 0x1, 0x40
TUN = "/dev/net/tun"
MAX_PACKET = 65536

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


class CannotMakeError(Exception):
    """Machines cannot be made here. The message names the missing privilege or device."""


class Machine:
    """A machine, and its address on the link. ``run`` calls a function on the machine."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        """The thread that is in the machine's namespaces. Its child processes inherit them."""
        try:
            self.tun = self.run(self._enter)
        except BaseException:
            self._thread.shutdown()
            raise

    def run(self, do: Callable[[], T]) -> T:
        """Calls ``do`` on this machine and returns its result. Processes that ``do`` starts also
        run on this machine."""
        return self._thread.submit(do).result()

    def close(self) -> None:
        """Removes the machine from the link. The machine exists until its last process ends."""
        os.close(self.tun)
        self._thread.shutdown()

    def _enter(self) -> int:
        """Moves this thread to new namespaces, and returns the descriptor of their TUN device."""
        if _libc.unshare(CLONE_NEWNET | CLONE_NEWUTS):
            why = os.strerror(ctypes.get_errno())
            raise CannotMakeError(f"no right to make network namespaces (CAP_SYS_ADMIN): {why}")
        socket.sethostname(self.name)
        try:
            tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CannotMakeError(f"no TUN device can be made: {error}") from None
        try:
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"link", IFF_TUN | IFF_NO_PI))
            _configure("lo", "127.0.0.1", "255.0.0.0")
            _configure("link", self.address, "255.255.255.0")
        except OSError as error:
            os.close(tun)
            raise CannotMakeError(f"an interface cannot be set up: {error}") from None
        return tun


def _configure(interface: str, address: str, mask: str) -> None:
    """Gives an interface of this machine its address, and switches it on."""
    name = interface.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, mask)):
            given = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(any_socket, request, given)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH", name, IFF_UP | IFF_RUNNING))


class Link:
    """Carries packets between two machines, in each direction with a delay of ``delay_s`` seconds,
    and loses the fraction ``loss`` of the packets. Packets that would arrive while ``cut`` is True
    are also lost."""

    def __init__(self, one: Machine, other: Machine, seed: int = 1) -> None:
        self.delay_s = self.loss = 0.0
        self.cut = False
        self.carried = self.lost = 0
        """Numbers of packets that have been delivered, and that have been lost."""
        self._across = {one.tun: other.tun, other.tun: one.tun}
        self._draw = random.Random(seed)
        self._stop_r, self._stop_w = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the link. Must be called before the machines are closed."""
        os.close(self._stop_w)
        self._thread.join()
        os.close(self._stop_r)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        """For each packet: its time of arrival, its number, the TUN device to which it goes, and
        its content."""
        numbers = 0
        poller = select.poll()
        for end in (*self._across, self._stop_r):
            poller.register(end, select.POLLIN | select.POLLHUP)
        while True:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, end, packet = heapq.heappop(waiting)
                self._deliver(end, packet)
            wait_ms = 1000 * (waiting[0][0] - now) if waiting else None
            for end, _ in poller.poll(wait_ms if wait_ms is None else max(1, round(wait_ms))):
                if end == self._stop_r:
                    return
                for packet in _packets(end):
                    numbers += 1
                    if self._draw.random() < self.loss:
                        self.lost += 1
                        continue
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(waiting, (due, numbers, self._across[end], packet))

    def _deliver(self, end: int, packet: bytes) -> None:
        if self.cut:
            self.lost += 1
            return
        try:
            os.write(end, packet)
            self.carried += 1
        except OSError:
            self.lost += 1


def _packets(end: int) -> list[bytes]:
    """All packets that a machine has sent and that have not been read yet. ``end``: its TUN
    device."""
    packets = []
    try:
        while True:
            packets.append(os.read(end, MAX_PACKET))
    except BlockingIOError:
        return packets
