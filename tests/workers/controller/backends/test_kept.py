"""The bounds of the tables in memory, and the tenants whose tables are removed."""

from __future__ import annotations

import pytest
from tokenbus.workers.controller.backends.compiling.kept import Kept


@pytest.fixture
def kept() -> Kept[str, bytes]:
    return Kept(10, 100)


def add(kept: Kept[str, bytes], tenant: str, key: str, tables: bytes) -> None:
    kept.add(tenant, key, tables, len(tables))


def test_a_tenant_with_many_large_tables_evicts_only_its_own(kept: Kept[str, bytes]) -> None:
    add(kept, "ann", "hers", b"x" * 20)
    for number in range(50):
        add(kept, "eve", f"{number}", b"y" * 30)
        assert kept.size <= 100
    assert kept.get("hers") == b"x" * 20
    assert [number for number in range(50) if kept.get(f"{number}")] == [48, 49]


def test_a_tenant_with_many_small_tables_evicts_only_its_own(kept: Kept[str, bytes]) -> None:
    add(kept, "ann", "hers", b"x")
    for number in range(50):
        add(kept, "eve", f"{number}", b"y")
    assert kept.get("hers")
    assert sum(kept.get(f"{number}") is not None for number in range(50)) == 9


def test_a_tenant_with_many_small_tables_does_not_evict_a_large_one(
    kept: Kept[str, bytes],
) -> None:
    add(kept, "ann", "hers", b"x" * 80)
    for number in range(20):
        add(kept, "eve", f"{number}", b"y")
    assert kept.get("hers")
    assert sum(kept.get(f"{number}") is not None for number in range(20)) == 9


def test_the_least_recently_used_tables_are_evicted_first(kept: Kept[str, bytes]) -> None:
    for name in "abc":
        add(kept, "", name, b"x" * 30)
    assert kept.get("a")
    add(kept, "", "d", b"x" * 30)
    assert [name for name in "abcd" if kept.get(name)] == ["a", "c", "d"]


def test_tables_that_were_added_twice_count_once(kept: Kept[str, bytes]) -> None:
    for _ in range(5):
        add(kept, "ann", "a", b"x" * 60)
    add(kept, "ben", "a", b"x" * 60)
    assert kept.size == 60
    assert kept.get("a") == b"x" * 60


def test_of_several_tenants_with_as_much_the_least_recently_used_loses(
    kept: Kept[str, bytes],
) -> None:
    for number in range(10):
        add(kept, f"tenant {number}", f"{number}", b"x")
    assert kept.get("0")
    add(kept, "another", "new", b"x")
    assert [number for number in range(10) if kept.get(f"{number}")] == [0, *range(2, 10)]


def test_a_value_that_was_replaced_is_not_dropped(kept: Kept[str, bytes]) -> None:
    first, second = b"first", b"second"
    add(kept, "ann", "a", first)
    add(kept, "ann", "a", second)
    kept.drop("a", first)
    assert kept.get("a") is second
    kept.drop("a", second)
    assert len(kept) == kept.size == 0
