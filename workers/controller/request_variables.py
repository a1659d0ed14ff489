"""Orders a request's operations on variables, and answers them from a copy of the variables.

An *operation* reads or writes a variable, an input or a context. All controllers of a request run
in one worker. The first worker that runs a request has a copy of the request's variables. The copy
answers operations without a wait. Each operation is then sent to the state worker with its place in
the order (``Variable.place``), and the state worker confirms the operation.

A RESULT or a tool call that depends on an operation is sent only after the state worker has
confirmed this operation and all earlier ones (``when_confirmed``). So if the worker dies, a replay
receives the same answers.

Another worker may continue the request while this worker still runs, for example because this
worker was suspended. The first new operation of the other worker takes the next place. The places
of this worker's operations are then wrong. So the state worker refuses these operations, and the
request ends in this worker.

A worker without a copy waits for the state worker in each operation. A worker drops the copy when
the copy becomes too large. Later workers of a request never use a copy, because two workers may run
the request at the same time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Protocol

from msgspec import structs

from ...protocol.errors import Code, ControllerError
from ...protocol.worker_messages import Variable, VariableAnswer
from ..variables import VariableStorage
from .guest_memory import TenantMemory
from .pool import waiting

COPIED = frozenset(("get", "set", "append"))
"""The operations that the copy can answer. Other operations depend on the client's inputs, or on
other requests of the tenant."""
MAX_COPY_BYTES = 1024 * 1024
"""Maximum bytes of a copy, as ``StorageLimits`` counts them."""
GRANT_BYTES = 64 * 1024
"""The bytes of a copy, rounded up to a multiple of this number, count towards the memory of the
tenant."""
MAX_UNCONFIRMED = 64
"""Maximum operations of a request that the state worker has not confirmed."""
UNCONFIRMED_BYTES = 4 * 1024 * 1024
"""Maximum bytes of the unconfirmed operations of all requests of a worker. Each tenant has a share
of this number. A tenant that exceeds its share waits for the confirmation of each operation. So the
tenant does not delay other tenants' operations at the state worker."""
OPERATION_BYTES = 4096
"""The bytes that are counted for an unconfirmed operation, in addition to its value."""


class StateWorker(Protocol):
    """Sends the operations of one request to the state worker."""

    def perform(self, operation: Variable) -> VariableAnswer:
        """Sends an operation and waits for its answer. Raises TokenbusError if the operation
        fails."""

    def send(self, operation: Variable, answered: Callable[[VariableAnswer], None]) -> None:
        """Queues an operation, which is sent together with the next message. ``answered`` is called
        once, on another thread, with the answer to the operation."""

    def flush(self) -> None:
        """Sends the operations that are waiting for the next message."""


class _Mode(Enum):
    FIRST = "first"
    """No operation has been answered yet."""
    AHEAD = "ahead"
    """The copy answers the operations."""
    WAITS = "waits"
    """Each operation waits for the state worker."""


