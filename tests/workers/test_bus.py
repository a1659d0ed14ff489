"""A worker's connection to a real broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import zmq
from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import encode_header
from tokenbus.protocol.messages import PROTOCOL_VERSION, Error
from tokenbus.protocol.packing import pack, unpack
from tokenbus.protocol.worker_messages import Register, Registered
from tokenbus.transport.dealer import AddressError
from tokenbus.workers.bus import Bus as Connection
from tokenbus.workers.bus import FromBus

from ..processes import Bus, until
from ..transport.test_dealer import Router, no_descriptors

pytestmark = pytest.mark.process

WAIT_S = 300.0


@pytest.fixture
def broker() -> Iterator[Bus]:
    with Bus() as bus:
        yield bus


def connection(
    endpoint: str, first: Callable[[list[FromBus]], list[FromBus]] | None = None
) -> Connection:
    """The connection of a worker without models."""

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
    """A plain socket plays the broker, because a real broker does not send such a message."""
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
    assert unpack(register)[0] == b"REGISTER"
    worker.registered(Registered(worker=1, heartbeat_s=600.0, expiry_s=600.0))
    for kind, body in ((b"SEEN", b"1"), (b"TAKEN", b"2"), (b"SEEN", b"bad"), (b"SEEN", b"3")):
        router.send([sender, *pack([kind, encode_header(), body])])
    router.send([sender, *pack([b"TAKEN", encode_header(), b"4"])])
    taken: list[bytes] = []
    while b"4" not in taken:
        taken += [message.body for message in worker.take(WAIT_S)]
    assert taken == [b"2", b"4"]
    assert seen == [b"1", b"3"]
    worker.close("the test is over")
    assert unpack(router.receive()[1:])[0] in (b"HEARTBEAT", b"UNREGISTER"), "it registered again"
    router.close()


def test_what_is_posted_between_two_leases_is_dropped() -> None:
    """A plain socket plays the broker, so that leases begin and end when the test needs it."""
    router = Router(zmq.Context.instance())
    worker = connection(router.address)
    worker.start()

    def post(*bodies: bytes) -> None:
        for body in bodies:
            worker.post([b"RESULT", encode_header(), body])

    def grant(sender: bytes, lease: int) -> Registered:
        """Answers a REGISTER; returns the answer that the worker has received."""
        body = encode_body(Registered(worker=lease, heartbeat_s=600.0, expiry_s=600.0), "msgpack")
        router.send([sender, *pack([b"REGISTERED", encode_header(), body])])
        taken: list[FromBus] = []
        while not taken:
            taken = worker.take(WAIT_S)
        [message] = taken
        answer: Registered = decode_as(Registered, message.body, "msgpack")
        return answer

    def received() -> tuple[bytes, bytes]:
        """The type and the body of the worker's next message that is not a HEARTBEAT."""
        while (message := unpack(router.receive()[1:]))[0] == b"HEARTBEAT":
            pass
        kind, _, body = message
        return kind, body

    sender, *register = router.receive()
    assert unpack(register)[0] == b"REGISTER"
    post(b"before the first lease")
    first = grant(sender, 1)
    post(b"its answer is not handled yet")
    worker.registered(first)
    post(b"in the first lease")
    assert received() == (b"RESULT", b"in the first lease")
    for lease in (2, 3):
        router.send([sender, *pack([b"REREGISTER", encode_header(), b"\x80"])])
        assert received()[0] == b"REGISTER"
        post(b"of an earlier lease")
        answer = grant(sender, lease)
        if lease == 2:
            assert worker.kept(answer) == frozenset()
    worker.registered(first)
    post(b"an earlier answer counts for nothing")
    worker.registered(answer)
    assert worker.kept(answer) is None, "an answer to a changed registration"
    post(b"in the third lease")
    assert received() == (b"RESULT", b"in the third lease")
    worker.close("the test is over")
    router.close()


