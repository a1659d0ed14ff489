"""The module stores of several machines: one table for each tenant, and modules that are sent to
the machines that need them."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import wasmtime
from tokenbus.protocol.errors import RequestError, UnavailableError
from tokenbus.protocol.header import Header, decode_header
from tokenbus.protocol.worker_messages import FetchModule, ModuleBytes, ModuleTable
from tokenbus.workers.bus import FromBus
from tokenbus.workers.controller import module_calls
from tokenbus.workers.controller.module_calls import ModuleCalls
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.store import ModuleStore
from tokenbus.workers.state.durable import DurableVariables

from .test_store import LIMITS, module

pytestmark = pytest.mark.process

Tamper = Callable[[int, bytes], bytes]


@pytest.fixture(scope="module")
def engine() -> wasmtime.Engine:
    return make_engine(LIMITS)


class Machines:
    """Stores with separate folders, and the storage of a state worker. ``Machines`` delivers the
    messages between them."""

    def __init__(self, folder: Path, engine: wasmtime.Engine) -> None:
        self.folder = folder
        self.state: DurableVariables | None = DurableVariables(folder / "state")
        self.unanswered = 0
        """Number of operations that were sent while there was no state worker."""
        self.stores: dict[int, ModuleStore] = {}
        self.sent: list[int] = []
        """The machine that has sent a module, for each module that was sent."""
        self.tamper: Tamper = lambda machine, wasm: wasm
        self.before_write: list[Callable[[], object]] = []
        """Functions that make changes of other machines. Before each replacement of a table, the
        first function is removed and called."""
        self._engine = engine
        self._calls: dict[int, ModuleCalls] = {}

    def add(self, fetch_s: float = 30.0) -> ModuleStore:
        """Adds a machine; returns its store."""
        number = len(self.stores) + 1
        carry = partial(self._carry, number)
        calls = ModuleCalls(carry, lambda frames, turn: carry(frames), fetch_s, 0.02)
        self._calls[number] = calls
        folder = self.folder / f"machine{number}"
        self.stores[number] = ModuleStore(folder, LIMITS, self._engine, calls)
        return self.stores[number]

    def restart_state(self) -> None:
        """Closes the storage, and opens it again from its log."""
        assert self.state is not None
        self.state.close()
        self.state = DurableVariables(self.folder / "state")

    def _carry(self, sender: int, frames: list[bytes]) -> None:
        answer = partial(self._answer, sender)
        if frames[0] == b"MODULE_TABLE":
            if self.state is None:
                self.unanswered += 1
                return
            op = msgspec.msgpack.decode(frames[2], type=ModuleTable)
            if op.content is not None and self.before_write:
                first, *rest = self.before_write
                self.before_write = []
                first()
                self.before_write = rest
            answer(b"MODULE_TABLE_ANSWER", 0, self.state.table(op))
            return
        asked = msgspec.msgpack.decode(frames[2], type=FetchModule)
        to = decode_header(frames[1]).address
        for number in [to] if to else [n for n in self.stores if n != sender]:
            wasm = self.stores[number].own(asked.module)
            if wasm is not None:
                sent = [self.tamper(number, wasm)] if asked.send else []
                self.sent += [number] * len(sent)
                answer(b"MODULE_BYTES", number, ModuleBytes(module=asked.module), *sent)

    def _answer(self, to: int, kind: bytes, sender: int, body: object, *attached: bytes) -> None:
        message = FromBus(kind, Header(0, sender), msgspec.msgpack.encode(body), list(attached))
        self._calls[to].on_answer(message)


@pytest.fixture
def machines(tmp_path: Path, engine: wasmtime.Engine) -> Iterator[Machines]:
    machines = Machines(tmp_path, engine)
    yield machines
    if machines.state is not None:
        machines.state.close()


def test_what_was_uploaded_at_one_machine_runs_at_another_and_stays_there(
    machines: Machines,
) -> None:
    one, two = machines.add(), machines.add()
    stored = one.put("anna", module(1), "best")
    for _ in range(2):
        assert two.load(two.resolve("anna", "best")).abi == "native"
    assert machines.sent == [1], "the module was sent once"
    assert two.own(stored.module) == module(1)
    assert two.list("anna") == one.list("anna") == [stored]
    with pytest.raises(RequestError, match="no module has been uploaded"):
        two.resolve("ben", "best")


def test_a_tag_names_the_same_on_all_machines_at_once_and_after_a_restart(
    machines: Machines,
) -> None:
    one, two = machines.add(), machines.add()
    first, second = one.put("anna", module(1), "t").module, two.put("anna", module(2)).module
    assert two.resolve("anna", "t") == first
    two.tag("anna", second[:8], ["t"])
    assert one.resolve("anna", "t") == second
    machines.restart_state()
    assert one.resolve("anna", "t") == second
    one.delete("anna", "t")
    with pytest.raises(RequestError, match="unknown controller 't'"):
        two.resolve("anna", "t")


def test_a_module_that_was_deleted_elsewhere_goes_here_too(machines: Machines) -> None:
    one, two = machines.add(), machines.add()
    name = one.put("anna", module(1)).module
    one.put("anna", module(2))
    two.load(two.resolve("anna", name))
    one.delete("anna", name)
    assert one.own(name) is None
    with pytest.raises(RequestError, match="unknown controller"):
        two.resolve("anna", name)
    assert two.own(name) is None


def test_modules_that_were_deleted_elsewhere_are_looked_for_once_in_each_table(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of all tenants wait meanwhile."""
    here, there = machines.add(), machines.add()
    here.put("ben", module(9))
    names = [there.put("ann", module(number)).module for number in range(3)]
    for name in names:
        assert here.wasm(here.resolve("ann", name)) is not None
    for name in names:
        there.delete("ann", name)
    read, read_bytes = Counter[Path](), Path.read_bytes

    def noted(file: Path) -> bytes:
        read[file] += 1
        return read_bytes(file)

    monkeypatch.setattr(Path, "read_bytes", noted)
    assert here.list("ann") == []
    assert read[here._copies._file("ben")] == 1
    assert not any(here._file(name).exists() for name in names)
    assert len(here.list("ben")) == 1


