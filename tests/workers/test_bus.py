"""A worker's connection to a real broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import zmq
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.messages import PROTOCOL_VERSION
from tokenbus.protocol.worker_messages import Register
from tokenbus.transport.dealer import AddressError
from tokenbus.workers.bus import Bus as Connection
from tokenbus.workers.bus import FromBus

from ..processes import Bus, until
from ..transport.test_dealer import Router, no_descriptors

pytestmark = pytest.mark.process

WAIT_S = 60.0


@pytest.fixture
def broker() -> Iterator[Bus]:
    with Bus() as bus:
        yield bus


def connection(
    endpoint: str, first: Callable[[list[FromBus]], list[FromBus]] | None = None
) -> Connection:
    """That of a worker without models."""

    def registration() -> Register:
        return Register(
            version=PROTOCOL_VERSION, role="gpu", name="test", capacity=1, pid=1, host="here"
        )

    return Connection(endpoint, registration, lambda: (0, {}), first)


def test_a_worker_that_has_no_descriptors_at_first_registers_when_it_has(
    broker: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    worker = connection(f"ipc://{broker.folder}/back.sock")
    with no_descriptors():
        worker.start()
        until(lambda: caplog.text, WAIT_S, "an attempt failed, and was logged")
    broker.wait_for_roles("gpu")
    worker.close("the test is over")


def test_an_address_that_is_not_valid_is_refused_at_once() -> None:
    with pytest.raises(AddressError, match="nowhere"):
        connection("nowhere")


def test_a_message_that_cannot_be_seen_first_costs_no_other() -> None:
    """The broker is played by a plain socket: a real one sends no message that is at fault."""
    seen: list[bytes] = []

    def first(messages: list[FromBus]) -> list[FromBus]:
        if any(message.body == b"bad" for message in messages):
            raise LookupError("the worker has a defect")
        seen.extend(message.body for message in messages if message.type == b"SEEN")
        return [message for message in messages if message.type == b"TAKEN"]

    router = Router(zmq.Context.instance())
    worker = connection(router.address, first)
    worker.start()
    sender, *register = router.receive()
    assert register[0] == b"REGISTER"
    for kind, body in ((b"SEEN", b"1"), (b"TAKEN", b"2"), (b"SEEN", b"bad"), (b"SEEN", b"3")):
        router.send([sender, kind, encode_header(), body])
    router.send([sender, b"TAKEN", encode_header(), b"4"])
    taken: list[bytes] = []
    while b"4" not in taken:
        taken += [message.body for message in worker.take(WAIT_S)]
    assert taken == [b"2", b"4"]
    assert seen == [b"1", b"3"]
    worker.close("the test is over")
    assert router.receive()[1] in (b"HEARTBEAT", b"UNREGISTER"), "the same connection"
    router.close()


TERMINATED = """
import sys, zmq
from tests.workers.test_bus import connection
bus = connection(sys.argv[1])
bus.start()
zmq.Context.instance().term()
try:
    while True:
        bus.take(60)
except RuntimeError as error:
    print(type(error).__name__, error)
"""


def test_a_worker_whose_context_was_terminated_does_not_wait_for_messages() -> None:
    """In a process of its own: the context is that of all of its sockets."""
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, "tcp://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.startswith("BusEndedError"), done.stdout + done.stderr
    assert "context was terminated" in done.stdout
