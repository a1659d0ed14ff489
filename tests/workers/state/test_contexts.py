"""The contexts of tenants: who can open them, what a restart and a replay find, and the bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import msgpack
from tokenbus.protocol.tenants import Tenant
from tokenbus.protocol.worker_messages import ModuleTable, Variable, VariableAnswer
from tokenbus.workers.state import compaction
from tokenbus.workers.state import contexts as module
from tokenbus.workers.state.contexts import Contexts, SavedContext
from tokenbus.workers.state.durable import DurableVariables
from tokenbus.workers.state.module_tables import ModuleTables, SavedTable
from tokenbus.workers.variables import StorageLimits


@pytest.fixture
def variables(tmp_path: Path) -> Iterator[DurableVariables]:
    made = DurableVariables(tmp_path / "state")
    yield made
    made.close()


def operation(op: str, count: int, name: str = "chat", value: bytes = b"") -> Variable:
    return Variable(7, 1, count, op, name, value)  # type: ignore[arg-type]


def apply(variables: DurableVariables, key: str, *ops: Variable) -> list[VariableAnswer]:
    given = [(op, msgpack.encode(op)) for op in ops]
    return variables.apply(given, [Tenant(key)] * len(ops))


def content(answer: VariableAnswer) -> bytes | None:
    assert answer.error is None
    return (answer.value or b"") if answer.version else None


def test_only_the_tenant_opens_its_context(variables: DurableVariables) -> None:
    [saved] = apply(variables, "a", operation("save", 1, value=b"tokens"))
    assert saved.written
    assert content(*apply(variables, "a", operation("open", 2))) == b"tokens"
    for key in ("b", ""):
        other = Variable(8 + len(key), 1, 1, "open", "chat")
        assert content(*apply(variables, key, other)) is None
    assert content(*apply(variables, "a", operation("open", 3, "other"))) is None


def test_operations_of_one_burst_follow_each_other(variables: DurableVariables) -> None:
    ops = [
        operation("save", 1, value=b"1"),
        operation("open", 2),
        operation("save", 3, value=b"2"),
        operation("open", 4),
    ]
    found = apply(variables, "a", *ops)
    assert [content(found[i]) for i in (1, 3)] == [b"1", b"2"]


def test_a_repeated_operation_gets_its_first_answer(tmp_path: Path) -> None:
    """The first answer is also repeated after a restart, and after the context has changed."""
    for restart in range(3):
        variables = DurableVariables(tmp_path / "state")
        try:
            apply(variables, "a", operation("save", 1, value=b"first"))
            [opened] = apply(variables, "a", operation("open", 2))
            assert content(opened) == b"first"
            assert opened.repeated is bool(restart)
            apply(variables, "a", operation("save", 3 + restart, value=b"later"))
            assert content(*apply(variables, "a", operation("open", 10 + restart))) == b"later"
        finally:
            variables.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_context_without_room_is_not_logged_and_is_refused_again(
    tmp_path: Path, at_once: bool
) -> None:
    size, limits = 50_000, StorageLimits(request_bytes=130_000)
    opens = [operation("open", count) for count in range(2, 42)]
    variables = DurableVariables(tmp_path / "state", limits)
    apply(variables, "a", operation("save", 1, value=b"x" * size))
    before = variables.counts.log_bytes
    found: list[VariableAnswer] = []
    for ops in [opens] if at_once else [[op] for op in opens]:
        found += apply(variables, "a", *ops)
    assert [bool(answer.error) for answer in found] == [False] * 2 + [True] * 38
    assert variables.counts.log_bytes - before < 2 * size + 20_000
    variables.close()
    variables = DurableVariables(tmp_path / "state", limits)
    try:
        again = apply(variables, "a", *opens)
        assert [(a.value, a.error) for a in again] == [(f.value, f.error) for f in found]
    finally:
        variables.close()


def test_contexts_outlive_their_request_and_a_rewritten_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "SLICE", 1)
    variables = DurableVariables(tmp_path / "state", compact_floor=1)
    for count in range(1, 20):
        apply(variables, "a", operation("save", count, value=b"x" * 5000))
    apply(variables, "b", Variable(9, 1, 1, "save", "chat", b"of b"))
    variables.maintain()
    assert variables._compaction is not None
    apply(variables, "b", Variable(9, 1, 2, "save", "late", b"during the compaction"))
    while variables._compaction is not None:
        variables.maintain()
    assert variables.counts.log_bytes < 20 * 5000
    variables.end([7, 9])
    variables.close()
    variables = DurableVariables(tmp_path / "state")
    try:
        assert content(*apply(variables, "a", Variable(20, 1, 1, "open", "chat"))) == b"x" * 5000
        of_b = [Variable(21, 1, n, "open", name) for n, name in ((1, "chat"), (2, "late"))]
        assert list(map(content, apply(variables, "b", *of_b))) == [
            b"of b",
            b"during the compaction",
        ]
    finally:
        variables.close()


def test_the_log_is_rewritten_in_pieces_between_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "SLICE", 10_000)
    folder = tmp_path / "state"
    variables = DurableVariables(folder, compact_floor=1)
    counts = itertools.count(1)

    def save(name: int, value: bytes) -> None:
        [saved] = apply(variables, "a", operation("save", next(counts), str(name), value))
        assert saved.written

    try:
        for version in range(4):
            for name in range(40):
                save(name, bytes([version]) * 3000)
        version = variables.table(ModuleTable(1, "a", 0, b"first")).version
        variables.maintain()
        assert variables._compaction is not None
        assert (folder / "log.new").stat().st_size < 40 * 3000 / 2
        for name in (0, 39, 40):
            save(name, b"changed")
        variables.table(ModuleTable(2, "a", version, b"second"))
        variables.maintain()
        assert variables._compaction is not None
        save(40, b"again")
        while variables._compaction is not None:
            variables.maintain()
        save(41, b"late")
        wanted = list(variables._contexts)
        assert len(wanted) == 42
        variables.end([7])
    finally:
        variables.close()
    variables = DurableVariables(folder)
    try:
        assert list(variables._contexts) == wanted
        assert variables.table(ModuleTable(3, "a")).content == b"second"
    finally:
        variables.close()


def test_contexts_that_change_while_the_log_is_rewritten_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "SLICE", 10_000)
    folder = tmp_path / "state"
    variables = DurableVariables(folder, compact_floor=1)
    counts = itertools.count(1)
    try:
        for name in range(40):
            apply(variables, "a", operation("save", next(counts), str(name), bytes(3000)))
        while variables._compaction is None:
            apply(variables, "a", operation("save", next(counts), "39", bytes(3000)))
            variables.maintain()
        waiting = len(variables._compaction._unsaved)
        assert waiting > 30
        for _ in range(3 * waiting):
            apply(variables, "a", operation("save", next(counts), "39", bytes(3000)))
            assert len(variables._compaction._unsaved) <= waiting + 1
    finally:
        variables.close()


def test_a_refused_operation_does_not_save(tmp_path: Path) -> None:
    limits = StorageLimits(value_bytes=10)
    variables = DurableVariables(tmp_path / "state", limits)
    try:
        [answer] = apply(variables, "a", operation("save", 1, "n" * 300, b"x"))
        assert answer.error is not None
        assert content(*apply(variables, "a", operation("open", 2, "other"))) is None
        assert not list(variables._contexts)
    finally:
        variables.close()


def kept(contexts: Contexts) -> list[tuple[str, str]]:
    return [(context.tenant, context.name) for context in contexts]


@pytest.mark.parametrize(
    ("bound", "value"), [("MAX_CONTEXTS", 2), ("TENANT_BYTES", 2 * (256 + 1 + 10))]
)
def test_a_tenant_keeps_the_contexts_that_it_has_saved_last(
    monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(module, bound, value)
    contexts = Contexts(10**6, ModuleTables())
    for name in "xyxz":
        contexts.put(SavedContext("a", name, b"0123456789"))
    contexts.put(SavedContext("b", "y", b"0123456789"))
    assert kept(contexts) == [("a", "x"), ("a", "z"), ("b", "y")]
    assert contexts.bytes == sum(context.size for context in contexts)


def test_the_tenant_with_the_most_bytes_makes_room() -> None:
    contexts = Contexts(3 * 400, ModuleTables())
    for tenant, name in (("small", "s"), ("large", "1"), ("large", "2"), ("large", "3")):
        contexts.put(SavedContext(tenant, name, b"x" * 140))
    assert kept(contexts) == [("small", "s"), ("large", "2"), ("large", "3")]


def test_a_table_counts_towards_the_bytes_of_its_tenant_s_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TENANT_BYTES", 3 * 400)
    tables = ModuleTables()
    contexts = Contexts(10**6, tables)
    for tenant in "ab":
        for name in "xyz":
            contexts.put(SavedContext(tenant, name, b"x" * 140))
    tables.put(SavedTable("a", 1, 1, bytes(500)))
    contexts.make_room("a")
    assert kept(contexts) == [("a", "z"), *(("b", name) for name in "xyz")]
    refusal = contexts.refusal(SavedContext("a", "w", bytes(500)), None)
    assert refusal == "the context has 757 bytes; at most 700 are allowed"


def test_contexts_and_tables_share_their_room(tmp_path: Path) -> None:
    limits = StorageLimits(table_bytes=8000)
    variables = DurableVariables(tmp_path / "state", limits)
    try:
        for count, name in enumerate("vwxyz"):
            [saved] = apply(variables, "a", operation("save", count, name, bytes(1000)))
            assert saved.written
        for number in range(1, 5):
            assert variables.table(ModuleTable(number, f"t{number}", 0, bytes(1000))).written
        assert kept(variables._contexts) == [("a", name) for name in "xyz"]
        for number in range(5, 8):
            assert variables.table(ModuleTable(number, f"t{number}", 0, bytes(1000))).written
        [refused] = apply(variables, "a", operation("save", 9, "u", bytes(1000)))
        assert refused.error is not None
        assert "the context has 1257 bytes; next to the tables" in refused.error
        assert "1000 bytes remain for contexts; delete some modules or tags" in refused.error
    finally:
        variables.close()
    variables = DurableVariables(tmp_path / "state", limits)
    try:
        assert variables._tables.bytes == 7000
        assert kept(variables._contexts) == []
    finally:
        variables.close()


def test_a_context_counts_towards_the_quota_of_variables(variables: DurableVariables) -> None:
    op = operation("save", 1, value=bytes(5000))
    [refused] = variables.apply([(op, msgpack.encode(op))], [Tenant("a", 4000)])
    assert refused.error is not None
    assert "the context has 5260 bytes; at most 4000 are allowed" in refused.error
    for count, name in enumerate(("one", "two"), start=2):
        op = operation("save", count, name, bytes(2400))
        [saved] = variables.apply([(op, msgpack.encode(op))], [Tenant("a", 4000)])
        assert saved.error is None
    assert content(*apply(variables, "a", operation("open", 4, "one"))) is None
    assert content(*apply(variables, "a", operation("open", 5, "two"))) == bytes(2400)