class RequestVariables:
    """The operations of one request. Thread-safe."""

    def __init__(
        self,
        state: StateWorker,
        failed: Callable[[], None] = lambda: None,
        memory: TenantMemory | None = None,
        unconfirmed: TenantMemory | None = None,
        moved: bool = False,
    ) -> None:
        """``failed`` is called once when the state worker refuses an operation that the copy has
        answered. ``memory`` and ``unconfirmed``: the tenant's shares of the memory of guests, and
        of ``UNCONFIRMED_BYTES``. ``moved``: whether another worker may have run the request
        before."""
        self._state = state
        self._failed = failed
        self._memory = memory
        self._share = unconfirmed
        self._mode = _Mode.WAITS if moved else _Mode.FIRST
        self._turn = threading.Lock()
        """This lock is held during an operation, except in the mode ``WAITS``. So the operations
        are sent in the order in which the copy has answered them."""
        self._copy = VariableStorage()
        self._granted = 0
        self._others = 0
        """Number of operations that the state worker has applied but the copy has not."""
        self.failure = ""
        """Why the request cannot continue in this worker; empty while it can."""
        self._closed = False
        self._lock = threading.Lock()
        """Protects the fields below."""
        self._confirmed = threading.Condition(self._lock)
        self._sent = 0
        self._unconfirmed: dict[int, int] = {}
        """The operations that were sent and are not confirmed, in order. The key is the number of
        an operation. The value is the bytes that it has taken from the tenant's share."""
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        """Actions, each with the number of the last operation that must be confirmed first."""

    @property
    def waits(self) -> bool:
        """Whether an action may depend on an operation that is not confirmed. If so, the action
        must be passed to ``when_confirmed``."""
        return bool(self._unconfirmed or self._held)

    @property
    def holds(self) -> bool:
        """Whether an action waits for the confirmation of operations."""
        return bool(self._held)

    def perform(self, operation: Variable) -> VariableAnswer:
        """Performs an operation and returns its answer. Raises TokenbusError if the operation is
        refused, or if the copy cannot answer it and the state worker does not answer."""
        sent = self._at_once(operation)
        if sent is None and self._mode is not _Mode.WAITS:
            # This thread frees its slot of the thread pool before it takes the lock ``_turn``. It
            # takes a slot again after it has released the lock. So it never holds the lock while it
            # waits for a slot.
            with waiting(), self._in_turn():
                if self._mode is _Mode.FIRST:
                    return self._first(operation)
                if self._mode is _Mode.AHEAD and not self._has_room():
                    self._wait_from_now()
                if self._mode is _Mode.AHEAD:
                    if operation.op not in COPIED:
                        return self._alone(operation)
                    self._wait_until(lambda: len(self._unconfirmed) < MAX_UNCONFIRMED)
                    sent = self._ahead(operation)
        if sent is None:
            return self._state.perform(operation)
        answer, awaited = sent
        if awaited:
            self._wait_until(lambda: awaited not in self._unconfirmed)
        if answer.error is not None:
            raise ControllerError(Code.CONTROLLER_FAILED, answer.error)
        return answer

    def when_confirmed(self, action: Callable[[], None]) -> None:
        """Calls ``action`` as soon as all operations so far are confirmed: now, or later on another
        thread. Actions are called in the order in which they were passed to this method. ``action``
        must not wait. ``action`` is dropped if an operation is refused, or if the request ends
        first. Call ``flush`` afterwards."""
        with self._lock:
            if self.failure or self._closed:
                return
            if not self.waits:
                action()
                return
            self._held.append((self._sent, action))

    def flush(self) -> None:
        """Sends the operations so far immediately. Without this call, they are sent together with
        the next message. Called at the end of a round."""
        self._state.flush()

    def close(self) -> None:
        """Called when the request has ended in this worker. No operation is sent afterwards."""
        with self._lock:
            self._closed = True
            self._abandon()
            self._confirmed.notify_all()
        self._free()

    # --- inside ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        self._turn.acquire()
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self._turn.release()
        if self._closed:
            self._free()

    def _free(self) -> None:
        """Frees the copy of an ended request, unless an operation is running. The operation then
        frees the copy at its end."""
        if self._turn.acquire(blocking=False):
            self._drop_copy()
            self._turn.release()

    def _first(self, operation: Variable) -> VariableAnswer:
        """Does the first operation. If the state worker has no earlier operation of the request,
        the copy answers the next operations."""
        answer = self._state.perform(operation)
        if not answer.first:
            self._mode = _Mode.WAITS
            return answer
        if operation.op in COPIED:
            self._copy.apply(operation)
        else:
            self._others += 1
        self._mode = _Mode.AHEAD
        return answer

    def _at_once(self, operation: Variable) -> tuple[VariableAnswer, int] | None:
        """Does an operation without a wait, and returns the result of ``_ahead``. Returns None and
        does nothing if the operation would have to wait, or if the request has ended in this
        worker."""
        if self._mode is not _Mode.AHEAD or operation.op not in COPIED:
            return None
        if not self._turn.acquire(blocking=False):
            return None
        try:
            if self._mode is not _Mode.AHEAD or self.failure or self._closed:
                return None
            if not self._has_room() or len(self._unconfirmed) >= MAX_UNCONFIRMED:
                return None
            return self._ahead(operation)
        finally:
            self._end_turn()

    def _ahead(self, operation: Variable) -> tuple[VariableAnswer, int]:
        """Answers an operation from the copy, and sends it. Returns the answer and a number. The
        number is the operation's number if its confirmation must be awaited (``_send``), and 0 if
        not."""
        copy = self._copy
        # A guest that runs again in a new process repeats its operations.
        repeated = copy.answered(operation)
        place = copy.num_answers(operation.request) + self._others
        answer = copy.apply(operation)
        # Some refusals are not stored, by the copy or by the state worker. Such a refusal does not
        # have a place in the order, so the operation is not sent.
        if repeated or not copy.answered(operation):
            return answer, 0
        return answer, self._send(structs.replace(operation, place=place), answer)

    def _alone(self, operation: Variable) -> VariableAnswer:
        """Does an operation that the copy cannot answer."""
        self._wait_until(lambda: not self._unconfirmed)
        try:
            answer = self._state.perform(operation)
        except BaseException:
            # The state worker may have applied the operation, so the place of the next operation is
            # unknown.
            self._wait_from_now()
            raise
        self._others += not answer.repeated
        return answer

    def _send(self, operation: Variable, answer: VariableAnswer) -> int:
        """Sends an operation. Returns the operation's number if the operation exceeds the tenant's
        share, and 0 if it does not."""
        size = OPERATION_BYTES + len(operation.value)
        with self._lock:
            if self._closed:
                return 0
            taken = self._take(size)
            self._sent += 1
            self._unconfirmed[self._sent] = taken
            self._state.send(operation, partial(self._answered, self._sent, answer))
            return 0 if taken == size else self._sent

    def _take(self, size: int) -> int:
        """Takes ``size`` bytes from the tenant's share of ``UNCONFIRMED_BYTES`` and returns
        ``size``; returns 0 if fewer bytes are left."""
        if self._share is not None:
            try:
                self._share.take(size)
            except ControllerError:
                return 0
        return size

    def _give_back(self, size: int) -> None:
        if self._share is not None and size:
            self._share.give_back(size)

    def _abandon(self) -> None:
        """Drops all unconfirmed operations, and the actions that wait for them."""
        self._give_back(sum(self._unconfirmed.values()))
        self._unconfirmed.clear()
        self._held.clear()

    def _answered(self, number: int, expected: VariableAnswer, answer: VariableAnswer) -> None:
        """Handles the state worker's answer to an operation."""
        with self._lock:
            if self._closed or self.failure:
                return
            same = (expected.version, expected.written, expected.error)
            if (answer.version, answer.written, answer.error) == same:
                self._give_back(self._unconfirmed.pop(number, 0))
                first = next(iter(self._unconfirmed), self._sent + 1)
                while self._held and self._held[0][0] < first:
                    # ``waits`` stays True until the action has been done, so that no later action
                    # overtakes it.
                    self._held[0][1]()
                    self._held.popleft()
            else:
                self.failure = answer.error or "the state worker has another value of a variable"
                self._abandon()
            fails = bool(self.failure)
            self._confirmed.notify_all()
        if fails:
            self._failed()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for the confirmation of operations. Raises ControllerError if an operation was
        refused, or if the request has ended."""
        if not condition():
            self._state.flush()
            with waiting(), self._lock:
                self._confirmed.wait_for(lambda: self._closed or self.failure or condition())
        if self._closed:
            raise ControllerError(Code.CONTROLLER_FAILED, "the request has ended")
        if self.failure:
            raise ControllerError(Code.CONTROLLER_FAILED, self.failure)

    def _has_room(self) -> bool:
        """Counts the copy's size towards the memory of the tenant; returns whether the copy
        fits."""
        missing = self._copy.bytes - self._granted
        if self._copy.bytes > MAX_COPY_BYTES:
            return False
        if missing > 0 and self._memory is not None:
            size = -(-missing // GRANT_BYTES) * GRANT_BYTES
            try:
                self._memory.take(size)
            except ControllerError:
                return False
            self._granted += size
        return True

    def _wait_from_now(self) -> None:
        """Drops the copy. From now on, each operation waits for the state worker."""
        self._wait_until(lambda: not self._unconfirmed)
        self._mode = _Mode.WAITS
        self._drop_copy()

    def _drop_copy(self) -> None:
        self._copy = VariableStorage()
        if self._memory is not None and self._granted:
            self._memory.give_back(self._granted)
        self._granted = 0
