"""The bounds of the tables in memory, and the tenants whose tables are removed."""

from __future__ import annotations

import pytest
from tokenbus.workers.controller.backends.grammar import kept_tables
from tokenbus.workers.controller.backends.grammar.kept_tables import KeptTables


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tables, "MAX_KEPT_BYTES", 100)
    monkeypatch.setattr(kept_tables, "MAX_KEPT", 10)


def test_a_tenant_with_many_large_tables_evicts_only_its_own() -> None:
    kept = KeptTables()
    kept.add("ann", "hers", b"x" * 20)
    for number in range(50):
        kept.add("eve", f"{number}", b"y" * 30)
        assert kept.size <= 100
    assert kept.get("hers") == b"x" * 20
    assert [number for number in range(50) if kept.get(f"{number}")] == [48, 49]


def test_a_tenant_with_many_small_tables_evicts_only_its_own() -> None:
    kept = KeptTables()
    kept.add("ann", "hers", b"x")
    for number in range(50):
        kept.add("eve", f"{number}", b"y")
    assert kept.get("hers")
    assert sum(kept.get(f"{number}") is not None for number in range(50)) == 9


def test_a_tenant_with_many_small_tables_does_not_evict_a_large_one() -> None:
    kept = KeptTables()
    kept.add("ann", "hers", b"x" * 80)
    for number in range(20):
        kept.add("eve", f"{number}", b"y")
    assert kept.get("hers")
    assert sum(kept.get(f"{number}") is not None for number in range(20)) == 9


def test_the_least_recently_used_tables_are_evicted_first() -> None:
    kept = KeptTables()
    for name in "abc":
        kept.add("", name, b"x" * 30)
    assert kept.get("a")
    kept.add("", "d", b"x" * 30)
    assert [name for name in "abcd" if kept.get(name)] == ["a", "c", "d"]


def test_tables_that_were_added_twice_count_once() -> None:
    kept = KeptTables()
    for _ in range(5):
        kept.add("ann", "a", b"x" * 60)
    kept.add("ben", "a", b"x" * 60)
    assert kept.size == 60
    assert kept.get("a") == b"x" * 60
