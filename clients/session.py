"""The client's side of the protocol. The code uses neither sockets nor a clock.

A *call* is one request of this client (``calls.py``). The caller passes received frames and the
time to the session. ``outgoing`` contains the messages to send, and ``ready`` contains the events
of calls. A session outlives its connection: on a new connection, the session sends HELLO with its
token, and ATTACH for each stream. Lost requests are sent again, each entry is delivered once, and
calls end when their time limits have passed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import UNSET

from ..protocol.bodies import Encoding
from ..protocol.columns import TokenBody, TokenColumns, column_entries
from ..protocol.endpoints import separate
from ..protocol.errors import (
    RETRYABLE,
    Code,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    TokenbusError,
    UnavailableError,
    error_for,
)
from ..protocol.frames import Frames, Message, decode_frames, encode_frames
from ..protocol.messages import (
    SERVER_MESSAGES,
    Attach,
    Buffer,
    Bye,
    Cancel,
    Error,
    Hello,
    Input,
    InputAnswer,
    Msg,
    Ping,
    Pong,
    System,
    Token,
    Welcome,
)
from ..protocol.settings import Settings
from .calls import Call, Ended, Event, SentInput
from .lanes import Delivery, Lanes

log = logging.getLogger(__name__)

HELLO_AGAIN_S = 5.0
"""If HELLO is not answered for this number of seconds, a new connection is opened."""
BACK_OFF_S = (0.1, 2.0)
"""The shortest and the longest pause before another attempt, in seconds. Each pause is twice the
previous one. If the broker's error contains a pause, this pause is used instead."""
LOOK_S = 0.25
"""Interval between checks of the deadlines, in seconds."""
HINT_S = 3.0
"""If calls wait and no broker answers for this number of seconds, a warning is logged."""
GRACE_S = 1.0
"""Normally, the broker ends a request at its timeout. If the broker has not done so this number of
seconds later, the client ends the request itself."""

INPUT_AGAIN_S = 1.0
"""If an input is not answered for this number of seconds, it is sent again."""

STREAM_BITS, TRY_BITS = 20, 8
"""The stream ids of a named session have two fields in their lowest ``STREAM_BITS`` bits. The
lowest ``TRY_BITS`` bits count the attempts of a stream; the bits above them number the streams of a
request."""
MAX_TRY = (1 << TRY_BITS) - 1

MESSAGES = {**SERVER_MESSAGES, b"TOKEN": TokenBody}
"""The struct of the body, for each message type that the broker sends."""


