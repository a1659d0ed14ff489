"""The worker's side of a guest process: the channels of the process, the requests to it, and the
watchdog. The watchdog kills the process if a call takes too long. A *question* is a guest's request
to the worker during a call."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from ....protocol.errors import ControllerError, TokenbusError
from ....protocol.shares import Shares
from ..guest_clock import QUESTION_S, add_guest_cpu
from ..guest_memory import TenantMemory
from ..limits import Limits
from ..pool import freeing_slot, waiting
from ..priority import Priority
from ..variable_calls import VariablesMark
from . import messages
from .channel import AREA_BYTES, MAX_REASON, SHARED_BYTES, Channel, ChannelClosed, ChannelFiles
from .launcher import Spawned
from .messages import Asked, Done, Fault, Outcome, ToGuest, Told

log = logging.getLogger(__name__)

MAX_CHANNELS = 300
"""Maximum number of simultaneous requests to a process. The number is above ``pool.MAX_WAITING``,
because each waiting job of a pool may have a request."""
MAX_WARM = 4
"""Number of free channels of a process that keep their memory. If a process has more free channels,
the memory of the others is freed after their requests."""
MAX_QUESTIONS = 10_000
"""Maximum questions of a guest in one call."""
MIN_QUESTIONS = 100
"""A call may ask one question for each ``QUESTION_S`` of its time limit, and in addition this
number of questions. The sandbox counts ``QUESTION_S`` of CPU time for each question, so only a
compromised process asks more questions."""
GRACE_S = 1.0
"""CPU time in seconds by which a call may exceed its limit before its process is killed. The
sandbox in the process stops a guest at the limit, so only code that the sandbox cannot stop runs
longer."""
EXCESS_S = 0.25
"""A process is killed if its CPU time exceeds the total duration of its requests by this time, in
seconds. Guests have no threads. So outside of requests, a process uses CPU time only when it
starts: a few milliseconds."""
WATCHED_S = 0.05
"""Seconds that a call must have run before the watchdog reads the CPU time of its process."""
BUSY_S = 0.005
"""If a process has used more than this CPU time, in seconds, since the last check, the watchdog
counts its threads."""
MAX_THREADS = MAX_CHANNELS + 100
"""Maximum threads of a process. Each channel has one thread, and the process has a few further
threads."""
MAX_WALL_S = 60.0
"""Seconds of wall-clock time after which a call's process is killed."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors if this process or the machine has no free descriptor."""


class Cause(Enum):
    """Why a process has ended, as seen by one request of the process."""

    KILLED = "killed"
    """The watchdog killed the process because of this request."""
    CRASHED = "crashed"
    """The process ended by itself, or the kernel killed it for lack of memory."""
    OTHER = "other"
    """The worker killed the process for another reason, another party killed the process, or the
    process had ended before the request."""


class GuestDied(Exception):
    """The process that should answer a request has ended."""

    def __init__(self, why: str, cause: Cause = Cause.OTHER, item: int = 0) -> None:
        """``item``: the number of the request's item that the process was running."""
        super().__init__(why)
        self.why = why
        self.cause = cause
        self.item = item


