"""Messages to a peer arrive in the order in which the broker's core has made them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenbus.broker.outbox import Outbox, Sent
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.server import BrokerServer
from tokenbus.broker.settings import BrokerSettings
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.worker_messages import Register

from ..worlds.broker import generate


class Core:
    """A core that answers the loss of a peer with a message to another peer."""

    def on_gone(
        self, side: Side, peer: bytes, now: float, unsent: Sequence[bytes] = ()
    ) -> list[Outgoing]:
        return [Outgoing(Side.BACK, b"here", [b"second"])]


def test_what_the_loss_of_a_peer_leads_to_overtakes_nothing(tmp_path: Path) -> None:
    """A worker drops a GENERATE that arrives before its REGISTERED."""
    server = BrokerServer(f"ipc://{tmp_path}/front.sock", f"ipc://{tmp_path}/back.sock")
    arrived = []

    def send(peer: bytes, frames: Sequence[bytes]) -> Sent:
        if peer == b"gone":
            return Sent.GONE
        arrived.append(frames[0])
        return Sent.OK

    server._to_back = Outbox(send, 1000)
    server.core = Core()  # type: ignore[assignment]
    server._post(
        [Outgoing(Side.BACK, b"gone", [b"lost"]), Outgoing(Side.BACK, b"here", [b"first"])]
    )
    server.close()
    assert arrived == [b"first", b"second"]


GONE = 2_000


def test_a_request_that_finds_thousands_of_workers_gone_at_once_ends_up_waiting(
    tmp_path: Path,
) -> None:
    """A failed send to a lost worker moves the request to the next worker. A recursive
    implementation raised RecursionError at about 500 lost workers."""
    settings = BrokerSettings(max_queued=10)
    back = f"ipc://{tmp_path}/back.sock"
    server = BrokerServer(f"ipc://{tmp_path}/front.sock", back, settings)
    try:
        core, now = server.core, time.monotonic()
        for number in range(GONE):
            # The worker is registered, but its connection closes before the broker's first message.
            body = Register(
                name=f"w{number}", role="gpu", version=1, pid=number, host="h", capacity=1,
                patterns=["m"],
            )  # fmt: skip
            peer = b"\0%04d" % number
            core.on_worker(peer, [b"REGISTER", encode_header(), encode_body(body, "msgpack")], now)
        assert len(core.state.workers) == GONE
        asked = msgspec.json.encode(generate(1))
        server._post(core.on_client(b"\0client", [b"GENERATE", asked], now))
        assert core.state.workers == {}
        assert core.state.counters.internal_errors == 0
        [request] = core.state.requests.values()
        assert request.worker is None
        assert not server._to_back.waiting
    finally:
        server.close()
