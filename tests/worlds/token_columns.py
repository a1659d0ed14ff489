"""A client's session, and a broker that sends tokens as entries or in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from tokenbus.clients.calls import Call, Event
from tokenbus.clients.lanes import hand_out
from tokenbus.clients.request_options import generate_call
from tokenbus.clients.session import ClientSession
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.columns import pack_columns, plain_entry
from tokenbus.protocol.messages import Generate, Token

CALLS, SEQS = 3, 2
KEYS = [(which, seq) for which in range(CALLS) for seq in range(SEQS)]


class World:
    """A session, and a broker that sends all tokens in one form."""

    def __init__(self, columns: bool) -> None:
        self.columns = columns
        self.now = 0.0
        self.session = ClientSession("tcp://front", 60.0, self.now)
        self.events: list[list[Event]] = []
        self.calls: list[Call] = []
        self._sent: dict[int, list[Token]] = {}
        """The entries of the current attempt that the worker has sent, by stream."""
        self.session.connected(self.now)
        self._receive("WELCOME", {"version": 1, "encoding": "msgpack", "session": "a"})
        for _ in range(CALLS):
            call = generate_call([1], {"n": SEQS, "retry_s": 60.0, "seed": 1})
            events: list[Event] = []
            call.stall_s = 2.0
            call.take = events.extend
            # Rows are recorded as entries, in the order of all events.
            call.unread.watched, call.unread.wake = True, _noting(call, events)
            self.calls.append(call)
            self.events.append(events)
            self.session.submit(call, self.now)
        self._work()

    def play(self, what: str, which: Any, number: Any) -> None:
        """Runs one event."""
        match what:
            case "step":
                self._tokens([self._token(call, seq, call == number) for call, seq in which])
            case "end":
                self._end(self.calls[which])
            case "cancel":
                self.session.cancel(self.calls[which])
            case "time":
                self.now += number
                self.session.on_time(self.now)
            case "fail":
                body = {"code": "worker_lost", "message": "", "stream_id": self.calls[which].number}
                self._sent.pop(self.calls[which].number, None)
                self._receive("ERROR", body)
            case "lost":
                self._sent.clear()
                self._receive("PONG", {"session": False})
                self._receive("WELCOME", {"version": 1, "encoding": "msgpack", "session": "b"})
            case "resume":
                self._resume(lost=number)
            case "resume twice":
                self._resume(lost=number, answers=2)
        self._work()

    def _work(self) -> None:
        """Delivers ready events, and begins the requested streams."""
        hand_out(self.session.ready)
        self.session.ready = []
        self.session.on_time(self.now)
        for frames in self.session.outgoing:
            if frames[0] == b"GENERATE":
                self._sent[msgspec.msgpack.decode(frames[1], type=Generate).stream_id] = []
        self.session.outgoing = []

    def _resume(self, lost: int, answers: int = 1) -> None:
        """Breaks the connection, so that ``lost`` tokens of each stream are lost, and resumes the
        session on a new connection. ``answers``: how many ATTACHes of the same kind are answered on
        the new connection. The additional ATTACHes were sent on earlier connections."""
        for _ in range(lost):
            for stream in self._sent:
                self._token_of(stream, 0, with_text=False)
        self.session.connected(self.now)
        welcome = {"version": 1, "encoding": "msgpack", "session": "a", "resumed": True}
        self.session.outgoing = []
        self._receive("WELCOME", welcome | {"streams": list(self._sent)})
        attached = [
            msgspec.msgpack.decode(f[1]) for f in self.session.outgoing if f[0] == b"ATTACH"
        ]
        # Tokens that arrive before the answer are discarded.
        self._tokens([self._token(call, seq, False) for call, seq in KEYS])
        # If ``lost`` is odd, the answer repeats an entry, like an answer to an earlier ATTACH.
        for _ in range(answers):
            missed: list[Token] = []
            for body in attached:
                stream, received = body["stream_id"], max(0, body["received"] - lost % 2)
                self._receive("MSG", {"stream_id": stream, "attached": received})
                missed += self._sent[stream][received:]
            self._send(missed)

    def _token(self, which: int, seq: int, with_text: bool) -> Token | None:
        number = self.calls[which].number
        return self._token_of(number, seq, with_text) if number in self._sent else None

    def _token_of(self, stream: int, seq: int, with_text: bool) -> Token:
        """The next token of a sequence, which is the same in each attempt."""
        sent = self._sent[stream]
        pos = sum(entry.seq == seq for entry in sent)
        entry = plain_entry(stream, 10 * pos + seq, -1 / (pos + 1), pos, seq)
        if with_text:
            entry.text = "x" if pos % 3 else ""
        sent.append(entry)
        return entry

    def _tokens(self, entries: Sequence[Token | None]) -> None:
        self._send([entry for entry in entries if entry is not None])

    def _end(self, call: Call) -> None:
        if call.number in self._sent:
            end = Token(token=None, stream_id=call.number, logprob=None, finish_reason="length")
            del self._sent[call.number]
            self._send([end])

    def _send(self, entries: list[Token]) -> None:
        body = pack_columns(entries, texts=True) if self.columns else entries
        self.session.on_frames([b"TOKEN", encode_body(body, "msgpack")], self.now)

    def _receive(self, message_type: str, body: Any) -> None:
        self.session.on_frames([message_type.encode(), msgspec.msgpack.encode(body)], self.now)

    def state(self) -> list[Any]:
        """The state of the calls."""
        self.session._settle()
        return [
            (c.received, c.counted, c.seen, c.received_at, c.failed_at, c.ended, c.number)
            for c in self.calls
        ]


def _noting(call: Call, events: list[Event]) -> Any:
    def note() -> None:
        row = call.unread.pop()
        assert isinstance(row, tuple)
        events.append(plain_entry(*row))

    return note
