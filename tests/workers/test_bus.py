"""A worker's connection to a real broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tokenbus.protocol.messages import PROTOCOL_VERSION
from tokenbus.protocol.worker_messages import Register
from tokenbus.transport.dealer import AddressError
from tokenbus.workers.bus import Bus as Connection

from ..processes import Bus, until
from ..transport.test_dealer import no_descriptors

pytestmark = pytest.mark.process

WAIT_S = 60.0


@pytest.fixture
def broker() -> Iterator[Bus]:
    with Bus() as bus:
        yield bus


def connection(endpoint: str) -> Connection:
    """That of a worker without models."""

    def registration() -> Register:
        return Register(
            version=PROTOCOL_VERSION, role="gpu", name="test", capacity=1, pid=1, host="here"
        )

    return Connection(endpoint, registration, lambda: (0, {}))


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
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("BusEndedError"), done.stdout + done.stderr
    assert "context was terminated" in done.stdout
