"""Records the calls of a controller, so that they can be repeated in a new process.

The recorded calls are in the memory of the worker, and count towards the memory of the tenant. A
guest chooses the tokens that it appends and drops, and a sequence may be woken thousands of times
for each token.
"""

from __future__ import annotations

import array
import threading
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ....protocol.errors import ControllerError
from ..guest_memory import TenantMemory
from ..host import Host
from ..limits import Limits
from .messages import Advance, Item, Mid, Prompt, ToGuest, decode_to_guest, encode

MAX_REPEATED = 64
"""Maximum number of rounds that one request of a replay repeats."""
GRANT_BYTES = 64 * 1024
"""The bytes of a recording count towards the memory of the tenant in multiples of this number."""
CALL_BYTES = 160
"""The bytes that are counted for a recorded call in addition to its content."""
TOKEN_BYTES = 4
"""The bytes that a round takes whose only input is one sampled token."""


class Begun(NamedTuple):
    """The beginning of a sequence in the recorded calls."""

    host: Host


class Calls(NamedTuple):
    """Equal calls that were made one after another, for example the rounds of a sequence that was
    woken and suspended again."""

    request: bytes
    """The encoded request of each call. An encoded token takes up to five bytes, and a list of
    numbers takes 36 bytes for each token."""
    times: int = 1


Call: TypeAlias = "Calls | array.array[int]"
"""Recorded calls. An array stands for several rounds, each of which has one sampled token and no
other input."""


class _Argument:
    """The argument of a request, which all sequences of the request share. It counts once towards
    the memory of the tenant, until the last of their recordings is closed. Thread-safe."""

    def __init__(self, memory: TenantMemory | None, size: int) -> None:
        """``size``: bytes of the argument. Raises ControllerError if the tenant would exceed its
        share."""
        self._memory = memory if size else None
        self._size = size
        self._users = 1
        self._lock = threading.Lock()
        if self._memory is not None:
            self._memory.take(size)

    def share(self) -> _Argument:
        """The argument for the recording of one more sequence."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """Called when a recording is closed."""
        with self._lock:
            self._users -= 1
            if not self._users and self._memory is not None:
                self._memory.give_back(self._size)


class Recording:
    """The recorded calls of a sequence. The calls of its ancestors up to each fork come first."""

    def __init__(self, host: Host, parent: Recording | None = None) -> None:
        before = parent.events if parent is not None else []
        copied = (event[:] if isinstance(event, array.array) else event for event in before)
        self.events: list[Begun | Call] = [*copied, Begun(host)]
        """The calls in order, beginning with the first ancestor of the sequence. A ``Begun``
        precedes the calls of each sequence."""
        self.failure: ControllerError | None = None
        """The error with which the sequence ends, because its tenant has no memory for its
        recorded calls."""
        self._memory = host.memory
        self._bytes = self._granted = 0
        self._closed = False
        self._argument: _Argument | None = None
        """None if the tenant has no memory for the argument."""
        try:
            if parent is None:
                self._argument = _Argument(host.memory, len(host.arg))
            elif parent._argument is not None:
                self._argument = parent._argument.share()
        except ControllerError as error:
            self.failure = error
        self._count(parent._bytes if parent is not None else 0)

    def add(self, call: Prompt | Mid) -> None:
        """Records a call."""
        self._add(encode(call))

    def add_round(self, item: Item) -> None:
        """Records a round. A round whose only input is one sampled token takes four bytes."""
        if item != Item(0, item.tokens) or item.tokens is None or len(item.tokens) != 1:
            self._add(encode(Advance([item])))
            return
        last = self.events[-1]
        if isinstance(last, array.array):
            last.append(item.tokens[0])
            self._count(TOKEN_BYTES)
        else:
            self.events.append(array.array("I", item.tokens))
            self._count(CALL_BYTES)

    def close(self) -> None:
        """Stops counting the recorded calls. Called when the controller makes no further call."""
        self._closed = True
        argument, self._argument = self._argument, None
        if argument is not None:
            argument.close()
        granted, self._granted = self._granted, 0
        if self._memory is not None and granted:
            self._memory.give_back(granted)

    def _add(self, request: bytes) -> None:
        last = self.events[-1]
        if isinstance(last, Calls) and last.request == request:
            self.events[-1] = Calls(request, last.times + 1)
        else:
            self.events.append(Calls(request))
            self._count(CALL_BYTES + len(request))

    def _count(self, size: int) -> None:
        """Counts ``size`` more bytes. Sets ``failure`` if the tenant would exceed its share."""
        self._bytes += size
        if self._memory is None or self._bytes <= self._granted or self._closed:
            return
        grant = -(-(self._bytes - self._granted) // GRANT_BYTES) * GRANT_BYTES
        try:
            self._memory.take(grant)
        except ControllerError as error:
            self.failure = error
        else:
            self._granted += grant


def repetitions(
    call: Call, handle: int, limits: Limits, max_items: int
) -> Iterator[tuple[ToGuest, float]]:
    """The requests that repeat a call for the controller ``handle``, each with its CPU time limit
    in seconds. ``max_items``: maximum items of a request."""
    if isinstance(call, Calls):
        for _ in range(call.times):
            yield _repetition(call.request, handle, limits)
        return
    most = min(MAX_REPEATED, max_items)
    items = [Item(handle, [token]) for token in call]
    for at in range(0, len(items), most):
        yield Advance(items[at : at + most]), most * limits.watched_round_s


def _repetition(request: bytes, handle: int, limits: Limits) -> tuple[ToGuest, float]:
    match decode_to_guest(request):
        case Prompt(_, tokens):
            return Prompt(handle, tokens), limits.init_s
        case Mid(_, group):
            return Mid(handle, group), limits.watched_round_s
        case Advance([item]):
            return Advance([addressed(item, handle)]), limits.watched_round_s
    raise AssertionError("only calls of a controller are recorded")


def addressed(item: Item, handle: int, limits: Limits | None = None) -> Item:
    """A copy of an item, addressed to the controller ``handle``. ``limits``: the controller's new
    limits if they have changed."""
    return Item(
        handle,
        item.tokens,
        item.backtrack,
        item.last,
        item.distributions,
        limits or item.limits,
        item.scores,
        item.refusal,
        item.logprobs,
    )