def test_of_two_that_assign_a_tag_at_the_same_time_one_wins_and_the_other_is_told(
    machines: Machines,
) -> None:
    one, two = machines.add(), machines.add()
    first, second = (one.put("anna", module(n)).module for n in (1, 2))
    machines.before_write.append(lambda: two.tag("anna", second, ["t"]))
    says = f"the tag 't' was assigned to the module {second} while this change was made"
    with pytest.raises(RequestError, match=says) as caught:
        one.tag("anna", first, ["t", "other"])
    assert (caught.value.code, caught.value.path) == ("conflict", "$.tags")
    for store in (one, two):
        assert store.resolve("anna", "t") == second
        assert {m.module: m.tags for m in store.list("anna")} == {first: [], second: ["t"]}


def test_an_upload_that_loses_its_tag_to_another_is_not_stored(machines: Machines) -> None:
    one, two = machines.add(), machines.add()
    machines.before_write.append(lambda: two.put("anna", module(2), "t"))
    with pytest.raises(RequestError, match="the tag 't' was assigned"):
        one.put("anna", module(1), "t")
    [left] = one.list("anna")
    assert left.tags == ["t"]
    assert one.own(hashlib.sha256(module(1)).hexdigest()) is None


def test_changes_of_others_that_concern_no_tag_of_it_do_not_disturb_a_change(
    machines: Machines,
) -> None:
    one, two = machines.add(), machines.add()
    name = one.put("anna", module(1), "t").module
    machines.before_write += [
        lambda: two.tag("anna", name, ["x"]),
        lambda: two.tag("anna", name, ["y"]),
        # This change assigns the same tag as the change under test.
        lambda: two.tag("anna", name, ["z"]),
    ]
    assert one.tag("anna", name, ["z"]).tags == ["t", "x", "y", "z"]


