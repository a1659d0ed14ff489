"""A state worker of several brokers drops the variables of a request when no broker has the request
any more. The worker is real, but has no connections."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from msgspec import msgpack
from tokenbus.protocol.header import Header
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.worker_messages import End, Registered, Variable, VariableAnswer
from tokenbus.workers.bus import FromBus
from tokenbus.workers.state import worker as state_worker
from tokenbus.workers.state.worker import StateWorker

REQUEST = 7
FIRST, SECOND = 0, 1
"""The links to two brokers."""

_counts = count(1)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[StateWorker]:
    back = ",".join(f"ipc://{tmp_path}/{number}.sock" for number in (FIRST, SECOND))
    worker = StateWorker(Settings(back=back, run_dir=str(tmp_path)))
    yield worker
    worker._variables.close()


def write(worker: StateWorker, link: int) -> str | None:
    """Sets a variable of the request over a link; returns the error of the answer."""
    op = Variable(REQUEST, 0, next(_counts), "set", "x", b"1")
    worker._on_messages([FromBus(b"VARIABLE", Header(REQUEST, 3), msgpack.encode(op), [], link)])
    answer = msgpack.decode(worker._bus._links[link]._outbox.pop()[2], type=VariableAnswer)
    return answer.error


def end(worker: StateWorker, link: int, **how: bool) -> None:
    body = msgpack.encode(End(requests=[REQUEST], **how))
    worker._on_messages([FromBus(b"END", Header(), body, [], link)])


def unknown(worker: StateWorker, link: int) -> None:
    """A broker answers a registration, and does not have the request."""
    answer = Registered(worker=9, heartbeat_s=1.0, expiry_s=5.0, unknown=[REQUEST])
    worker._on_messages([FromBus(b"REGISTERED", Header(), msgpack.encode(answer), [], link)])


def test_variables_stay_on_the_way_from_a_broker_that_stood_still(worker: StateWorker) -> None:
    """The lease of the state worker had ended too. So the broker could not report that the request
    continues at another broker, and does not know the request when the state worker registers."""
    assert write(worker, FIRST) is None
    unknown(worker, FIRST)
    assert write(worker, SECOND) is None


def test_variables_stay_on_the_way_if_the_broker_that_they_left_is_restarted(
    worker: StateWorker,
) -> None:
    assert write(worker, FIRST) is None
    end(worker, FIRST, elsewhere=True)
    unknown(worker, FIRST)
    assert write(worker, SECOND) is None


def test_the_end_at_the_next_broker_drops_variables_before_any_operation_there(
    worker: StateWorker,
) -> None:
    assert write(worker, FIRST) is None
    end(worker, FIRST, elsewhere=True)
    end(worker, SECOND)
    assert worker._variables.requests == []
    assert not worker._absent
    assert "has ended" in str(write(worker, SECOND))


def test_the_end_of_a_copy_drops_no_variables(worker: StateWorker) -> None:
    """The second broker was paused, and then a second copy of the request ran for this broker,
    although the client had connected to the first broker. The first broker has claimed the request
    again, and no operation has arrived since then."""
    assert write(worker, FIRST) is None
    assert write(worker, SECOND) is None
    end(worker, FIRST, elsewhere=True)
    end(worker, SECOND, detached=True)
    assert write(worker, FIRST) is None
    end(worker, FIRST)
    assert worker._variables.requests == []


def test_variables_without_a_broker_are_dropped_after_a_while(
    worker: StateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(worker, FIRST) is None
    unknown(worker, FIRST)
    worker._load()
    assert worker._variables.requests == [REQUEST]
    monkeypatch.setattr(state_worker, "ABSENT_S", -1.0)
    worker._load()
    assert worker._variables.requests == []
    assert not worker._absent


def test_variables_of_a_request_that_has_a_broker_again_are_not_dropped(
    worker: StateWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(worker, FIRST) is None
    end(worker, FIRST, elsewhere=True)
    assert write(worker, SECOND) is None
    monkeypatch.setattr(state_worker, "ABSENT_S", -1.0)
    worker._load()
    assert worker._variables.requests == [REQUEST]
    end(worker, SECOND)
    assert worker._variables.requests == []


def test_the_only_broker_drops_what_it_does_not_know(tmp_path: Path) -> None:
    worker = StateWorker(Settings(run_dir=str(tmp_path)))
    assert write(worker, FIRST) is None
    unknown(worker, FIRST)
    assert worker._variables.requests == []
    worker._variables.close()


def test_the_only_broker_ends_a_request_without_a_client(tmp_path: Path) -> None:
    worker = StateWorker(Settings(run_dir=str(tmp_path)))
    assert write(worker, FIRST) is None
    end(worker, FIRST, detached=True)
    assert worker._variables.requests == []
    worker._variables.close()
