"""The variables and inputs of requests: the effect of each operation, without files or sockets.

A variable is a named string of bytes that the controllers of a request share. An input is a text
that the client sends to a running request. Source: AICI's storage commands (``ReadVar``,
``WriteVar``). An operation is identified by its request, the *lineage* of its sequence (a hash of
the sequence's forks), and its number (``count``) in the sequence. Each answer is stored until the
request ends, so that a replayed controller receives the same answers again. Requests affect each
other only through the bound on the bytes of all requests. If an operation is refused because of
this bound, the refusal is not stored.

An append extends a value in place. The stored answer to a read refers to a prefix of the value. So
if a controller appends and reads at each token, the answers are stored without copies of the value.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from ..protocol.messages import MAX_INPUT_BYTES, MAX_WAITING_INPUT_BYTES, MAX_WAITING_INPUTS
from ..protocol.worker_messages import Variable, VariableAnswer

KIB = 1024
MIB = 1024 * KIB

REQUEST_BYTES = 512
VARIABLE_BYTES = 256
ANSWER_BYTES = 256
ERROR_BYTES = 512
"""Overheads that count towards the limits: ``REQUEST_BYTES`` for each request, ``VARIABLE_BYTES``
for each variable in addition to its name and value, ``ANSWER_BYTES`` for each stored answer. The
numbers are CPython's measured memory use, rounded up. ``ERROR_BYTES``: maximum bytes of an error
text."""

ENDED = 10_000
"""Number of ended requests that are remembered. An operation that arrives after the end of its
request must not recreate the request. Request ids are never reused."""


class StorageLimits(Struct, frozen=True, kw_only=True):
    """Operations beyond these limits are refused. A request counts as 512 bytes. Each variable adds
    256 bytes, its name and its value. Each input adds 256 bytes and its text. Each stored answer
    adds 256 bytes and its error text. If stored answers refer to a replaced value, this value and
    256 bytes more still count."""

    value_bytes: int = MIB
    """Maximum bytes of one value."""
    name_bytes: int = 256
    """Maximum bytes of one name, as UTF-8."""
    variables: int = 1000
    """Maximum number of variables of one request."""
    request_bytes: int = 8 * MIB
    """Maximum bytes of one request: about 32,000 operations if its values are small."""
    total_bytes: int = KIB * MIB
    """Maximum bytes of all requests."""
    table_bytes: int = 256 * MIB
    """Maximum bytes of all tables of modules and all contexts."""


class SavedRequest(Struct, array_like=True):
    """The complete state of one request as it is stored in the log."""

    request: int
    values: list[bytes]
    variables: list[tuple[str, int, int]]
    """For each variable: its name, its version, and the index of its value in ``values``."""
    answers: list[tuple[int, int, int, int, int, bool, str | None]]
    """The answered operations. The first two fields are the operation's lineage and count. The
    other fields are the answer: the version, the index of the value in ``values`` (-1 without a
    value), the length of the value's prefix, ``written`` and the error."""
    inputs: list[int] = []
    """For each input that the program has not taken: the index of its text in ``values``."""
    given: int = 0
    """Number of inputs that the client has given so far."""


@dataclass(slots=True, eq=False)
class _Value:
    """The value of a variable, or the text of an input. Each ``set`` creates a new object; an
    ``append`` extends the object."""

    data: bytearray = field(default_factory=bytearray)
    answered: int = 0
    """Length of the longest prefix that a stored answer refers to."""


@dataclass(slots=True, eq=False)
class _Stored:
    """A variable. ``version`` counts its writes."""

    version: int
    value: _Value


class _Result(NamedTuple):
    """An answer without the ids of its operation."""

    version: int = 0
    value: _Value | None = None
    length: int = 0
    """Length of the prefix of ``value`` that the answer returns."""
    written: bool = False
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Held:
    """The state of a request."""

    variables: dict[str, _Stored] = field(default_factory=dict)
    answers: dict[tuple[int, int], _Result] = field(default_factory=dict)
    inputs: deque[_Value] = field(default_factory=deque)
    """The client's inputs that the program has not taken, in order."""
    given: int = 0
    """Number of inputs that the client has given so far."""
    bytes: int = REQUEST_BYTES

    @property
    def input_bytes(self) -> int:
        """The bytes of the inputs that the program has not taken."""
        return sum(len(value.data) for value in self.inputs)


