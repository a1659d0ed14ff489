"""The tables of tenants' modules at the state worker: compare-and-set, bounds and restarts."""

from __future__ import annotations

from pathlib import Path

from msgspec import msgpack
from tokenbus.protocol.worker_messages import ModuleTable, ModuleTableAnswer, Variable
from tokenbus.workers.state.durable import DurableVariables
from tokenbus.workers.variables import StorageLimits


def test_of_two_that_know_the_same_version_one_replaces_the_table(tmp_path: Path) -> None:
    state = DurableVariables(tmp_path)
    assert state.table(ModuleTable(1, "ann")) == ModuleTableAnswer(1)
    first = state.table(ModuleTable(2, "ann", 0, b"a"))
    assert first.written
    one, two = (
        ModuleTable(n, "ann", first.version, content) for n, content in ((3, b"b"), (4, b"c"))
    )
    won = state.table(one)
    lost = state.table(two)
    assert won.written
    assert won.version > first.version
    assert (lost.written, lost.version, lost.content) == (False, won.version, b"b")
    assert state.table(ModuleTable(5, "ann", won.version)).content is None, "known version"
    assert state.table(ModuleTable(6, "ann", first.version)).content == b"b"
    assert state.table(ModuleTable(7, "ben")).version == 0, "each tenant has its own table"
    state.close()


def test_a_replacement_that_is_sent_again_is_done_once(tmp_path: Path) -> None:
    state = DurableVariables(tmp_path)
    write = ModuleTable(9, "ann", 0, b"a")
    assert state.table(write) == state.table(write)
    state.close()


def test_tables_are_there_after_a_restart_and_after_the_log_was_rewritten(tmp_path: Path) -> None:
    state = DurableVariables(tmp_path, compact_floor=1000)
    version = 0
    for number in range(1, 40):
        version = state.table(ModuleTable(number, "ann", version, bytes(100))).version
    state.table(ModuleTable(100, "", 0, b"no key"))
    op = Variable(7, 0, 1, "set", "x", b"value")
    state.apply([(op, msgpack.encode(op))])
    state.maintain()
    # This write comes while the new log is written.
    version = state.table(ModuleTable(101, "ann", version, b"last")).version
    for _ in range(10):
        state.maintain()
    assert state.counts.log_bytes < 1000
    state.close()
    again = DurableVariables(tmp_path)
    assert again.table(ModuleTable(102, "ann")).content == b"last"
    assert again.table(ModuleTable(103, "")).content == b"no key"
    assert again.requests == [7]
    next_one = again.table(ModuleTable(104, "ann", version, b"more"))
    assert next_one.written
    assert next_one.version > version
    again.close()


def test_what_is_too_large_changes_nothing_and_is_answered_with_why(tmp_path: Path) -> None:
    state = DurableVariables(tmp_path, StorageLimits(table_bytes=80))
    assert "11 bytes; at most 10" in (state.table(ModuleTable(1, "a", 0, bytes(11))).error or "")
    versions = [state.table(ModuleTable(n, f"{n}", 0, bytes(10))).version for n in range(2, 10)]
    assert "86 bytes; at most 80" in (state.table(ModuleTable(99, "b", 0, bytes(6))).error or "")
    assert state.table(ModuleTable(100, "2", versions[0], bytes(2))).written
    assert state.table(ModuleTable(101, "b", 0, bytes(6))).written
    state.close()


def test_a_table_that_is_larger_than_the_bound_may_shrink(tmp_path: Path) -> None:
    state = DurableVariables(tmp_path, StorageLimits(table_bytes=800))
    version = state.table(ModuleTable(1, "a", 0, bytes(100))).version
    state.close()
    state = DurableVariables(tmp_path, StorageLimits(table_bytes=80))
    assert "101 bytes; at most 10" in (
        state.table(ModuleTable(2, "a", version, bytes(101))).error or ""
    )
    assert state.table(ModuleTable(3, "a", version, bytes(60))).written
    state.close()


def test_a_table_has_at_most_a_mebibyte(tmp_path: Path) -> None:
    state = DurableVariables(tmp_path)
    refused = state.table(ModuleTable(1, "a", 0, bytes(2**20 + 1)))
    assert "1048577 bytes; at most 1048576" in (refused.error or "")
    state.close()