class Guest(Protocol):
    """The worker's side of a guest. ``remote.RemoteController`` implements it."""

    @property
    def limits(self) -> Limits:
        """The limits of the sequence."""

    def answer(self, asked: Asked) -> Told:
        """Answers a question of the guest; raises TokenbusError if the question is refused."""

    def mark(self) -> VariablesMark | None:
        """The state of the variables before a call; None if the call cannot be repeated."""

    def take_batched(self, token: int, outcome: Outcome | None, mask: memoryview) -> bool:
        """Records a round that ran in a batch, and its outcome; returns whether the round was usual
        (``interface.Batch``)."""

    def lost(self, died: GuestDied, mark: VariablesMark | None, suspect: bool) -> None:
        """Handles the end of the process during a batch. ``suspect``: whether the process was
        running this guest. ``mark``: the variables before the batch."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request that the process is running."""

    limit_s: float
    """CPU time limit of one item, in seconds."""
    items: int
    item: int = 0
    began_s: float = field(default_factory=time.monotonic)
    started_s: float = field(default_factory=time.monotonic)
    """The time at which the request began. ``began_s`` is the time at which the current item began,
    plus the duration of all *pauses* since then. During a pause, the process waits for the worker's
    answer to a question."""
    cpu_s: float | None = None
    """CPU time of the process when the watchdog first checked the current item, plus the CPU time
    of the pauses since then; None before this check."""
    first_cpu_s: float | None = None
    """CPU time of the process when the watchdog first checked the request, plus the CPU time of the
    pauses since then; None before this check."""
    paused: bool = False
    """Whether the process waits for the worker's answer to a question."""
    killed: str = ""


class _Seen(NamedTuple):
    """The times of a process at the last check of ``watch_usage``."""

    at_s: float
    served_s: float
    """Duration of all requests, in seconds."""
    cpu_s: float


class ChannelShares:
    """Counts the channels of the processes of each tenant. Tenants share the channels, because each
    channel has two of the worker's descriptors until its process ends. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._shares = Shares(capacity)

    @classmethod
    def of_descriptors(cls) -> ChannelShares:
        """Channels may have half of the descriptors of this process."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls((1 << 20 if most == resource.RLIM_INFINITY else most) // 4)

    def take(self, tenant: str, *, first: bool) -> bool:
        """Counts a further channel of a tenant. Returns False, and counts nothing, if the channel
        would exceed the tenant's share. The ``first`` channel of a process is always counted."""
        with self._lock:
            fits = first or self._shares.fits(tenant)
            if fits:
                self._shares.take(tenant)
            return fits

    def give_back(self, tenant: str) -> None:
        """Stops counting a channel of a tenant."""
        with self._lock:
            self._shares.give_back(tenant)