def test_other_bytes_than_the_id_says_are_refused_and_another_machine_is_chosen(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = machines.add(), machines.add(), machines.add()
    name = one.put("anna", module(1)).module
    two.load(two.resolve("anna", name))
    bad: list[int] = []

    def tamper(machine: int, wasm: bytes) -> bytes:
        if not bad:
            bad.append(machine)  # Only the first machine sends wrong bytes.
        return module(9) if machine in bad else wasm

    machines.tamper = tamper
    assert three.wasm(three.resolve("anna", name)) == module(1)
    assert "sent bytes that do not match the id of the module" in caplog.text
    assert three.own(name) == module(1)


def test_bytes_that_nobody_has_right_are_an_error_that_says_what_to_do(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fetch ends after 20 looks at this clock, however long the machine takes for them.
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.01 * next(looks))
    monkeypatch.setattr(module_calls, "time", clock)
    one, two = machines.add(), machines.add(fetch_s=0.2)
    name = one.put("anna", module(1)).module
    machines.tamper = lambda machine, wasm: wasm[:-1]
    with pytest.raises(UnavailableError, match="1 sent bytes that do not match its id") as caught:
        two.load(two.resolve("anna", name))
    assert caught.value.retry_after_s
    assert two.own(name) is None
    del machines.stores[1]
    says = "and the other controller workers did not send it within 0.2 s; start the worker"
    with pytest.raises(UnavailableError, match=says):
        two.load(two.resolve("anna", name))


def test_without_a_state_worker_what_is_known_runs_and_nothing_can_be_tagged(
    machines: Machines,
) -> None:
    one = machines.add()
    name = one.put("anna", module(1), "t").module
    assert machines.state is not None
    machines.state.close()
    machines.state = None
    assert one.resolve("anna", name) == name
    assert one.resolve("anna", "t") == name
    for act in (lambda: one.resolve("anna", "other"), lambda: one.tag("anna", name, ["t"])):
        with pytest.raises(
            UnavailableError, match=r"the state worker, .*, did not answer within 30"
        ):
            act()


def test_only_the_first_stream_waits_in_full_for_a_state_worker_that_is_away(
    machines: Machines,
) -> None:
    one, two = machines.add(), machines.add()
    first, second = one.put("anna", module(1), "t").module, one.put("anna", module(2)).module
    state, machines.state = machines.state, None
    asked: list[int] = []

    def resolve() -> str:
        before = machines.unanswered
        named = one.resolve("anna", "t")
        asked.append(machines.unanswered - before)
        return named

    assert [resolve() for _ in range(3)] == [first] * 3
    assert asked[0] > 10 * asked[1] > 0
    assert asked[1] == asked[2]
    machines.state = state
    two.tag("anna", second, ["t"])
    assert resolve() == second
    machines.state = None
    assert resolve() == second
    assert asked[3:] == [0, asked[0]], "after an answer, the store waits again"
    machines.state = state


def test_what_an_earlier_release_kept_in_the_folder_is_given_to_the_state_worker(
    machines: Machines, engine: wasmtime.Engine
) -> None:
    folder = machines.folder / "machine1"
    alone = ModuleStore(folder, LIMITS, engine)
    stored = alone.put("anna", module(1), "t")
    assert machines.add().list("anna") == [stored]
    two = machines.add()
    assert two.resolve("anna", "t") == stored.module
    assert two.load(stored.module).abi == "native"


def test_a_state_worker_that_has_lost_its_folder_gets_the_tables_back(machines: Machines) -> None:
    one = machines.add()
    stored = one.put("anna", module(1), "t")
    assert machines.state is not None
    machines.state.close()
    machines.state = DurableVariables(machines.folder / "another")
    assert one.list("anna") == [stored]
    assert machines.add().resolve("anna", "t") == stored.module
