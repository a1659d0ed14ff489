"""What the broker sends a peer arrives in the order in which its core has made it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenbus.broker.outbox import Outbox, Sent
from tokenbus.broker.outgoing import Outgoing, Side
from tokenbus.broker.server import BrokerServer


class Core:
    """Notices that one peer has gone, and tells the other."""

    def on_gone(
        self, side: Side, peer: bytes, now: float, unsent: Sequence[bytes] = ()
    ) -> list[Outgoing]:
        return [Outgoing(Side.BACK, b"here", [b"second"])]


def test_what_the_loss_of_a_peer_leads_to_overtakes_nothing(tmp_path: Path) -> None:
    """A worker's GENERATE must not arrive before its REGISTERED: it would drop the request."""
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
    server._front.close(0)
    server._back.close(0)
    assert arrived == [b"first", b"second"]
