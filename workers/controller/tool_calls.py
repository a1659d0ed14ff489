"""Calls of tools by programs: the record of a call, and the delivery of the call's answer.

A call has a *record*. The record is a variable of the request, which first contains a mark and
later the answer. The program reads the record like any other variable, and suspends while the
record contains the mark. So a program that waits for an answer blocks neither a thread nor a slot
of the engine. A replay reads the answer from the record.

The mark is written before the call is sent, and names the attempt that sends the call. If an
attempt finds the mark of an earlier attempt, it does not make the call again. Instead it requests
the answer from the tool worker that received the call. If no worker has the call any more, the
answer is an error. So each call is made at most once. A *lineage* is a number that identifies a
sequence (``forks.py``).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...protocol.bodies import decode_as, encode_body
from ...protocol.decoders import json_decoder
from ...protocol.errors import Code, ControllerError, TokenbusError
from ...protocol.header import encode_header
from ...protocol.worker_messages import (
    MAX_ARGUMENT_BYTES,
    Call,
    CallAnswer,
    ToolAnswer,
    Variable,
    VariableAnswer,
)
from .variable_calls import SequenceVariables, record_of

log = logging.getLogger(__name__)

GIVE_UP_S = 660.0
"""Time after which a call without an answer fails, in seconds: the longest time-out of a tool plus
a minute. The broker and the tool workers answer every call earlier than that, unless one of them
fails."""
MARK = b"\0"
"""The first byte of a record that has no answer yet. Random bytes follow, which identify the
attempt."""
MAX_TOOL_NAME = 128
NO_TOOLS = "this controller cannot call tools"

Perform = Callable[[Variable], VariableAnswer]


_decode = json_decoder(ToolAnswer).decode


def answer_of(record: bytes) -> ToolAnswer | None:
    """The answer in a record; None if the call has not been answered yet. Raises ControllerError if
    the program has overwritten the record."""
    if record[:1] == MARK:
        return None
    try:
        return _decode(record)
    except msgspec.MsgspecError:
        raise ControllerError(
            Code.CONTROLLER_FAILED, "the variable with the answer of a tool was overwritten"
        ) from None


def value_of(record: bytes) -> bytes:
    """The JSON of the result in a record with an answer. Raises ControllerError with the error of a
    failed call."""
    answer = answer_of(record)
    assert answer is not None
    if answer.error is None:
        return bytes(answer.value)
    # The error has the code TOOL_FAILED and not the code of the answer. A code such as worker_lost
    # might cause the client to send its request again.
    raise ControllerError(Code.TOOL_FAILED, answer.error)


def _record(value: bytes, error: str | None, code: str) -> bytes:
    """The content of the record of an answered call. Its first key is ``value`` or ``error``."""
    if error is None:
        return b'{"value":%b}' % (value or b"null")
    return msgspec.json.encode({"error": error, "code": code})


class _Id(NamedTuple):
    """A call, and the *link* of its request: the number of the worker's connection to the request's
    broker."""

    link: int
    request: int
    lineage: int
    number: int


@dataclass(slots=True, eq=False)
class _Awaited:
    """A call whose answer is awaited."""

    answered: Callable[[CallAnswer], None]
    """Called once with the answer, on any thread. The function must not wait."""
    since: float = field(default_factory=time.monotonic)


class ToolCalls:
    """The unanswered tool calls of this worker. ``post`` sends frames over a link."""

    def __init__(self, post: Callable[[list[bytes], int], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._awaited: dict[_Id, _Awaited] = {}

    def awaits(self, link: int, call: Call) -> bool:
        """Whether the answer of a call is awaited."""
        return _Id(link, call.request, call.lineage, call.count) in self._awaited

    def send(self, link: int, call: Call, answered: Callable[[CallAnswer], None]) -> None:
        """Sends a call, and calls ``answered`` with its answer."""
        with self._lock:
            self._awaited[_Id(link, call.request, call.lineage, call.count)] = _Awaited(answered)
        body = encode_body(call, "msgpack")
        self._post([b"CALL", encode_header(call.request), body], link)

    def on_answer(self, body: bytes, link: int) -> None:
        """Delivers an answer that came over ``link``; called on the bus thread."""
        answer: CallAnswer = decode_as(CallAnswer, body, "msgpack")
        with self._lock:
            id_ = _Id(link, answer.request, answer.lineage, answer.count)
            awaited = self._awaited.pop(id_, None)
        if awaited is not None:
            awaited.answered(answer)

    def cancel(self, request: int, link: int) -> None:
        """Drops the calls of a request that has ended."""
        with self._lock:
            for id_ in [i for i in self._awaited if (i.link, i.request) == (link, request)]:
                del self._awaited[id_]

    def expire(self, now: float) -> None:
        """Answers the calls that have waited for ``GIVE_UP_S`` with an error."""
        if not self._awaited:
            return
        with self._lock:
            late = [(i, a) for i, a in self._awaited.items() if now - a.since > GIVE_UP_S]
            for id_, _ in late:
                del self._awaited[id_]
        for id_, awaited in late:
            name = (id_.request, id_.lineage, id_.number)
            error = f"the call of a tool was not answered within {GIVE_UP_S:g} s"
            awaited.answered(CallAnswer(*name, error=error, code=str(Code.TIMEOUT)))


class GroupTools:
    """The tool calls of one attempt of a request."""

    def __init__(
        self,
        calls: ToolCalls,
        link: int,
        perform: Perform,
        submit: Callable[[Callable[[], None]], None],
        answered: Callable[[], None],
        when_recorded: Callable[[Callable[[], None]], None] = lambda send: send(),
    ) -> None:
        """``perform`` does an operation on a variable of the request. ``submit`` runs a function on
        a thread that may wait. ``answered`` is called when an answer was written into the record of
        its call, or could not be written. ``when_recorded`` calls a function when the state worker
        has confirmed all earlier operations."""
        self._calls = calls
        self._link = link
        self._perform = perform
        self._submit = submit
        self._answered = answered
        self._when_recorded = when_recorded
        self._attempt = MARK + secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._sent: set[tuple[int, int]] = set()
        """The lineage and the number of each call without an answer in its record."""

    @property
    def waits(self) -> bool:
        """Whether any call has no answer yet. The answer to such a call will wake a sequence."""
        return bool(self._sent)

    def begin(self, variables: SequenceVariables, tool: str, arguments: bytes) -> str:
        """Records a call of a sequence, and sends it unless it was sent before; returns the name of
        the record. Raises TokenbusError if the call cannot be recorded."""
        if not 0 < len(tool) <= MAX_TOOL_NAME:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the name of a tool has {len(tool)} characters; it must have 1 to {MAX_TOOL_NAME}",
            )
        if len(arguments) > MAX_ARGUMENT_BYTES:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the arguments of the tool {tool!r} have {len(arguments)} bytes; at most "
                f"{MAX_ARGUMENT_BYTES} are allowed",
            )
        marked = variables.mark_record(self._attempt)
        record = record_of(marked.lineage, marked.number)
        if not marked.written:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the variable {record!r} exists already; this name is reserved for a tool call",
            )
        call = Call(marked.request, marked.lineage, marked.number, tool, arguments)
        if (call.lineage, call.count) in self._sent:
            return record
        if marked.repeated:
            # The mark was written before: by an earlier attempt, or by this attempt if the state
            # worker's answer was lost.
            found = self._read(call, record)
            if found[:1] != MARK:
                return record
            call.again = found != self._attempt
        with self._lock:
            self._sent.add((call.lineage, call.count))

        def answered(answer: CallAnswer) -> None:
            self._submit(lambda: self._store(answer))

        self._when_recorded(lambda: self._calls.send(self._link, call, answered))
        return record

    def _read(self, call: Call, record: str) -> bytes:
        """The present content of a record. The read operation has a random lineage. With a fixed
        lineage, the state worker could repeat its answer to an earlier read."""
        lineage = secrets.randbits(63)
        found = self._perform(Variable(call.request, lineage, 1, "get", record))
        return found.value or b""

    def _store(self, answer: CallAnswer) -> None:
        """Writes an answer into its record, unless the record already has an answer."""
        record = record_of(answer.lineage, answer.count)
        lineage = _answer_lineage(answer.lineage, answer.count)
        try:
            try:
                value = _record(answer.value, answer.error, answer.code)
                self._perform(Variable(answer.request, lineage, 1, "set", record, value, 1))
            except ControllerError as error:
                # If the answer exceeds a bound on the request's variables, a short error may still
                # fit.
                text = f"the answer of a tool cannot be stored: {error.message}"
                value = _record(b"", text, str(Code.TOOL_FAILED))
                self._perform(Variable(answer.request, lineage, 2, "set", record, value, 1))
        except TokenbusError as error:
            # The request may have ended meanwhile.
            log.info("request %d: an answer of a tool is lost: %s", answer.request, error)
        with self._lock:
            self._sent.discard((answer.lineage, answer.count))
        self._answered()


class SequenceTools:
    """The tools of one sequence (``host.Tools``)."""

    def __init__(self, group: GroupTools, variables: SequenceVariables) -> None:
        self._group = group
        self._variables = variables

    def begin(self, tool: str, arguments: bytes) -> str:
        """See ``host.Tools``."""
        return self._group.begin(self._variables, tool, arguments)

    def with_variables(self, variables: SequenceVariables) -> SequenceTools:
        """Returns the tools of this sequence. They record calls in ``variables``: the variables of
        the sequence, or a copy of them while the sequence's guest is replayed."""
        return SequenceTools(self._group, variables)


def _answer_lineage(lineage: int, count: int) -> int:
    """The lineage of the operation that writes an answer. It differs from the lineage of every
    sequence."""
    text = f"tool/{lineage}/{count}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