class VariableStorage:
    """All requests and their variables."""

    def __init__(self, limits: StorageLimits | None = None) -> None:
        self.limits = limits or StorageLimits()
        self.bytes = 0
        """Bytes of all requests, as ``StorageLimits`` counts them."""
        self.variables = 0
        self._held: dict[int, _Held] = {}
        self._ended: dict[int, None] = {}

    @property
    def requests(self) -> list[int]:
        """The requests that have state: they had an operation, and have not ended."""
        return list(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def size(self, request: int) -> int:
        """The bytes of a request, as ``StorageLimits`` counts them; 0 for an unknown request."""
        held = self._held.get(request)
        return held.bytes if held is not None else 0

    def num_answers(self, request: int) -> int:
        """Number of applied operations of a request. Inputs of the client do not count."""
        held = self._held.get(request)
        return len(held.answers) if held is not None else 0

    def answered(self, op: Variable) -> bool:
        """Whether the operation was applied before. If so, ``apply`` returns the stored answer."""
        held = self._held.get(op.request)
        if op.op == "give":
            return held is not None and op.count <= held.given
        return held is not None and (op.lineage, op.count) in held.answers

    def refusal(self, op: Variable, ahead: int = 0) -> str | None:
        """The error if a new operation is refused before it is applied; None if it may be applied.
        The error is not stored.

        If the bytes of all requests would exceed ``total_bytes``, the operation may succeed later.
        All other refusals are final: the name is not valid, the value is too long, the request has
        ended, or the request does not have room for another answer. ``ahead``: the ``cost`` of the
        operations that will be applied before ``op``.
        """
        limits = self.limits
        size = len(op.name.encode())
        if op.op == "give" and len(op.value) > MAX_INPUT_BYTES:
            return f"the input has {len(op.value)} bytes; at most {MAX_INPUT_BYTES} are allowed"
        if op.op not in ("give", "take") and not 0 < size <= limits.name_bytes:
            return (
                f"the variable name {_shown(op.name)} has {size} bytes of UTF-8; a name has 1 to "
                f"{limits.name_bytes}"
            )
        if len(op.value) > limits.value_bytes:
            return self._too_long(op, len(op.value))
        held = self._held.get(op.request)
        if held is None and op.request in self._ended:
            return f"the request {op.request} has ended, so its variables were removed"
        if held is not None and held.bytes + ANSWER_BYTES > limits.request_bytes:
            return (
                f"the request's variables and the stored answers take {held.bytes} "
                f"bytes; at most {limits.request_bytes} are allowed, "
                "so the request cannot do more operations"
            )
        if self.bytes + ahead + self.cost(op) > limits.total_bytes:
            return (
                f"the state worker is full: the variables of all requests take {self.bytes} bytes; "
                f"at most {limits.total_bytes} are allowed; "
                "try again when other requests have ended"
            )
        return None

    def no_room(self, op: Variable) -> str | None:
        """The error for an input if too many inputs already wait for the program; None if there is
        room. The client may send a refused input again."""
        held = self._held.get(op.request) if op.op == "give" else None
        if held is None:
            return None
        waiting, size = len(held.inputs), held.input_bytes
        if waiting < MAX_WAITING_INPUTS and size + len(op.value) <= MAX_WAITING_INPUT_BYTES:
            return None
        return (
            f"{waiting} inputs with {size} bytes wait for the program of this stream; at most "
            f"{MAX_WAITING_INPUTS} inputs with {MAX_WAITING_INPUT_BYTES} bytes may wait"
        )

    def opening(self, op: Variable, content: bytes, used: int) -> Variable:
        """The form in which an operation that opens a context is logged and applied. If the request
        has room for the context's content, ``value`` of the result is the content. If not,
        ``value`` is empty and ``when_version_is`` is the content's size in bytes, so that refused
        contexts do not fill the log. ``used``: an upper bound on the bytes of the request before
        the operation."""
        size = len(content)
        if max(used, REQUEST_BYTES) + VARIABLE_BYTES + size <= self.limits.request_bytes:
            return structs.replace(op, value=content, when_version_is=None)
        return structs.replace(op, value=b"", when_version_is=size)

    @staticmethod
    def cost(op: Variable) -> int:
        """An upper bound on the bytes that an operation adds."""
        own = REQUEST_BYTES + VARIABLE_BYTES + ANSWER_BYTES + ERROR_BYTES
        return own + 4 * len(op.name) + len(op.value)

    def apply(self, op: Variable) -> VariableAnswer:
        """Applies an operation, or returns the stored answer if it was applied before.

        ``append`` creates the variable if it does not exist. A variable's version is the number of
        its writes. A ``get`` ignores ``when_version_is``. An operation that would exceed a limit
        changes nothing and is answered with an ``error``. If an operation has ``place``, exactly
        ``place`` operations of its request must have been applied before; if not, the answer has an
        ``error``.
        """
        name = (op.lineage, op.count)
        held = self._held.get(op.request)
        if op.op == "give":
            if self.answered(op):
                return VariableAnswer(*_name(op), op.count, written=True, repeated=True)
        elif held is not None and (kept := held.answers.get(name)) is not None:
            return _answer(op, kept, repeated=True)
        error = self.refusal(op)
        if error is not None:
            return VariableAnswer(*_name(op), error=error)
        if op.place is not None and (before := self.num_answers(op.request)) != op.place:
            text = (
                f"the operation expects {op.place} earlier operations of its request, but {before} "
                "were applied"
            )
            return VariableAnswer(*_name(op), error=text, again=before < op.place)
        if held is None:
            held = self._held[op.request] = _Held()
            self.bytes += held.bytes
        before = held.bytes
        if op.op == "give":
            answer = self._give(held, op)
            self.bytes += held.bytes - before
            return answer
        first = not held.answers
        kept = held.answers[name] = self._do(held, op)
        held.bytes += _answer_bytes(kept)
        self.bytes += held.bytes - before
        return _answer(op, kept, first=first)

    def end(self, request: int) -> bool:
        """Removes the state of an ended request; returns whether the request had any state."""
        self._ended[request] = None
        if len(self._ended) > ENDED:
            del self._ended[next(iter(self._ended))]
        return self._drop(request)

    def _drop(self, request: int) -> bool:
        held = self._held.pop(request, None)
        if held is None:
            return False
        self.bytes -= held.bytes
        self.variables -= len(held.variables)
        return True

    def save(self, request: int) -> SavedRequest:
        """The state of a request, for ``restore``; raises KeyError for an unknown request."""
        held = self._held[request]
        values: dict[_Value, int] = {}
        variables = [
            (name, stored.version, values.setdefault(stored.value, len(values)))
            for name, stored in held.variables.items()
        ]
        answers = []
        for (lineage, count), (version, value, length, written, error) in held.answers.items():
            index = -1 if value is None else values.setdefault(value, len(values))
            answers.append((lineage, count, version, index, length, written, error))
        inputs = [values.setdefault(value, len(values)) for value in held.inputs]
        data = [bytes(value.data) for value in values]
        return SavedRequest(request, data, variables, answers, inputs, held.given)

    def restore(self, saved: SavedRequest) -> None:
        """Restores a saved request, replacing its current state."""
        self._drop(saved.request)
        values = [_Value(bytearray(data)) for data in saved.values]
        held = _Held(inputs=deque(values[index] for index in saved.inputs), given=saved.given)
        for name, version, index in saved.variables:
            held.variables[name] = _Stored(version, values[index])
            held.bytes += len(name.encode())
        for lineage, count, version, index, length, written, error in saved.answers:
            value = None
            if index >= 0:
                value = values[index]
                value.answered = max(value.answered, length)
            kept = held.answers[lineage, count] = _Result(version, value, length, written, error)
            held.bytes += _answer_bytes(kept)
        held.bytes += sum(VARIABLE_BYTES + len(value.data) for value in values)
        self._held[saved.request] = held
        self.bytes += held.bytes
        self.variables += len(held.variables)

    # --- one operation --------------------------------------------------------------------------

    def _give(self, held: _Held, op: Variable) -> VariableAnswer:
        """Stores the next input of the client. If the input is refused, the answer is not stored,
        because the client may send the input again."""
        size = len(op.value)
        if held.bytes + VARIABLE_BYTES + size > self.limits.request_bytes:
            text = (
                f"the request's variables, inputs and stored answers take {held.bytes} bytes; at "
                f"most {self.limits.request_bytes} are allowed"
            )
            return VariableAnswer(*_name(op), error=text)
        if op.count > held.given + 1:
            text = (
                f"input {op.count} arrived before input {held.given + 1}; send the inputs of a "
                "stream in order"
            )
            return VariableAnswer(*_name(op), error=text, again=True)
        full = self.no_room(op)
        if full is not None:
            return VariableAnswer(*_name(op), error=full, again=True)
        held.inputs.append(_Value(bytearray(op.value)))
        held.given += 1
        held.bytes += VARIABLE_BYTES + size
        return VariableAnswer(*_name(op), op.count, written=True)

    @staticmethod
    def _take(held: _Held) -> _Result:
        if not held.inputs:
            return _Result()
        number = held.given - len(held.inputs) + 1
        value = held.inputs.popleft()
        value.answered = length = len(value.data)
        return _Result(number, value, length)

    def _open(self, held: _Held, op: Variable) -> _Result:
        """Applies an operation that ``opening`` has made, and returns its answer."""
        size = op.when_version_is or len(op.value)
        if not size:
            return _Result()
        if op.when_version_is or held.bytes + VARIABLE_BYTES + size > self.limits.request_bytes:
            return _Result(
                error=f"the context {_shown(op.name)} has {size} bytes: the request's variables "
                f"and the stored answers take {held.bytes} bytes; at most "
                f"{self.limits.request_bytes} are allowed"
            )
        held.bytes += VARIABLE_BYTES + size
        return _Result(1, _Value(bytearray(op.value), size), size)

    def _do(self, held: _Held, op: Variable) -> _Result:
        if op.op == "take":
            return self._take(held)
        if op.op == "save":
            return _Result(1, written=True)
        if op.op == "open":
            return self._open(held, op)
        stored = held.variables.get(op.name)
        version = stored.version if stored is not None else 0
        if op.op == "get" or (op.when_version_is is not None and op.when_version_is != version):
            return _as_it_is(stored)
        error = self._over(held, stored, op)
        if error is not None:
            return _Result(error=error)
        if stored is None:
            stored = held.variables[op.name] = _Stored(0, _Value())
            held.bytes += VARIABLE_BYTES + len(op.name.encode())
            self.variables += 1
        elif op.op == "set":
            held.bytes += VARIABLE_BYTES - _freed(stored.value)
            del stored.value.data[stored.value.answered :]
            stored.value = _Value()
        stored.value.data += op.value
        held.bytes += len(op.value)
        stored.version += 1
        return _Result(stored.version, written=True)

    def _over(self, held: _Held, stored: _Stored | None, op: Variable) -> str | None:
        """The error if a write would exceed a limit of its request; None if it would not."""
        limits = self.limits
        grows = ANSWER_BYTES + len(op.value)
        if stored is None:
            if len(held.variables) >= limits.variables:
                return (
                    f"no variable {_shown(op.name)} can be added: the request has "
                    f"{len(held.variables)} variables, and no more are allowed"
                )
            grows += VARIABLE_BYTES + len(op.name.encode())
        elif op.op == "append":
            size = len(stored.value.data) + len(op.value)
            if size > limits.value_bytes:
                return self._too_long(op, size)
        else:
            grows += VARIABLE_BYTES - _freed(stored.value)
        if held.bytes + grows > limits.request_bytes:
            return (
                f"{len(op.value)} bytes for {_shown(op.name)} are too many: the request's "
                f"variables and the stored answers take {held.bytes} bytes; "
                f"at most {limits.request_bytes} are allowed"
            )
        return None

    def _too_long(self, op: Variable, size: int) -> str:
        return (
            f"the value of the variable {_shown(op.name)} would have {size} bytes; at most "
            f"{self.limits.value_bytes} are allowed"
        )


def _name(op: Variable) -> tuple[int, int, int]:
    """The fields that identify an operation in its answer."""
    return op.request, op.lineage, op.count


def _as_it_is(stored: _Stored | None) -> _Result:
    if stored is None:
        return _Result()
    value = stored.value
    value.answered = length = len(value.data)
    return _Result(stored.version, value if length else None, length)


def _freed(value: _Value) -> int:
    """The bytes that become free if a value is replaced. The prefix that stored answers refer to
    does not become free."""
    if value.answered:
        return len(value.data) - value.answered
    return VARIABLE_BYTES + len(value.data)


def _answer_bytes(kept: _Result) -> int:
    return ANSWER_BYTES + (len(kept.error) if kept.error is not None else 0)


def _answer(
    op: Variable, kept: _Result, repeated: bool = False, first: bool = False
) -> VariableAnswer:
    version, stored, length, written, error = kept
    value: bytes | None
    if op.place is not None:
        value = None
    elif stored is not None:
        data = stored.data
        value = bytes(data) if len(data) == length else bytes(memoryview(data)[:length])
    else:
        value = b"" if version and not written else None
    return VariableAnswer(
        op.request, op.lineage, op.count, version, value, written, error, repeated, first=first
    )


def _shown(name: str) -> str:
    """A name for an error message, shortened if it is long."""
    return repr(name) if len(name) <= 40 else repr(name[:40]) + "…"
