"""The local copies of tenants' tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenbus.workers.controller.wasm import table_copies
from tokenbus.workers.controller.wasm.module_table import Entry, Table, decode_table
from tokenbus.workers.controller.wasm.table_copies import TableCopies

MODULE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tables that are decoded during a test."""
    sizes: list[int] = []

    def noted(content: bytes) -> Table:
        sizes.append(len(content))
        return decode_table(content)

    monkeypatch.setattr(table_copies, "decode_table", noted)
    return sizes


def _table(tenant: str, module: str = MODULE, tag: str = "one") -> Table:
    table = Table(tenant, {module: Entry(1, 1, 1.0, "native")})
    table.assign([tag], module, "")
    return table


def test_a_table_is_decoded_only_if_it_has_changed(tmp_path: Path, decoded: list[int]) -> None:
    copies = TableCopies(tmp_path)
    copies.save(_table("ann"))
    for _ in range(5):
        assert copies.read("ann").tags == {"one": MODULE}
    assert len(decoded) == 1
    copies.save(_table("ann", tag="two"))
    assert copies.read("ann").tags == {"two": MODULE}
    assert len(decoded) == 2


def test_a_changed_table_does_not_change_the_copy(tmp_path: Path) -> None:
    copies = TableCopies(tmp_path)
    copies.save(_table("ann"))
    table = copies.read("ann")
    table.assign(["two"], MODULE, "")
    del table.modules[MODULE]
    assert copies.read("ann").tags == {"one": MODULE}
    assert list(copies.read("ann").modules) == [MODULE]


def test_only_tables_that_contain_an_id_are_decoded_to_find_its_users(
    tmp_path: Path, decoded: list[int]
) -> None:
    copies = TableCopies(tmp_path)
    for number in range(20):
        copies.save(_table(f"{number}", OTHER))
    copies.save(_table("ann", tag="x" + MODULE))
    del decoded[:]
    assert copies.use(MODULE)
    assert len(decoded) == 1
    copies.save(_table("ann", OTHER, tag="x" + MODULE))
    assert not copies.use(MODULE), "only a tag contains the id"
