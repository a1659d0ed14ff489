"""Operations on the variables of a request, which the state worker executes.

``VariableCalls.perform`` blocks the thread that calls it. While the thread waits, other jobs use
its slot of the thread pool (``pool.py``). ``VariableCalls.send`` does not wait. The *bus thread*,
which receives the worker's messages, delivers the answer. An operation without an answer is sent
again.

The triple (request, lineage, count) identifies an operation. The lineage stands for the sequence
(``forks.py``), and the count numbers the sequence's operations. So the state worker executes an
operation once, even if the operation is sent again or the controller is replayed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...protocol.bodies import decode_as, encode_body
from ...protocol.errors import Code, ControllerError
from ...protocol.header import encode_header
from ...protocol.messages import MAX_INPUT_BYTES
from ...protocol.worker_messages import Variable, VariableAnswer
from .host import Stored, Written
from .pool import waiting

AGAIN_S = 0.5
"""Time after which an operation without an answer is sent again, in seconds."""
GIVE_UP_S = 120.0
"""Maximum total wait of an operation, in seconds. A state worker or broker that was killed is
restarted within this time. ``move_wait_s``, the time for which a stream waits for a worker, has the
same default."""
ROUND_BYTES = 128 * 1024
"""Maximum bytes that a sequence may write to variables in one round. The limit on the texts that a
sequence sends in one round has the same value. The number is small because these bytes are also
sent to the client, with the next token. On two cores, writes of 1 MiB in a round doubled the step
time of other streams. Writes of 128 KiB have no measurable effect."""


MAX_SENT_BYTES = 4 * 1024 * 1024
"""Maximum bytes of all texts that a sequence may send to its client. The bytes are bounded because
the texts are stored until the stream ends."""


_Name = tuple[int, int, int, int]
"""Link, request, lineage and count of an operation. A link is the number of the worker's connection
to a broker."""


class VariableCalls:
    """The operations of this worker that have no answer yet. ``post`` sends frames over a link.
    ``post_later`` sends them together with the next message."""

    def __init__(
        self,
        post: Callable[[list[bytes], int], None],
        post_later: Callable[[list[bytes], int], None] | None = None,
    ) -> None:
        self._post = post
        self._post_later = post_later or post
        self._calls: dict[_Name, list[_Call]] = {}
        """The calls of ``perform`` that wait. Two attempts of a request may wait for the same
        operation: one that has just ended, and its successor."""
        self._sent: dict[_Name, _Sent] = {}
        """The operations of ``send``, in their order."""
        self._next_check_s = 0.0
        """The earliest time at which ``send_again`` looks for overdue operations."""
        self._lock = threading.Lock()

    def send(
        self, operation: Variable, answered: Callable[[VariableAnswer], None], link: int = 0
    ) -> None:
        """Sends an operation over ``link``, and does not wait. ``answered`` is called once, on
        another thread: with the answer, or with an error if no answer arrives. ``answered`` is not
        called if the request ends first."""
        name = (link, operation.request, operation.lineage, operation.count)
        frames = _frames(operation)
        with self._lock:
            self._sent[name] = _Sent(frames, answered)
        self._post_later(frames, link)

    def send_again(self, now: float) -> None:
        """Called often. Sends operations of ``send`` again if their answers are overdue. ``now``:
        the present time of the monotonic clock. If one operation of a request is overdue, all
        operations of the request are sent again, in their order. After ``GIVE_UP_S``, an operation
        is answered with an error."""
        if not self._sent or now < self._next_check_s:
            return
        self._next_check_s = now + AGAIN_S / 2
        with self._lock:
            late = {name[:2] for name, sent in self._sent.items() if now - sent.at_s > AGAIN_S}
            again = [(name, sent) for name, sent in self._sent.items() if name[:2] in late]
            lost = [one for one in again if now - one[1].since_s > GIVE_UP_S]
            for name, _ in lost:
                del self._sent[name]
        for name, sent in again:
            sent.at_s = now
            self._post(sent.frames, name[0])
        for name, sent in lost:
            sent.answered(VariableAnswer(*name[1:], error=sent.refusal or _no_answer()))

    def perform(
        self, operation: Variable, ended: Callable[[], bool] = lambda: False, link: int = 0
    ) -> VariableAnswer:
        """Sends an operation over ``link``, and returns its answer. ``ended`` returns whether the
        operation's request has ended. If so, the operation is not sent.

        Raises ControllerError if no answer arrives or the operation is refused, and
        UnavailableError if too many operations wait already.
        """
        name = (link, operation.request, operation.lineage, operation.count)
        call = _Call()
        with self._lock:
            self._calls.setdefault(name, []).append(call)
        frames = _frames(operation)
        try:
            # The call is added to the table before this check. If the request ends after the check,
            # ``cancel`` finds the call in the table.
            if ended():
                raise ControllerError(Code.CONTROLLER_FAILED, _ended(operation.request))
            with waiting():
                for _ in range(int(GIVE_UP_S / AGAIN_S)):
                    self._post(frames, link)
                    if call.answered.acquire(timeout=AGAIN_S):
                        break
        finally:
            with self._lock:
                self._calls[name].remove(call)
                if not self._calls[name]:
                    del self._calls[name]
        answer = call.answer or call.refusal
        if answer is None:
            raise ControllerError(Code.CONTROLLER_FAILED, _no_answer())
        if answer.error is not None:
            raise ControllerError(Code.CONTROLLER_FAILED, answer.error)
        return answer

    def on_answer(self, body: bytes, link: int = 0) -> None:
        """Delivers an answer that came over ``link``; called on the bus thread."""
        answer: VariableAnswer = decode_as(VariableAnswer, body, "msgpack")
        name = (link, answer.request, answer.lineage, answer.count)
        with self._lock:
            sent = self._sent.get(name)
            if sent is not None and answer.again:
                sent.refusal = answer.error or ""
            elif sent is not None:
                del self._sent[name]
            for call in self._calls.get(name, ()):
                if answer.again:
                    # The failure is temporary, so the operation is sent again until ``GIVE_UP_S``
                    # has passed.
                    call.refusal = answer
                else:
                    call.give(answer)
        if sent is not None and not answer.again:
            sent.answered(answer)

    def cancel(self, request: int, link: int = 0) -> None:
        """Ends the waiting operations of an ended request with an error, and drops the operations
        of ``send``."""
        with self._lock:
            for name in [name for name in self._sent if name[:2] == (link, request)]:
                del self._sent[name]
            for (sent_over, owner, lineage, count), calls in self._calls.items():
                if (sent_over, owner) == (link, request):
                    for call in calls:
                        call.give(VariableAnswer(owner, lineage, count, error=_ended(request)))


def _no_answer() -> str:
    return (
        f"the state worker did not answer within {GIVE_UP_S:g} s; variables need a running state "
        "worker"
    )


def _frames(operation: Variable) -> list[bytes]:
    return [b"VARIABLE", encode_header(operation.request), encode_body(operation, "msgpack")]


def _ended(request: int) -> str:
    return f"the request {request} has ended, so its variables were dropped"


class _Call:
    """An operation that waits for its answer."""

    def __init__(self) -> None:
        self.answered = threading.Lock()
        """This lock is held until the answer arrives."""
        self.answered.acquire()
        self.answer: VariableAnswer | None = None
        self.refusal: VariableAnswer | None = None
        """The last answer that reported a temporary failure."""

    def give(self, answer: VariableAnswer) -> None:
        """Delivers the answer; later answers are ignored."""
        if self.answer is None:
            self.answer = answer
            self.answered.release()


@dataclass(slots=True, eq=False)
class _Sent:
    """An operation of ``VariableCalls.send``. Times are of the monotonic clock, in seconds."""

    frames: list[bytes]
    answered: Callable[[VariableAnswer], None]
    at_s: float = field(default_factory=time.monotonic)
    """The time at which the operation was last sent."""
    since_s: float = field(default_factory=time.monotonic)
    """The time at which the operation was first sent."""
    refusal: str = ""
    """The error of the last answer that reported a temporary failure."""


@dataclass(frozen=True, slots=True)
class VariablesMark:
    """A state of ``SequenceVariables`` within a round, to which ``rewind`` can return."""

    count: int
    writes: int
    written_bytes: int
    messages: int
    sent_bytes: int


class RequestState:
    """The inputs and the written variables of one request, which its sequences share."""

    def __init__(self) -> None:
        self.written: dict[str, int] = {}
        """The highest version of each variable that the sequences have written."""
        self.arrived = 0
        """Number of INPUTS messages."""
        self.taken = 0
        """The number of the last input that a sequence has received."""
        self._lock = threading.Lock()

    def wrote(self, name: str, version: int) -> None:
        """Called when a sequence has written a version of a variable."""
        with self._lock:
            self.written[name] = max(version, self.written.get(name, 0))

    def take(self, number: int) -> None:
        """Called when a sequence has received the input with this number."""
        with self._lock:
            self.taken = max(self.taken, number)


class RecordMark(NamedTuple):
    """The answer to the operation that creates the record of a tool call."""

    request: int
    lineage: int
    number: int
    """The number of the operation among the operations of its lineage."""
    written: bool
    repeated: bool


def record_of(lineage: int, number: int) -> str:
    """The name of the record of a tool call."""
    return f"tool/{lineage:x}/{number}"


def _context_lineage(lineage: int) -> int:
    """The lineage of a sequence's operations on contexts. It differs from the lineage of every
    sequence."""
    text = f"contexts/{lineage}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class SequenceVariables:
    """The variables and inputs of a request, for one of its sequences (``host.Variables``)."""

    def __init__(
        self,
        request: int,
        lineage: int,
        perform: Callable[[Variable], VariableAnswer],
        written: Callable[[], None],
        repeat: Callable[[Variable], VariableAnswer] | None = None,
        shared: RequestState | None = None,
    ) -> None:
        """``lineage`` identifies the operations of this sequence (``Variable.lineage``).
        ``perform`` does an operation. ``repeat`` does an operation of a replayed guest (``again``),
        without counting it towards the quota a second time. ``written`` is called after each
        successful write."""
        self.lineage = lineage
        self._request = request
        self._perform = perform
        self._repeat = repeat or perform
        self._written = written
        self._count = self._contexts = 0
        self._writes: list[Any] = []
        self._written_bytes = 0
        self._shared = shared or RequestState()
        self._messages: list[str] = []
        self._round_bytes = self._sent_bytes = 0
        self.awaited_input: int | None = None
        """The number of INPUTS messages that had arrived before the last ``receive``. None if it
        found an input, or if this round has not called ``receive``."""
        self._awaited_variable: tuple[str, int] | None = None
        """The name and the version that the last ``await_write`` of this round did not find. None
        if it found the version, or if this round has not called ``await_write``."""
        self.own_changes = 0
        """Number of changes to variables that this sequence has made."""
        self.repeated = False
        """Whether the state worker had already executed an operation of the current round before
        this round. The answer is then the recorded answer."""

    def get(self, name: str) -> Stored | None:
        """See ``host.Variables``."""
        answer = self._do("get", name)
        return Stored(answer.version, answer.value or b"") if answer.version else None

    def await_write(self, name: str, version: int = 1) -> Stored | None:
        """See ``host.Variables``."""
        stored = self.get(name)
        found = stored is not None and stored.version >= version
        self._awaited_variable = None if found else (name, version)
        return stored if found else None

    @property
    def awaited_name(self) -> str:
        """The name of the variable that the last ``await_write`` of this round did not find; empty
        if there is no such variable."""
        return self._awaited_variable[0] if self._awaited_variable else ""

    @property
    def awaits_write(self) -> bool:
        """Whether the last ``await_write`` of this round waits for a version that no sequence has
        written yet."""
        if self._awaited_variable is None:
            return False
        name, version = self._awaited_variable
        return self._shared.written.get(name, 0) < version

    def set(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """See ``host.Variables``."""
        return self._write("set", name, value, when_version_is)

    def append(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """See ``host.Variables``."""
        return self._write("append", name, value, when_version_is)

    def receive(self) -> bytes | None:
        """See ``host.Variables``."""
        arrived = self._shared.arrived
        answer = self._do("take", "")
        self.awaited_input = None if answer.version else arrived
        self._shared.take(answer.version)
        return (answer.value or b"") if answer.version else None

    @property
    def awaits(self) -> int:
        """The number of the next input, if the last ``receive`` found no input; 0 in all other
        cases."""
        return 0 if self.awaited_input is None else self._shared.taken + 1

    def send(self, text: bytes) -> None:
        """See ``host.Variables``."""
        self._round_bytes += len(text)
        self._sent_bytes += len(text)
        round_over = self._round_bytes > ROUND_BYTES
        if len(text) > MAX_INPUT_BYTES or round_over or self._sent_bytes > MAX_SENT_BYTES:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"send(text) with {len(text)} bytes: it sent {self._round_bytes} bytes in this "
                f"round and {self._sent_bytes} bytes in all; at most {MAX_INPUT_BYTES} bytes are "
                f"allowed in a message, {ROUND_BYTES} in a round and {MAX_SENT_BYTES} in all",
            )
        self._messages.append(text.decode("utf-8", "replace"))

    def context(self, op: Literal["save", "open"], name: str, content: bytes = b"") -> bytes | None:
        """Saves or opens a context of the request's tenant; returns the content of an opened
        context, or None if it does not exist. These operations have a separate lineage, because the
        controller worker makes them. A guest that is replayed in a new process does not repeat
        them."""
        self._contexts += 1
        lineage = _context_lineage(self.lineage)
        operation = Variable(self._request, lineage, self._contexts, op, name, content)
        answer = self._perform(operation)
        self.repeated |= answer.repeated
        return (answer.value or b"") if answer.version else None

    def mark_record(self, attempt: bytes) -> RecordMark:
        """Creates the record of a tool call (``tool_calls``). The record contains ``attempt``, the
        mark of the present attempt."""
        number = self._count + 1
        answer = self._do("set", record_of(self.lineage, number), attempt, 0)
        return RecordMark(self._request, self.lineage, number, answer.written, answer.repeated)

    def begin_round(self) -> None:
        """Resets the state of the last round. Called before each round of the sequence."""
        self.repeated = False
        self.awaited_input = self._awaited_variable = None

    def mark(self) -> VariablesMark:
        """The present state, to which ``rewind`` can return."""
        return VariablesMark(
            self._count,
            len(self._writes),
            self._written_bytes,
            len(self._messages),
            self._sent_bytes,
        )

    def rewind(self, mark: VariablesMark) -> None:
        """Returns to an earlier state of the same round. Operations that were executed after that
        state are not undone. If the controller repeats them, it receives their recorded answers."""
        self._count = mark.count
        del self._writes[mark.writes :]
        self._written_bytes = mark.written_bytes
        del self._messages[mark.messages :]
        self._round_bytes -= self._sent_bytes - mark.sent_bytes
        self._sent_bytes = mark.sent_bytes

    def again(self) -> SequenceVariables:
        """Returns the variables for a controller that is replayed in a new guest process. This
        controller repeats all operations of the sequence."""
        return SequenceVariables(
            self._request, self.lineage, self._repeat, lambda: None, self._repeat
        )

    def take_writes(self) -> list[Any]:
        """The writes since the last call, as AICI's storage commands."""
        taken, self._writes = self._writes, []
        self._written_bytes = 0
        return taken

    def take_messages(self) -> list[str]:
        """The texts for the client since the last call."""
        taken, self._messages = self._messages, []
        self._round_bytes = 0
        return taken

    def _write(self, op: str, name: str, value: bytes, when: int | None) -> Written:
        self._written_bytes += len(value)
        if self._written_bytes > ROUND_BYTES:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"it wrote {self._written_bytes} bytes to variables in one round; at most "
                f"{ROUND_BYTES} are allowed",
            )
        answer = self._do(op, name, value, when)
        if answer.written:
            command = {
                "name": name,
                "value": value.hex(),
                "op": op.capitalize(),
                "when_version_is": when,
            }
            self._writes.append({"WriteVar": command})
            self.own_changes += 1
            self._shared.wrote(name, answer.version)
            self._written()
        return Written(answer.written, answer.version, answer.value or b"")

    def _do(
        self, op: str, name: str, value: bytes = b"", when: int | None = None
    ) -> VariableAnswer:
        self._count += 1
        operation = Variable(
            self._request,
            self.lineage,
            self._count,
            op,  # type: ignore[arg-type]
            name,
            value,
            when,
        )
        answer = self._perform(operation)
        self.repeated |= answer.repeated
        return answer
