"""The shares of the state worker's memory that a tenant and a request may have. The worker is real,
but has no connection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from msgspec import msgpack
from tokenbus.protocol.header import Header
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.tenants import Tenant
from tokenbus.protocol.worker_messages import ModuleTable, Variable, VariableAnswer
from tokenbus.workers.bus import FromBus
from tokenbus.workers.state import worker as state_worker
from tokenbus.workers.state.worker import StateWorker
from tokenbus.workers.variables import KIB, MIB

TOTAL = 4 * MIB
"""The most memory that all variables may use on the machine of these tests, in bytes."""
ANN, BEN = Tenant("ann"), Tenant("ben")
VALUE = 50 * KIB

_counts = count(1)


def operation(request: int, tenant: Tenant | None, size: int = VALUE) -> FromBus:
    """An operation that sets a new variable to a value of this size. An attachment names the
    tenant, as in messages that the broker forwards."""
    number = next(_counts)
    op = Variable(request, 0, number, "set", f"x{number}", bytes(size))
    whose = [] if tenant is None else [tenant.encode()]
    return FromBus(b"VARIABLE", Header(request, 3, 0), msgpack.encode(op), whose)


def sent(worker: StateWorker, *messages: FromBus) -> list[VariableAnswer]:
    """Sends messages in one burst; returns the answers."""
    worker._on_messages(list(messages))
    outbox = worker._bus._links[0]._outbox
    posted = [msgpack.decode(frames[2], type=VariableAnswer) for frames in outbox]
    outbox.clear()
    return posted


def fill(worker: StateWorker, tenant: Tenant | None, requests: Iterator[int]) -> tuple[int, str]:
    """Adds variables, each for the next request, until one is refused; returns the bytes of the
    values, and the error."""
    for stored in range(0, 2 * TOTAL, VALUE):
        [answer] = sent(worker, operation(next(requests), tenant))
        if answer.error is not None:
            return stored, answer.error
    raise AssertionError("no operation was refused")


def end(worker: StateWorker, *requests: int) -> None:
    body = msgpack.encode({"requests": requests})
    worker._on_messages([FromBus(b"END", Header(0, 0, 0), body, [])])


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateWorker]:
    monkeypatch.setattr(state_worker, "machine_memory", lambda: 8 * TOTAL, raising=False)
    worker = StateWorker(Settings(run_dir=str(tmp_path)))
    yield worker
    worker._variables.close()


def test_one_tenant_gets_half_of_the_room_and_the_next_one_half_of_what_is_left(
    worker: StateWorker,
) -> None:
    numbers = count(1)
    ann, error = fill(worker, ANN, numbers)
    assert 0.4 * TOTAL < ann <= TOTAL / 2
    assert "this key's live requests" in error
    assert "try again when other requests have ended" in error
    ben, _ = fill(worker, BEN, numbers)
    assert 0.2 * TOTAL < ben <= TOTAL / 4
    # All clients without a key are one tenant.
    nobody, _ = fill(worker, None, numbers)
    assert 0.1 * TOTAL < nobody <= TOTAL / 8


def test_one_request_leaves_room_to_the_others_of_its_tenant(worker: StateWorker) -> None:
    alone, error = fill(worker, ANN, iter(lambda: 1, 0))
    assert alone <= TOTAL / 3
    assert "this request" in error
    other, _ = fill(worker, ANN, iter(lambda: 2, 0))
    assert other > TOTAL / 20


def test_the_room_of_requests_that_have_ended_is_free_again(worker: StateWorker) -> None:
    used, _ = fill(worker, ANN, count(1))
    end(worker, *range(1, 1000))
    assert fill(worker, ANN, count(1001))[0] == used


def test_a_tenant_whose_clients_have_left_takes_no_more_than_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests may be at another broker, so their variables are kept for some time."""
    monkeypatch.setattr(state_worker, "machine_memory", lambda: 8 * TOTAL, raising=False)
    back = f"ipc://{tmp_path}/0.sock,ipc://{tmp_path}/1.sock"
    worker = StateWorker(Settings(back=back, run_dir=str(tmp_path)))
    numbers = count(1)
    ann, _ = fill(worker, ANN, numbers)
    requests = worker._variables.requests
    body = msgpack.encode({"requests": requests, "detached": True})
    worker._on_messages([FromBus(b"END", Header(0, 0, 0), body, [])])
    assert list(worker._absent) == requests
    # Later clients of the tenant cannot store more.
    assert fill(worker, ANN, numbers)[0] == 0
    ben, _ = fill(worker, BEN, numbers)
    assert 0.2 * TOTAL < ben <= TOTAL / 4
    monkeypatch.setattr(state_worker, "ABSENT_S", -1.0)
    worker._load()
    assert fill(worker, BEN, numbers)[0] + ben > 0.4 * TOTAL
    assert ann > 0.4 * TOTAL
    worker._variables.close()


def test_a_quota_holds_within_one_burst(worker: StateWorker) -> None:
    quota = Tenant("ann", 20 * KIB)
    burst = [operation(request, quota, KIB) for request in range(1, 41)]
    answers = sent(worker, *burst)
    written = sum(answer.written for answer in answers)
    assert 1 <= written <= 19
    assert "the quota variable_bytes of this key is used up" in str(answers[-1].error)
    assert worker._variables.counts.bytes <= 20 * KIB


def test_a_share_holds_within_one_burst(worker: StateWorker) -> None:
    answers = sent(worker, *(operation(n, ANN) for n in range(1, 200)))
    assert 0.4 * TOTAL < VALUE * sum(answer.written for answer in answers) <= TOTAL / 2


def test_a_restart_forgets_no_tenant(worker: StateWorker, tmp_path: Path) -> None:
    numbers = count(1)
    used, _ = fill(worker, ANN, numbers)
    for _ in range(2):
        # The first restart replays operations. The second reads the log that the first has written.
        worker._variables.close()
        worker.__init__(Settings(run_dir=str(tmp_path)))  # type: ignore[misc]
        assert fill(worker, ANN, numbers)[0] == 0
    end(worker, *range(1, 1000))
    assert fill(worker, ANN, count(2001))[0] == used


def test_a_late_operation_of_a_request_that_has_ended_leaves_nothing(worker: StateWorker) -> None:
    sent(worker, operation(1, ANN))
    end(worker, 1)
    [answer] = sent(worker, operation(1, ANN))
    assert "has ended" in str(answer.error)
    assert not worker._links
    assert fill(worker, BEN, count(2))[0] > 0.4 * TOTAL


def test_the_tables_of_modules_fit_the_machine_too(worker: StateWorker) -> None:
    """All tables together get a quarter of the memory of variables, and each table at most an
    eighth of that."""
    tables = TOTAL // 4
    answers = [
        worker._variables.table(ModuleTable(n, f"tenant {n}", 0, bytes(tables // 8)))
        for n in range(1, 10)
    ]
    assert [answer.written for answer in answers] == [True] * 8 + [False]
    assert f"at most {tables} are allowed" in str(answers[-1].error)
    large = ModuleTable(100, "tenant 1", answers[0].version, bytes(tables // 8 + 1))
    assert f"at most {tables // 8} are allowed" in str(worker._variables.table(large).error)


def test_a_tenant_is_sent_as_an_attachment() -> None:
    for tenant in (Tenant("ann", 1_000), Tenant(), Tenant("ann")):
        assert Tenant.decode(tenant.encode()) == tenant