class ClientSession:
    """The session of one client with the broker at ``front``. ``front`` may be several addresses,
    separated by commas. The next connection may then be to another of these brokers.

    ``patience_s``: if the broker does not answer for this number of seconds, calls fail.
    """

    encodings: tuple[str, ...] = ("msgpack", "json")
    capabilities: tuple[str, ...] = ("ping", "ack", "bodies", "columns", "text_columns", "recover")
    """The capabilities in the HELLO of the session."""
    keep_s: float = 0.0
    """If the connection is lost, the broker keeps the session for at least this number of
    seconds."""

    def __init__(self, front: str, patience_s: float, now: float, token: str | None = None) -> None:
        """``token``: the token that the session shall have; None: the broker chooses the token. A
        session with a given token is *named*. If a session with this token exists already, this
        client takes over the session and its streams."""
        self.front = front
        self._several = len(separate(front)) > 1
        self._patience_s = patience_s
        self.outgoing: list[Frames] = []
        self.ready: Delivery = []
        self._lanes: Lanes | None = None
        """Delivers TOKEN messages in columns, as long as they have the same sequences. None if no
        such message has arrived, or if a call of these sequences has changed since the last one."""
        self._calls: dict[int, Call] = {}
        self._waiting: dict[int, Call] = {}
        """Calls that wait for WELCOME or for their ``resend_at`` before they are sent."""
        self._barriers: dict[int, Call] = {}
        """Unanswered BUFFER calls. After each BUFFER, the session sends a PING, whose number is the
        key. The PONG confirms the BUFFER."""
        self._buffers: dict[str, tuple[Buffer, tuple[bytes, ...]]] = {}
        self._ids = itertools.count(1)
        self._token = token
        self._named = token is not None
        """Whether the session is named. Cleared when another client takes the session over."""
        self._found: frozenset[int] = frozenset()
        """Ids of the named session's streams in the last WELCOME."""
        self._may_have_more = False
        """Whether workers may still report streams of a named session. WELCOME sets this flag."""
        self._foreign = False
        """Whether the streams of the named session belong to another request of the program. This
        client then neither uses nor ends these streams."""
        self._encoding: Encoding = "msgpack"
        self._welcomed = False
        self._offline_since = now
        self._hinted = False
        """Whether ``_look`` has warned that no broker answers. A WELCOME clears this flag."""
        self._hello_at = now
        self._received_at = now
        self._ping_s = 2.0
        self._silence_s = 6.0
        self._ping_at = now
        self._position = 0
        """The last ``Pong.position`` on this connection, which the next PING acknowledges."""
        self._look_at = now

    # --- the connection -------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Handles a new connection: discards unsent messages of the old connection, and sends
        HELLO."""
        if self._welcomed:
            self._offline_since = now
        self._hello(now)

    def disconnected(self, now: float) -> None:
        """Handles the loss of the connection. Calls wait at most ``patience_s`` for the next
        WELCOME."""
        if self._welcomed:
            self._welcomed = False
            self._offline_since = now

    def lost(self, now: float) -> bool:
        """Whether a new connection is needed, because the broker has been silent for too long."""
        if not self._welcomed:
            return now - self._hello_at > HELLO_AGAIN_S
        return now - self._received_at > self._silence_s

    def wait_s(self, now: float) -> float:
        """Seconds until the next deadline."""
        due = min(self._ping_at, self._look_at) if self._welcomed else self._look_at
        return max(0.0, due - now)

    def _hello(self, now: float) -> None:
        self._welcomed = False
        self._position = 0
        self._hello_at = self._received_at = now
        self.outgoing.clear()
        self._send(
            b"HELLO",
            Hello(
                encodings=self.encodings,
                session=self._token,
                begin=self._named,
                elsewhere=self._several and self._token is not None,
                keep_s=self.keep_s,
                client="tokenbus-python",
                capabilities=list(self.capabilities),
            ),
        )

    # --- calls ----------------------------------------------------------------------------------

    def submit(self, call: Call, now: float) -> None:
        """Begins a call. Its events are added to ``ready``; the last event is an Ended."""
        call.began = call.received_at = now
        self._queue(call)
        if self._welcomed:
            self._begin(call, now)

    def cancel(self, call: Call) -> None:
        """Ends a call whose events are not needed any more."""
        if not call.ended:
            call.ended = True
            self._forget(call, "cancelled")
            self._fail_inputs(call)

    def send_input(
        self,
        call: Call,
        text: str,
        answered: Callable[[TokenbusError | None], None],
        now: float,
    ) -> None:
        """Sends an input to the program of a stream, after the earlier inputs. ``answered`` is
        called with None when the input is stored, or with an error."""
        sent = SentInput(len(call.inputs) + 1, text, answered)
        if call.ended:
            sent.report(_stream_ended())
            return
        call.inputs.append(sent)
        self._next_input(call, now)

    def _next_input(self, call: Call, now: float) -> None:
        """Sends the first input that is not stored, if the broker can receive it now. If the input
        was already sent, it is not sent again before ``input_at``."""
        ready = self._welcomed and call.sent and not call.attaching
        waiting = next((sent for sent in call.inputs if not sent.stored), None)
        if waiting is None:
            call.input_at = None
        elif ready and (call.input_at is None or now >= call.input_at):
            call.input_at = now + INPUT_AGAIN_S
            body = Input(stream_id=call.number, number=waiting.number, text=waiting.text)
            self._send(b"INPUT", body)

    def _on_input_answer(self, call: Call, answer: InputAnswer, now: float) -> None:
        """Handles the answer to an input: sends the next input, schedules the same input again, or
        removes a refused input."""
        sent = next((sent for sent in call.inputs if not sent.stored), None)
        if sent is None or sent.number != answer.number:
            return
        if answer.code is None:
            sent.stored = True
            sent.report(None)
            call.input_at = None
            self._next_input(call, now)
        elif sent.reported or answer.code in (Code.NO_WORKER, Code.UNKNOWN_STREAM):
            # UNKNOWN_STREAM is not reported here. If the stream has ended, the client also receives
            # the stream's end. ``_fail_inputs`` then reports the end.
            call.input_at = now + (answer.retry_after_s or INPUT_AGAIN_S)
        else:
            error = error_for(answer.code, answer.message, retry_after_s=answer.retry_after_s)
            self._drop_input(call, sent, error, now)

    def _drop_input(self, call: Call, sent: SentInput, error: TokenbusError, now: float) -> None:
        """Removes a refused input, and renumbers the later inputs, which were not sent yet."""
        call.inputs.remove(sent)
        for number, later in enumerate(call.inputs, 1):
            later.number = number
        sent.report(error)
        call.input_at = None
        self._next_input(call, now)

    def _fail_inputs(self, call: Call) -> None:
        """Reports the end of a stream to the senders of its inputs."""
        for sent in call.inputs:
            sent.report(_stream_ended())
        call.inputs.clear()

    def end_all(self, error: TokenbusError) -> None:
        """Ends every call with ``error``."""
        for call in list(self._calls.values()):
            self._end(call, error)

    def bye(self, keep: bool = False) -> None:
        """Ends the session and its streams. With ``keep``, only the connection ends."""
        keep = keep or self._foreign
        self.end_all(ConnectionLostError(Code.CONNECTION_LOST, "this client was closed"))
        if self._welcomed:
            self._send(b"BYE", Bye(keep=keep))

    def _queue(self, call: Call) -> None:
        """Queues the next attempt of a call. The attempt has a new stream id, so that entries of
        earlier attempts can be recognized and dropped."""
        call.number = next(self._ids)
        if call.base is not None:
            call.number = call.base + min(call.tries, MAX_TRY)
        if not isinstance(call.message, Buffer):
            call.message.stream_id = call.number
        self._calls[call.number] = self._waiting[call.number] = call

    def _begin(self, call: Call, now: float) -> None:
        """Sends a call. If the session is named and already has the call's stream, attaches to this
        stream instead."""
        if call.base is None or call.tries:
            self._send_call(call, now)
            return
        first = call.base >> STREAM_BITS
        if any(stream >> STREAM_BITS != first for stream in self._found):
            self._foreign = True
            what = "the idempotency key was already used for a request with another path or body"
            self._end(call, RequestError(Code.CONFLICT, what))
            return
        same = [n for n in self._found if n >> TRY_BITS == call.base >> TRY_BITS]
        if not same and not (self._may_have_more and (self._several or call.repeated)):
            self._send_call(call, now)
            return
        if same:
            del self._calls[call.number], self._waiting[call.number]
            assert not isinstance(call.message, Buffer)
            call.number = call.message.stream_id = max(same)
            self._calls[call.number] = call
        self._waiting.pop(call.number, None)
        call.sent = call.attaching = True
        call.received_at = now
        self._lanes = None
        self._send(b"ATTACH", Attach(stream_id=call.number, received=0, moves=0))

    def _send_call(self, call: Call, now: float) -> None:
        """Sends a call, or ends it with an error if it cannot be encoded."""
        try:
            self._send_parts(call)
        except (UnicodeError, TypeError, ValueError, OverflowError) as error:
            what = f"the request cannot be encoded: {error}"
            self._end(call, RequestError(Code.INVALID_FIELD, what))
            return
        self._waiting.pop(call.number, None)
        call.sent = True
        call.received_at = now
        call.tries += 1
        call.input_at = None
        self._next_input(call, now)

    def _send_parts(self, call: Call) -> None:
        message = call.message
        if isinstance(message, Buffer):
            if message.tokens is None and message.text is None and not call.attachments:
                self._buffers.pop(message.name, None)
            else:
                self._buffers[message.name] = (message, call.attachments)
            self._barriers[call.number] = call
            self._send(b"BUFFER", message, call.attachments)
            self._send(b"PING", Ping(n=call.number, ack=self._position))
        else:
            self._send(call.type, message, call.attachments)

    def _forget(self, call: Call, reason: Literal["cancelled", "timeout"] | None) -> None:
        """Removes a call from all tables. If ``reason`` is given and the request was sent, sends
        CANCEL for the call's stream."""
        self._settle()
        self._lanes = None
        self._calls.pop(call.number, None)
        self._waiting.pop(call.number, None)
        self._barriers.pop(call.number, None)
        if reason is not None and call.sent and not isinstance(call.message, Buffer):
            self._send(b"CANCEL", Cancel(stream_id=call.number, reason=reason))

    def _end(self, call: Call, error: TokenbusError | None, *events: Event) -> None:
        if not call.ended:
            call.ended = True
            self._forget(call, None)
            self._fail_inputs(call)
            self.ready.append((call, [*events, Ended(error)]))

    def _failed(self, call: Call, error: TokenbusError, now: float, tell_broker: bool) -> None:
        """Handles a failed attempt: schedules another attempt, or ends the call."""
        if call.failed_at is None:
            call.failed_at = now
        retryable = error.code in RETRYABLE
        if error.code in (Code.QUEUE_FULL, Code.CLIENT_LIMIT):
            retryable = call.waits_for_room
        if not retryable or now - call.failed_at >= call.retry_s:
            if tell_broker:
                self._forget(call, "cancelled")
            self._end(call, error)
            return
        self._forget(call, "cancelled" if tell_broker else None)
        first, longest = BACK_OFF_S
        pause = error.retry_after_s or min(longest, first * 2.0 ** min(call.tries, 10))
        notice = System(event="retrying", message=error.message)
        self.ready.append((call, [notice]))
        call.begin_try()
        call.resend_at = now + pause
        self._queue(call)
        self._look_at = min(self._look_at, call.resend_at)

    # --- messages -------------------------------------------------------------------------------

    def on_frames(self, frames: Sequence[bytes], now: float) -> None:
        """Handles a message from the broker."""
        if len(frames) > 2 and frames[0] == b"TOKEN":
            for body in frames[1:]:
                self.on_frames([b"TOKEN", body], now)
            return
        self._received_at = now
        try:
            message = decode_frames(frames, MESSAGES)
            if isinstance(message.body, TokenColumns):
                self._columns(message.body, now)
                return
        except TokenbusError as error:
            log.warning("dropped an invalid message from the broker: %s", error)
            return
        self._settle()
        match message.body:
            case list() as entries:
                self._tokens(entries, now)
            case Welcome() as welcome:
                self._on_welcome(welcome, now)
            case Pong() as pong:
                self._on_pong(pong, now)
            case Error() as error_message:
                self._on_error(error_message, now)
            case Msg() as msg:
                self._on_msg(msg, now)
            case System() as notice:
                call = self._calls.get(notice.stream_id) if notice.stream_id else None
                if call is not None:
                    call.received_at = now
                    call.moves = max(call.moves, notice.moves)
                    self.ready.append((call, [notice]))

    def _columns(self, body: TokenColumns, now: float) -> None:
        """Handles a TOKEN message in columns: delivers each row to its call. While consecutive
        messages have the same sequences, ``_lanes`` only counts the messages."""
        step = self._lanes.step(body, now) if self._lanes is not None else None
        if step is None:
            self._settle()
            self._lanes = Lanes.of(body, self._calls)
            step = self._lanes.step(body, now) if self._lanes is not None else None
        if step is not None:
            self.ready.append(step)
        entries = body.entries if step is not None else column_entries(body)
        if entries:
            self._settle()
            self._tokens(entries, now)

    def _settle(self) -> None:
        """Adds the count of ``_lanes`` to the counts of received entries in the calls. Must be
        called before the calls' counts are read."""
        if self._lanes is not None:
            self._lanes.settle()

    def _tokens(self, entries: list[Token], now: float) -> None:
        per_call: dict[int, tuple[Call, list[Event]]] = {}
        for entry in entries:
            call = self._calls.get(entry.stream_id)
            if call is None:
                continue
            ended = entry.finish_reason is not None and entry.live == 0
            if call.attaching:
                continue
            call.received_at = now
            if call.repeats:
                call.repeats -= 1
                continue
            call.failed_at = None
            if call.is_new(entry):
                per_call.setdefault(entry.stream_id, (call, []))[1].append(entry)
            if ended:
                call.ended = True
                per_call.setdefault(entry.stream_id, (call, []))[1].append(Ended(None))
                self._forget(call, None)
                self._fail_inputs(call)
        self.ready += per_call.values()

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        self._welcomed = True
        self._hinted = False
        self._token = welcome.session
        self._encoding = "msgpack" if welcome.encoding == "msgpack" else "json"
        self._ping_s = welcome.ping_s
        self._silence_s = max(2 * welcome.ping_s, 0.6 * welcome.expiry_s)
        self._ping_at = now + welcome.ping_s
        sent = [call for call in self._calls.values() if call.sent]
        if not welcome.resumed:
            for kept, attachments in self._buffers.values():
                self._send(b"BUFFER", kept, attachments)
        live = set(welcome.streams) if welcome.resumed or welcome.recovering else set()
        ended = sorted(live - self._calls.keys()) if not self._named else []
        if self._named:
            self._found = frozenset(welcome.streams)
            self._may_have_more = welcome.recovering
        lost = ConnectionLostError(Code.CONNECTION_LOST, "the connection to the broker was lost")
        for call in sent:
            if call.number in live or (welcome.recovering and call.may_be_live):
                call.attaching = True
                self._lanes = None
                attach = Attach(stream_id=call.number, received=call.received, moves=call.moves)
                self._send(b"ATTACH", attach)
            else:
                self._failed(call, lost, now, tell_broker=True)
        for number in ended:
            # The CANCEL of this stream was lost with the connection.
            self._send(b"CANCEL", Cancel(stream_id=number))
        for call in list(self._waiting.values()):
            if call.resend_at is None:
                self._begin(call, now)

    def _on_pong(self, pong: Pong, now: float) -> None:
        barrier = self._barriers.get(pong.n)
        if self._welcomed and pong.position:
            self._position = pong.position
        if not pong.session and self._welcomed:
            self._offline_since = now
            self._hello(now)
        elif barrier is not None:
            self._end(barrier, None)

    def _on_error(self, body: Error, now: float) -> None:
        error = error_for(
            body.code,
            body.message,
            path=body.path,
            stream_id=body.stream_id,
            retry_after_s=body.retry_after_s,
        )
        call = self._calls.get(body.stream_id) if body.stream_id is not None else None
        if call is not None and call.inputs and body.type == "INPUT":
            self._drop_input(call, _in_flight(call), error, now)
        elif call is not None:
            if call.attaching and body.code == Code.UNKNOWN_STREAM:
                if call.resends_unknown:
                    call.attaching = False
                    self._send_call(call, now)
                    return
                error = _ended_offline()
            self._failed(call, error, now, tell_broker=False)
        elif body.code == Code.SESSION_TAKEN and self._named:
            # Another client has taken over the session. If this client used the session's token
            # again, it would take the session back.
            self._named, self._token = False, None
            self.end_all(error)
        elif body.type == "BUFFER" and self._barriers:
            refused = next(iter(self._barriers.values()))
            self._buffers.pop(_buffer_name(refused), None)
            self._end(refused, error)
        elif body.type == "HELLO" or (body.type == "PING" and body.code == Code.NOT_ALLOWED):
            # A refused PING means that the key of this client was revoked.
            self.end_all(error)
        elif body.code == Code.TOO_LARGE and (sent := self._oldest(body.type)) is not None:
            self._end(sent, error)
        else:
            log.warning("the broker reported: %s", error)

    def _oldest(self, message_type: str | None) -> Call | None:
        """The first unanswered call of a message type."""
        for call in self._calls.values():
            if call.sent and not call.received and call.type.decode() == message_type:
                return call
        return None

    def _on_msg(self, msg: Msg, now: float) -> None:
        call = self._calls.get(msg.stream_id)
        if call is None:
            return
        call.received_at = now
        if msg.attached is not UNSET:
            # The entries from number ``attached`` on follow. The client may already have received
            # some of them after an earlier ATTACH. If ``attached`` is 0, all entries follow. They
            # may then come from another copy of the stream, in another order.
            if msg.attached:
                call.repeats = max(0, call.received - msg.attached)
            else:
                call.begin_copy()
            call.attaching = False
            # Lanes deliver every row. So lanes must not be used while entries are repeated.
            self._lanes = None
            call.moves = msg.moves
            call.input_at = None
            self._next_input(call, now)
        elif isinstance(msg.input, InputAnswer):
            self._on_input_answer(call, msg.input, now)
        else:
            self._end(call, None, msg)

    # --- time -----------------------------------------------------------------------------------

    def on_time(self, now: float) -> None:
        """Sends due messages, and ends calls whose time limit has passed."""
        if self._welcomed and now >= self._ping_at:
            self._ping_at = now + self._ping_s
            self._send(b"PING", Ping(ack=self._position))
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._settle()
        for call in list(self._calls.values()):
            self._look(call, now)

    def _look(self, call: Call, now: float) -> None:
        if call.input_at is not None:
            self._next_input(call, now)
        timeout_s = float("inf") if call.timeout_s is None else call.timeout_s
        age_s = now - call.began
        if age_s > timeout_s + GRACE_S and (self._welcomed or call.tries):
            self._forget(call, "timeout")
            what = f"the timeout of the request, {timeout_s:g} s, has expired"
            if not self._welcomed:
                what += f"; the broker at {self.front} does not answer"
            self._end(call, RequestTimeoutError(Code.TIMEOUT, what))
        elif not self._welcomed:
            waited = now - max(self._offline_since, call.began)
            if waited > self._patience_s or (age_s > timeout_s and not call.tries):
                what = no_broker(self.front)
                self._end(call, ConnectionLostError(Code.CONNECTION_LOST, what))
            elif waited > HINT_S and not self._hinted:
                self._hinted = True
                log.warning("%s (waiting for %g s)", no_broker(self.front), self._patience_s)
        elif call.resend_at is not None:
            if now >= call.resend_at:
                call.resend_at = None
                self._send_call(call, now)
            else:
                self._look_at = min(self._look_at, call.resend_at)
        elif call.stall_s is not None and call.sent and now - call.received_at > call.stall_s:
            what = f"no message arrived for {call.stall_s:g} s"
            self._failed(call, UnavailableError(Code.WORKER_LOST, what), now, tell_broker=True)

    def _send(self, message_type: bytes, body: Any, attachments: tuple[bytes, ...] = ()) -> None:
        self.outgoing.append(
            encode_frames(Message(message_type, body, attachments), self._encoding)
        )


def no_broker(front: str) -> str:
    """The text of the error for a ``front`` at which no broker answers, with the remedy."""
    if front == Settings().front:
        return f"no broker answers at {front}; start a system with: tokenbus up"
    what = f"no broker answers at {front}; is that the address of a running system?"
    # ``--front`` alone does not start a system with several addresses.
    return what if "," in front else f"{what} Start one with: tokenbus up --front {front}"


def _buffer_name(call: Call) -> str:
    return call.message.name if isinstance(call.message, Buffer) else ""


def _in_flight(call: Call) -> SentInput:
    """The first input of a call that is not stored. An ERROR for an INPUT of this call refuses this
    input."""
    return next((sent for sent in call.inputs if not sent.stored), call.inputs[-1])


def _stream_ended() -> RequestError:
    return RequestError(Code.UNKNOWN_STREAM, "the stream has ended, so it takes no more inputs")


def _ended_offline() -> ConnectionLostError:
    what = "the stream ended while the connection was lost"
    return ConnectionLostError(Code.CONNECTION_LOST, what)