def test_a_worker_that_is_refused_logs_the_reason_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker that tries again serves as soon as a broker of its version runs at this address."""
    router = Router(zmq.Context.instance())
    worker = connection(router.address)
    worker.start()
    sender, *_ = router.receive()
    error = Error(code="unsupported_version", message="version 1 is not supported")
    refusal = [b"ERROR", encode_header(), encode_body(error, "msgpack")]
    router.send([sender, *pack(refusal)])
    # A broker of another version may not pack its messages.
    router.send([sender, *refusal])
    until(lambda: "version 2 is required" in caplog.text, WAIT_S, "both messages were logged")
    assert "refuses this worker: version 1 is not supported" in caplog.text
    answer = encode_body(Registered(worker=1, heartbeat_s=600.0, expiry_s=0.05), "msgpack")
    router.send([sender, *pack([b"REGISTERED", encode_header(), answer])])
    while router.receive()[0] == sender:
        pass
    worker.close("the test is over")
    router.close()


def test_what_is_about_requests_of_an_earlier_registration_is_dropped() -> None:
    """The broker has ended the requests of the earlier registration."""
    router = Router(zmq.Context.instance())
    worker = connection(router.address)
    worker.start()
    sender, *register = router.receive()
    assert unpack(register)[0] == b"REGISTER"
    for frames in (
        [b"GENERATE", encode_header(7), b"stale"],
        [b"DRAIN", encode_header(), b"of the worker"],
        [b"REREGISTER", encode_header(), b""],
        [b"GENERATE", encode_header(8), b"new"],
    ):
        router.send([sender, *pack(frames)])
    while unpack(router.receive()[1:])[0] != b"REGISTER":
        pass
    taken: list[bytes] = []
    while b"new" not in taken:
        taken += [message.body for message in worker.take(WAIT_S)]
    assert taken == [b"of the worker", b"new"]
    worker.close("the test is over")
    router.close()


def test_a_new_socket_drops_what_was_not_taken_from_the_old_one() -> None:
    arrived: list[bytes] = []

    def first(messages: list[FromBus]) -> list[FromBus]:
        arrived.extend(message.body for message in messages)
        return messages

    router = Router(zmq.Context.instance())

    def answer_until_arrived(body: bytes, expiry_s: float) -> None:
        """Answers each registration, and sends a request after each answer, until a request with
        this body has arrived."""
        answer = Registered(worker=1, heartbeat_s=0.05, expiry_s=expiry_s)
        while body not in arrived:
            sender, *received = router.receive()
            if unpack(received)[0] == b"REGISTER":
                registered = encode_body(answer, "msgpack")
                router.send([sender, *pack([b"REGISTERED", encode_header(), registered])])
                router.send([sender, *pack([b"GENERATE", encode_header(7), body])])

    worker = connection(router.address, first)
    worker.start()
    # With this short lease, the worker treats the broker as lost and opens a new socket.
    answer_until_arrived(b"stale", 0.2)
    answer_until_arrived(b"new", 600.0)
    taken: list[bytes] = []
    while b"new" not in taken:
        taken += [m.body for m in worker.take(WAIT_S) if m.type == b"GENERATE"]
    assert taken == [b"new"]
    worker.close("the test is over")
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
    """The worker runs in a separate process, because terminating the context also ends the sockets
    of other tests in the same process."""
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, "tcp://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.startswith("BusEndedError"), done.stdout + done.stderr
    assert "context was terminated" in done.stdout


def test_a_worker_whose_name_another_one_has_logs_one_line_until_that_is_gone(
    broker: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    registrations: list[str] = []

    def start(process: str) -> Connection:
        def registration() -> Register:
            registrations.append(process)
            return Register(
                version=PROTOCOL_VERSION, role="gpu", name="same", capacity=1, pid=1, host="here"
            )

        worker = Connection(
            f"ipc://{broker.folder}/back.sock", registration, lambda: (0, {}), lambda _: []
        )
        worker.start()
        return worker

    first = start("first")
    broker.wait_for_roles("gpu")
    registered = registrations.count("first")
    second = start("second")
    lines = "refuses this worker"
    until(lambda: lines in caplog.text, WAIT_S, "the second process was refused")
    refused_at = registrations.count("second")
    until(
        lambda: registrations.count("second") > refused_at + 2, WAIT_S, "the second has tried twice"
    )
    assert caplog.text.count(lines) == 1
    assert "the name 'same' belongs to process 1 on here, which is alive" in caplog.text
    assert registrations.count("first") == registered, "the first process lost its lease"
    first.close("it stops")
    until(lambda: second._links[0].lease.registered, WAIT_S, "the second process has the name")
    second.close("the test is over")
