"""Each operation gets an answer, whatever fails. The worker is real, but has no connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import msgpack
from tokenbus.protocol.header import Header
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.bus import FromBus
from tokenbus.workers.state.worker import StateWorker


def message(kind: bytes, body: bytes, request: int = 0) -> FromBus:
    return FromBus(kind, Header(request, 3, 0), body, [])


def operation(request: int, count: int) -> FromBus:
    body = msgpack.encode(Variable(request, 0, count, "set", "name", b"x"))
    return message(b"VARIABLE", body, request)


def answers(worker: StateWorker) -> list[VariableAnswer]:
    posted = list(worker._bus._links[0]._outbox)
    worker._bus._links[0]._outbox.clear()
    return [msgpack.decode(frames[2], type=VariableAnswer) for frames in posted]


def test_operations_that_fail_by_a_defect_are_answered_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = StateWorker(Settings(run_dir=str(tmp_path)))

    def fails(ops: Sequence[object], tenants: object) -> list[VariableAnswer]:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(worker._variables, "apply", fails)
        worker._on_messages([operation(1, 1), operation(1, 2)])
    assert [(a.count, a.error) for a in answers(worker)] == [
        (count, "the state worker failed: MemoryError('no memory left')") for count in (1, 2)
    ]
    worker._on_messages([operation(1, 3)])
    assert [(a.count, a.written) for a in answers(worker)] == [(3, True)]
    worker._variables.close()


def test_an_end_that_fails_costs_no_other_message_of_its_burst_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = StateWorker(Settings(run_dir=str(tmp_path)))

    def fails(requests: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(worker._variables, "end", fails)
    end = msgpack.encode({"requests": [9]})
    burst = [operation(1, 1), message(b"END", end), message(b"END", b"\xc1"), operation(1, 2)]
    assert worker._on_messages([*burst, message(b"DRAIN", b"\x80")])[0].type == b"DRAIN"
    assert [(a.count, a.written) for a in answers(worker)] == [(1, True), (2, True)]
    worker._variables.close()