class GuestProcess:
    """A process of one tenant. Thread-safe."""

    def __init__(
        self,
        spawned: Spawned,
        memory: TenantMemory | None = None,
        tenant: str = "",
        shares: ChannelShares | None = None,
    ) -> None:
        self.pid = spawned.pid
        self._pidfd = spawned.pidfd
        self._control = spawned.control
        self._control.setblocking(False)
        self._clock = (~spawned.pid << 3) | 2
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._free: list[Channel] = []
        self._channels: list[Channel] = []
        self._long = threading.Lock()
        self._running: dict[Channel, _Running] = {}
        self._memory = memory
        self._tenant = tenant
        self._shares = shares
        self._granted = 0
        self.modules: set[str] = set()
        """The modules that the process has loaded."""
        self.loading = threading.Lock()
        """This lock is held while a module is loaded into the process."""
        self._counted: set[str] = set()
        """The modules whose bytes count towards the memory of the tenant."""
        self.controllers: dict[int, Guest] = {}
        """The live controllers by handle, the number of a controller in this process."""
        self._handles = 0
        self.dead = ""
        """The reason why the process has ended; empty while the process runs."""
        self._killed = False
        self._oom_kills = oom_kills()
        self.compromised = False
        """Whether the process has used CPU time or threads in a way that is impossible for guests
        inside the sandbox. Any controller of the process may then have left the sandbox."""
        self.started_s = self.last_used_s = time.monotonic()
        self._served_s = 0.0
        """Duration of all requests that have ended, in seconds."""
        self._seen = _Seen(time.monotonic(), 0.0, self._cpu_s())
        self._priority = Priority(spawned.pid)
        self._excess_s = 0.0
        """Recent CPU time beyond the duration of requests, in seconds."""

    @property
    def busy(self) -> bool:
        """Whether the process is running a request."""
        return bool(self._running)

    def new_handle(self) -> int:
        """A number for a new controller."""
        with self._lock:
            self._handles += 1
            return self._handles

    def count_module(self, module: str, size: int) -> None:
        """Counts the bytes of a module's compiled form, which stays in the process until the
        process ends. A module is counted once. Raises GuestDied if the process has ended, and
        ControllerError if its tenant would exceed its share of the memory."""
        with self._lock:
            if self.dead:
                raise GuestDied(self.dead)
            if module in self._counted:
                return
            if self._memory is not None:
                self._memory.take(size)
                self._granted += size
            self._counted.add(module)

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        """A channel for one request. Raises GuestDied if the process has ended, ControllerError if
        its tenant has no memory for a channel, and UnavailableError if too many jobs wait."""
        channel = self._take_channel()
        try:
            yield channel
        finally:
            channel.shrink(masks=len(self._free) >= MAX_WARM)
            with self._lock:
                ended = self._running.pop(channel, None)
                if ended is not None:
                    self._served_s += time.monotonic() - ended.started_s
                self._free.append(channel)
                self._changed.notify()
            if self.dead:
                self._free_channels()

    def request(self, channel: Channel, request: ToGuest, limit_s: float, items: int = 1) -> Done:
        """Sends a request, answers the questions of its guests, and returns the answer to the
        request. Raises GuestDied if the process ends. ``limit_s``: CPU time limit of each of the
        ``items``."""
        channel.current = 0
        questions = int(min(MAX_QUESTIONS, MIN_QUESTIONS + limit_s / QUESTION_S))
        running = self._running[channel] = _Running(limit_s, items)
        try:
            _send(channel, messages.encode(request))
            for _ in range(1 + questions * items):
                answer = self._receive(channel)
                if isinstance(answer, Done):
                    add_guest_cpu(answer.cpu_s)
                    return answer
                with self._paused(running):
                    told = messages.encode(self._told(answer))
                _send(channel, told)
            raise ChannelClosed(f"more than {questions} questions in a call")
        except ChannelClosed as error:
            if not self.dead:
                running.killed = f"it sent a message that is not valid: {error}"
                self.kill(running.killed)
            item = max(0, min(channel.current, items - 1))
            if running.killed:
                raise GuestDied(running.killed, Cause.KILLED, item) from None
            cause = Cause.OTHER if self._killed else Cause.CRASHED
            raise GuestDied(self.dead, cause, item) from None
        finally:
            self.last_used_s = time.monotonic()

    def watch(self, now_s: float) -> None:
        """Called periodically by the watchdog: kills the process if a request has exceeded its time
        limit."""
        for channel, running in list(self._running.items()):
            if running.paused:
                continue
            current = channel.current
            # Items run in order, so only a larger number is accepted. With smaller numbers, a
            # compromised process could restart the time of an item again and again.
            if running.item < current < running.items:
                running.item, running.began_s, running.cpu_s = current, now_s, None
            elif now_s - running.began_s > WATCHED_S:
                self._check(running, now_s)

    def watch_usage(self, now_s: float) -> None:
        """Lowers the priority of the process during a long call, or if it uses much CPU time. Kills
        the process if it uses CPU time beyond the duration of its requests, or has too many
        threads. Such a process runs code that does not belong to a request."""
        before = self._seen
        if now_s - before.at_s < WATCHED_S:
            return
        with self._lock:
            running_s = sum(now_s - each.started_s for each in self._running.values())
            seen = self._seen = _Seen(now_s, self._served_s + running_s, self._cpu_s())
        used_s, served_s = seen.cpu_s - before.cpu_s, seen.served_s - before.served_s
        running = list(self._running.values())
        calls_s = [0.0 if each.paused else now_s - each.began_s for each in running]
        share = used_s / (now_s - before.at_s)
        self._priority.watch(share, max(calls_s, default=None), len(running))
        self._excess_s = max(0.0, self._excess_s + used_s - served_s)
        if self._excess_s > EXCESS_S:
            self._kill_compromised("it used CPU time without a call")
        elif used_s > BUSY_S and (threads := _num_threads(self.pid)) > MAX_THREADS:
            self._kill_compromised(f"it has {threads} threads; at most {MAX_THREADS} are allowed")

    def kill(self, why: str) -> None:
        """Kills the process, unless it has ended. ``why``: the reason that other requests of the
        process report."""
        self._ended(why, killed=True)

    def died(self, code: int) -> None:
        """Called when the process has ended. ``code``: the exit code, or the negative number of the
        signal that ended the process."""
        was_killed = code == -signal.SIGKILL and oom_kills() == self._oom_kills
        self._ended(_why(code), killed=was_killed)

    # --- inside ---------------------------------------------------------------------------------

    def _kill_compromised(self, why: str) -> None:
        log.warning("guest process %d is killed, because %s", self.pid, why)
        self.compromised = True
        self.kill(why)

    def _receive(self, channel: Channel) -> messages.FromGuest:
        if not channel.quick():
            with freeing_slot():
                channel.wait()
        body, more = channel.take_part()
        if more:
            # The worker receives only one long message of a process at a time, because several long
            # messages together could fill the worker's memory.
            with freeing_slot(), self._long:
                body = channel.receive_rest(body)
        try:
            answer: messages.FromGuest = messages.decode_from_guest(body)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            raise ChannelClosed(str(error)) from None
        return answer

    @contextlib.contextmanager
    def _paused(self, running: _Running) -> Iterator[None]:
        """Wraps the worker's answer to a question. The time of the answer does not count towards
        the limit of the call."""
        running.paused = True
        began_s, began_cpu_s = time.monotonic(), self._cpu_s()
        yield
        cpu_s = self._cpu_s() - began_cpu_s
        running.began_s += time.monotonic() - began_s
        if running.cpu_s is not None:
            running.cpu_s += cpu_s
        if running.first_cpu_s is not None:
            running.first_cpu_s += cpu_s
        running.paused = False

    def _cpu_s(self) -> float:
        """The CPU time of the process; 0 when it has ended."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0

    def _told(self, asked: Asked) -> Told:
        try:
            if asked.what == "memory":
                self._take_memory(asked.number or 0)
                return Told()
            controller = self.controllers.get(asked.handle)
            if controller is None:
                return Told(error=Fault("internal", "the controller has ended"))
            return controller.answer(asked)
        except TokenbusError as error:
            return Told(error=Fault.of(error))

    def _take_memory(self, size: int) -> None:
        if self._memory is None:
            return
        with self._lock:
            # The size is bounded, because a compromised process may return more memory than it was
            # granted.
            size = max(size, -self._granted)
            if self.dead:
                raise ControllerError("controller_failed", "the process has ended")
            if size >= 0:
                self._memory.take(size)
            else:
                self._memory.give_back(-size)
            self._granted += size

    def _take_channel(self) -> Channel:
        try:
            with self._lock:
                channel = self._free_channel()
            if channel is None:
                # The slot is freed during the wait, because the requests that use the channels may
                # need it before they can end.
                with waiting(), self._lock:
                    while (channel := self._free_channel()) is None:
                        self._changed.wait(1.0)
            return channel
        except ChannelClosed as error:
            # The zygote, the parent of the process, has not reported the end of the process yet.
            self._ended(str(error), killed=False)
            raise GuestDied(self.dead) from None

    def _free_channel(self) -> Channel | None:
        """A channel that no request uses; None if all are in use. Raises GuestDied and
        ChannelClosed. Called under the lock."""
        if self.dead:
            raise GuestDied(self.dead)
        if self._free:
            return self._free.pop()
        return self._new_channel() if len(self._channels) < MAX_CHANNELS else None

    def _new_channel(self) -> Channel | None:
        """Makes a channel, and sends its descriptors to the process. Returns None if the process
        has not received the earlier channels yet, or if a further channel lacks memory or
        descriptors of its tenant, or descriptors of the worker. For the first channel, raises
        ControllerError without memory, and OSError without descriptors. Called under the lock. Does
        not wait for the process, because the watchdog needs the lock too."""
        first = not self._channels
        if self._shares is not None and not self._shares.take(self._tenant, first=first):
            return None
        if self._memory is not None:
            try:
                self._memory.take(SHARED_BYTES)
            except ControllerError:
                self._give_back_share()
                if first:
                    raise
                return None
        try:
            made = self._sent_channel()
        except BaseException as error:
            self._give_back_channel()
            if not first and isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
                return None
            raise
        if made is None:
            self._give_back_channel()
        else:
            self._channels.append(made)
        return made

    def _sent_channel(self) -> Channel | None:
        files = ChannelFiles.make()
        try:
            channel = Channel(files, guest=False)
        except OSError:
            for descriptor in files:
                os.close(descriptor)
            raise
        try:
            socket.send_fds(self._control, [b"c"], files)
        except OSError as error:
            channel.free()
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                return None
            raise ChannelClosed("its socket is closed") from None
        finally:
            os.close(files.memory)
        return channel

    def _give_back_channel(self) -> None:
        self._give_back_share()
        if self._memory is not None:
            self._memory.give_back(SHARED_BYTES)

    def _give_back_share(self) -> None:
        if self._shares is not None:
            self._shares.give_back(self._tenant)

    def _check(self, running: _Running, now_s: float) -> None:
        try:
            cpu_s = time.clock_gettime(self._clock)
        except OSError:
            return  # The process has just ended.
        if running.first_cpu_s is None:
            running.first_cpu_s = cpu_s
        if running.cpu_s is None:
            running.cpu_s = cpu_s
        # The requests that a process runs at the same time share its CPU time, so the limit is
        # multiplied by their number.
        beside = max(1, len(self._running))
        spent_s, total_s = cpu_s - running.cpu_s, cpu_s - running.first_cpu_s
        over = spent_s > beside * running.limit_s + GRACE_S
        over |= total_s > running.items * beside * running.limit_s + GRACE_S
        if over:
            running.killed = f"it used {spent_s:.1f} s of CPU time"
        elif now_s - running.began_s > MAX_WALL_S:
            running.killed = f"it did not answer within {MAX_WALL_S:g} s"
        if running.killed:
            log.warning("guest process %d is killed, because %s", self.pid, running.killed)
            self.kill(f"another call in its process was ended, because {running.killed}")

    def _ended(self, why: str, *, killed: bool) -> None:
        """Ends the process, and frees its resources, except channels that threads still use.
        ``killed``: whether the worker or another party has killed the process."""
        with self._lock:
            if self.dead:
                return
            self.dead, self._killed = why, killed
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            granted, self._granted = self._granted, 0
            self._changed.notify_all()
            for channel in self._channels:
                channel.close()
        with contextlib.suppress(OSError):
            if reason := self._control.recv(MAX_REASON):
                log.error("guest process %d failed: %r", self.pid, reason.decode(errors="replace"))
        self._control.close()
        if self._memory is not None and granted:
            self._memory.give_back(granted)
        self._free_channels()

    def _free_channels(self) -> None:
        # ``_ended`` uses the channels and the pidfd under the same lock, so it never uses closed
        # descriptors.
        with self._lock:
            for channel in self._free:
                self._channels.remove(channel)
                channel.free()
                self._give_back_channel()
            self._free.clear()
            if not self._channels and self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


def oom_kills() -> int:
    """The number of processes that the kernel has killed for lack of memory (/proc/vmstat)."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found is not None else 0


def _send(channel: Channel, message: bytes) -> None:
    """Sends a message to the process. The slot of the thread pool is free while the process reads
    the parts of a long message."""
    if len(message) <= AREA_BYTES:
        channel.send(message)
        return
    with freeing_slot():
        channel.send(message)


def _num_threads(pid: int) -> int:
    """The number of threads of a process; 0 if it is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[17])


def _why(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"
