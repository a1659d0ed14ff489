"""The state worker as a process, with a real broker. The tests act as the client and as the other
workers."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from tokenbus.protocol.header import encode_token_header
from tokenbus.protocol.packing import pack
from tokenbus.protocol.worker_messages import Variable, VariableAnswer

from ...processes import Process, clean_environment, until
from ...worlds.state_worker import System

pytestmark = pytest.mark.process


@pytest.fixture
def system(processes: None) -> Iterator[System]:
    with System() as system:
        yield system


def counted(body: bytes) -> int:
    """The ``count`` of an answer, which identifies the operation."""
    return int(msgpack.decode(body, type=VariableAnswer).count)


def test_no_acknowledged_write_is_lost_when_the_worker_is_killed_again_and_again(
    system: System,
) -> None:
    request, _ = system.start_request()
    ops: list[Variable] = []
    answers: list[bytes] = []
    for first in (1, 1001, 2001):
        new = [
            Variable(request, 0, n, "append", "x", b"%d," % n) for n in range(first, first + 1000)
        ]
        for op in new:
            system.send(op)
        seen: dict[int, bytes] = {}
        for body in system.answers(5.0):
            seen[counted(body)] = body
            if len(seen) == 50:
                break
        system.state.kill()
        seen |= {counted(body): body for body in system.answers(0.1)}
        system.start_state_worker()
        again = system.do(*new)
        assert [seen.get(counted(body), body) for body in again] == again
        ops += new
        answers += again
    assert system.do(*ops) == answers
    now = system.one(Variable(request, 1, 1, "get", "x"))
    assert now.version == 3000
    # Each number is in the value once, whenever and however often its operation was sent.
    written = (now.value or b"").removesuffix(b",").split(b",")
    assert sorted(map(int, written)) == list(range(1, 3001))


def test_a_request_that_has_ended_leaves_no_variables(system: System) -> None:
    (request, stream), (other, _) = system.start_request(), system.start_request()
    for i in range(10):
        assert system.one(Variable(request, 0, i, "set", f"x{i}", b"a")).written
    assert system.one(Variable(other, 0, 0, "set", "x0", b"b")).written
    until(lambda: system.status.load.get("variables") == 11, 120.0, "the 11 variables")
    assert system.status.load["requests"] == 2
    # An operation that is not answered immediately is sent again, and counts again.
    assert system.status.load["ops"] >= 11
    system.client.send(b"CANCEL", {"stream_id": stream})
    system.gpu.receive(b"CANCEL")
    end = encode_token_header([], [request])
    system.gpu.socket.send_multipart(pack([b"TOKEN", end]))
    until(lambda: system.status.load.get("variables") == 1, 120.0, "the end of the variables")
    assert "has ended" in str(system.one(Variable(request, 0, 50, "get", "x0")).error)
    assert system.one(Variable(other, 0, 1, "get", "x0")).value == b"b"


def test_a_request_that_the_broker_does_not_have_is_dropped_when_the_worker_registers(
    system: System,
) -> None:
    request, _ = system.start_request()
    assert system.one(Variable(request, 0, 1, "set", "x", b"a")).written
    invented = 7
    assert system.one(Variable(invented, 0, 1, "set", "x", b"a")).written
    system.state.kill()
    system.start_state_worker()
    reads = itertools.count(2)

    def has_ended() -> bool:
        answer = system.one(Variable(invented, 0, next(reads), "get", "x"))
        return "has ended" in str(answer.error)

    # The broker may have accepted two registrations by now. The worker uses the second answer.
    until(has_ended, 120.0, "the end of the variables")
    assert system.one(Variable(request, 0, 2, "get", "x")).value == b"a"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({4: b"\xff\xfe"}, "not well-formed"),
        ({3: "delete"}, "not well-formed"),
        ({5: "text"}, "not well-formed"),
        ({0: 12345}, "has request 12345 in its body but request"),
    ],
)
def test_an_operation_that_is_wrong_is_answered_with_an_error(
    system: System, change: dict[int, Any], text: str
) -> None:
    request, _ = system.start_request()
    fields: list[Any] = [request, 0, 1, "set", "name", b"value", None]
    for index, value in change.items():
        fields[index] = value
    body = msgpack.encode(fields)
    if isinstance(fields[4], bytes):
        # A name is sent as a str. These bytes replace its characters.
        body = body.replace(b"\xc4\x02\xff\xfe", b"\xa2\xff\xfe")
    system.controller.send(b"VARIABLE", body, request)
    header, answer = system.controller.receive(b"VARIABLE_ANSWER")
    assert header.request == request
    assert text in str(msgpack.decode(answer, type=VariableAnswer).error)
    system.controller.send(b"VARIABLE", b"no msgpack at all", request)
    assert system.one(Variable(request, 0, 2, "get", "name")).version == 0


def test_a_second_worker_of_a_folder_exits_and_names_the_first(system: System) -> None:
    log = system.bus.folder / "second.log"
    second = Process("tokenbus.workers.state", log, system.bus.environment)
    assert second.wait() == 2
    assert f"is in use by another state worker, process {system.state.pid};" in second.log


def test_a_second_worker_that_stands_by_takes_over_when_the_first_is_killed(
    system: System,
) -> None:
    request, _ = system.start_request()
    assert system.one(Variable(request, 0, 1, "set", "x", b"a")).written
    log = system.bus.folder / "standby.log"
    with log.open("wb") as output:
        second = subprocess.Popen(
            [sys.executable, "-m", "tokenbus.workers.state", "--standby"],
            cwd=system.bus.folder,
            env=system.bus.environment,
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: "standing by" in log.read_text(), 120.0, "the second worker stands by")
        system.state.kill()
        assert system.one(Variable(request, 0, 2, "append", "x", b"b")).written
        assert system.one(Variable(request, 0, 3, "get", "x")).value == b"ab"
        assert system.status.pid == second.pid
        second.terminate()
        assert second.wait(300.0) == 0
    finally:
        second.kill()
        second.wait()
        system.start_state_worker()


TAKEN_OVER = """
import os, sys
from tokenbus.workers.state import __main__ as module

number = int(sys.argv.pop())

class Signalled(module.StateWorker):
    def __init__(self, settings):
        super().__init__(settings)
        os.kill(os.getpid(), number)

module.StateWorker = Signalled
sys.exit(module.main())
"""
"""Runs a state worker that receives a signal when it has just taken its folder."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_takeover_ends_the_worker_that_stood_by(
    tmp_path: Path, number: signal.Signals
) -> None:
    environment = clean_environment(run_dir=str(tmp_path))
    command = [sys.executable, "-c", TAKEN_OVER, "--standby", str(int(number))]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"stopping: {number.name}".encode() in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_and_the_next_worker_has_its_variables(
    system: System, number: signal.Signals
) -> None:
    request, _ = system.start_request()
    assert system.one(Variable(request, 0, 1, "set", "x", b"a")).written
    system.state.send(number)
    assert system.state.wait() == 0
    system.start_state_worker()
    assert system.one(Variable(request, 0, 2, "get", "x")).value == b"a"


def test_a_wrong_setting_is_refused_by_name(tmp_path: Path) -> None:
    environment = clean_environment(log_level="loud")
    process = Process("tokenbus.workers.state", tmp_path / "log", environment)
    assert process.wait() == 2
    assert "tokenbus state worker: TOKENBUS_LOG_LEVEL" in process.log
