"""A controller worker that is registered with two brokers sends each message to the right
broker."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import msgpack
from tokenbus.protocol.header import Header
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.worker_messages import FetchModule, ModuleTable, ModuleTableAnswer
from tokenbus.workers.bus import FromBus
from tokenbus.workers.controller.module_calls import ModuleCalls
from tokenbus.workers.controller.worker import ControllerWorker

from ...processes import until

BOUND_S = 100.0
"""A limit in seconds that only bounds a hang."""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ControllerWorker]:
    back = ",".join(f"ipc://{tmp_path}/{number}.sock" for number in range(2))
    worker = ControllerWorker(Settings(back=back, run_dir=str(tmp_path), guest_processes=0))
    worker._bus.start = lambda: None  # type: ignore[method-assign]
    yield worker
    worker.stop("the test is over")
    assert worker.run() == 0


def tables(worker: ControllerWorker, link: int) -> list[ModuleTable]:
    """The operations on tables of modules that were sent over a link."""
    sent = list(worker._bus._links[link]._outbox)
    return [msgpack.decode(f[2], type=ModuleTable) for f in sent if f[0] == b"MODULE_TABLE"]


def answered(worker: ControllerWorker, ask: Callable[[ModuleCalls], object], links: int) -> None:
    """Starts an operation on a table, and answers it after it was sent over ``links`` links."""
    calls = worker._module_calls
    asking = threading.Thread(target=ask, args=(calls,))
    asking.start()

    def there() -> list[int]:
        return [link for link in range(2) if tables(worker, link)]

    until(lambda: len(there()) == links, BOUND_S, "the operation was sent")
    answer = ModuleTableAnswer(tables(worker, there()[0])[0].id, written=True)
    body = msgpack.encode(answer)
    calls.on_answer(FromBus(b"MODULE_TABLE_ANSWER", Header(), body, [], 1))
    asking.join(BOUND_S)
    assert not asking.is_alive()


def test_a_table_is_read_over_every_broker(worker: ControllerWorker) -> None:
    answered(worker, lambda calls: calls.table("t", 1), links=2)
    first, second = (tables(worker, link)[0] for link in range(2))
    assert first == second


def test_a_table_is_written_over_one_broker_and_then_over_the_next(
    worker: ControllerWorker,
) -> None:
    """If both brokers got the write at once, the refusal of the second write might be answered
    before the success of the first."""
    calls = worker._module_calls
    sent: list[int] = []

    def count(frames: list[bytes], turn: int) -> None:
        worker._post_once(frames, turn)
        sent.append(sum(len(tables(worker, link)) for link in range(2)))

    calls._post_once = count
    answered(worker, lambda calls: calls.table("t", 1, b"content"), links=2)
    assert sent[:2] == [1, 2]


def test_a_worker_that_is_asked_for_a_module_reads_the_file_only_to_send_it(
    worker: ControllerWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream that waits for a module repeats the question. A module may have 16 MiB."""
    store = worker._store
    assert store is not None
    wasm = b"a module"
    module = hashlib.sha256(wasm).hexdigest()
    file = store._file(module)
    file.write_bytes(wasm)
    read: list[str] = []
    own = store.own

    def own_noted(name: str) -> bytes | None:
        read.append(name)
        return own(name)

    monkeypatch.setattr(store, "own", own_noted)

    def asked(name: str, send: bool) -> list[list[bytes]]:
        body = msgpack.encode(FetchModule(module=name, send=send))
        worker._send_module(FromBus(b"FETCH_MODULE", Header(0, 7), body, [], 0))
        outbox = worker._bus._links[0]._outbox
        sent = [list(frames[3:]) for frames in outbox if frames[0] == b"MODULE_BYTES"]
        outbox.clear()
        return sent

    assert asked("0" * 64, False) == asked("0" * 64, True) == []
    assert asked(module, False) == [[]]
    assert read == []
    assert asked(module, True) == [[wasm]]
    # The other worker finds that these bytes do not match the id, and asks another machine.
    file.write_bytes(b"a changed file")
    assert asked(module, True) == [[b""]]
