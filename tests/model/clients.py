"""A simulated client with a real session, and readers that check each entry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenbus.broker.outgoing import Side
from tokenbus.clients.calls import Call, Ended
from tokenbus.clients.lanes import hand_out
from tokenbus.clients.request_options import generate_call
from tokenbus.clients.session import ClientSession
from tokenbus.protocol.columns import plain_entry
from tokenbus.protocol.errors import TokenbusError
from tokenbus.protocol.messages import Generate, Msg, System, Token

from .network import Network, Pipe
from .streams import entry_at

PATIENCE_S = 1e6


class Reader:
    """Reads one stream, and checks that each entry is the next one of its sequence, and that no
    event follows the end."""

    def __init__(self, call: Call) -> None:
        assert isinstance(call.message, Generate)
        self.call = call
        self.request = call.message
        self.next = dict.fromkeys(range(self.request.n), 0)
        """The position of the next token of each sequence."""
        self.ended: set[int] = set()
        self.over = False
        self.error: TokenbusError | None = None
        self.cancelled = False
        self.notices: list[System] = []
        call.take = call.unread.extend

    def read(self) -> None:
        """Reads and checks the events that have arrived."""
        unread = self.call.unread
        while unread:
            event = unread.popleft()
            assert not self.over, f"{event} follows the end of its stream"
            if isinstance(event, System):
                self.notices.append(event)
            elif isinstance(event, Ended):
                self._end(event.error)
            else:
                assert not isinstance(event, Msg)
                self._take(event if isinstance(event, Token) else plain_entry(*event))

    def _take(self, entry: Token) -> None:
        seq = entry.seq
        assert seq not in self.ended, f"{entry} follows the end of its sequence"
        if entry.finish_reason == "cancelled":
            assert self.cancelled
            self.ended |= self.next.keys() if entry.live == 0 else {seq}
            return
        pos = self.next[seq]
        right = entry_at(self.request, seq, pos)
        assert entry.pos == pos, f"expected token {pos} of sequence {seq}, not {entry.pos}"
        assert entry.token == right.token
        assert entry.logprob == right.logprob
        assert entry.logs == right.logs
        assert entry.finish_reason == right.finish_reason
        self.next[seq] = pos + 1
        if entry.finish_reason is not None:
            self.ended.add(seq)
            left = len(self.next) - len(self.ended)
            assert entry.live == left, f"{left} sequences are left, but live is {entry.live}"

    def _end(self, error: TokenbusError | None) -> None:
        self.over = True
        self.error = error
        if error is None:
            assert self.ended == self.next.keys(), "the stream has ended without its last entries"


class Client:
    """A client process with a session."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = itertools.cycle(networks)
        self._network = network = next(self._networks)
        front = ",".join(f"tcp://front{n}" for n in range(len(networks)))
        self.session = ClientSession(front, PATIENCE_S, network.now)
        self.pipe = Pipe(network, Side.FRONT)
        self.session.connected(network.now)
        self.readers: list[Reader] = []
        self.stopped = False
        self.gone = False
        self._send()

    def submit(self, n: int, length: int, controller: str, seed: int) -> Reader:
        """Begins a stream."""
        call = generate_call(
            [1, 2], {"n": n, "max_tokens": length, "seed": seed, "retry_s": PATIENCE_S}
        )
        if controller:
            assert isinstance(call.message, Generate)
            call.message.controller = controller
        reader = Reader(call)
        self.readers.append(reader)
        self.session.submit(call, self._network.now)
        self._send()
        return reader

    def cancel(self, reader: Reader) -> None:
        """Cancels the stream of a reader."""
        reader.cancelled = True
        self.session.cancel(reader.call)
        self._send()

    def leave(self) -> None:
        """Ends the session. The model does not wait for the ends of its streams."""
        for reader in self.readers:
            reader.cancelled = True
        self.session.bye()
        self._send()

    def die(self, lost: int) -> None:
        """Kills the process, so that nothing reads its streams any more. ``lost``: see
        ``Pipe.close``."""
        for reader in self.readers:
            reader.cancelled = True
        self.gone = True
        self.pipe.close(lost)

    def receive(self, most: int) -> int:
        """Receives up to ``most`` messages from the broker; returns their number."""
        count = 0
        while count < most and self.pipe.down and not self.gone:
            self.session.on_frames(self.pipe.down.popleft(), self._network.now)
            count += 1
        self._send()
        return count

    def on_time(self) -> None:
        """Lets the session check the time. If the broker is silent for too long, connects again."""
        now = self._network.now
        self.session.on_time(now)
        self._send()
        if self.session.lost(now):
            self.reconnect(0)

    def reconnect(self, lost: int) -> None:
        """Replaces the connection by a new one, to the next broker. ``lost``: see
        ``Pipe.close``."""
        self.pipe.close(lost)
        self._network = next(self._networks)
        self.pipe = Pipe(self._network, Side.FRONT, self.pipe)
        self.session.connected(self._network.now)
        self._send()

    def _send(self) -> None:
        session = self.session
        sent, session.outgoing = session.outgoing, []
        for frames in sent:
            self.pipe.send(frames)
        ready, session.ready = session.ready, []
        hand_out(ready)
        for reader in self.readers:
            reader.read()
