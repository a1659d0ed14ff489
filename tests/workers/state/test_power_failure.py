"""A table whose write was answered is on the disk at every moment, even if a file operation fails.

The worker syncs a write of a table of modules before it answers the write. The disk of these tests
records what a power failure would leave (``disk.py``). Every image of the disk is opened as the
next worker would open it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import msgpack
from tokenbus.protocol.worker_messages import ModuleTable, Variable
from tokenbus.workers.state import compaction, durable
from tokenbus.workers.state.durable import SYNC_S, DurableVariables

from .disk import Disk, disk_of
from .test_durable import as_killed, files_of_at_most, fresh_folder, opened, rewrite

SLICE = 1000
"""Bytes that a compaction saves at a time in these tests."""


class Tables:
    """A client of the tables, which writes them and records which writes were answered as done."""

    def __init__(self, variables: DurableVariables) -> None:
        self.variables = variables
        self.durable: dict[str, list[bytes]] = {}
        """For each tenant: the content that was last answered as done, and the contents that were
        sent later. After a power failure, the table may have any of these."""
        self.refused: list[str] = []
        self._versions: dict[str, int] = {}
        self._ids = 0

    def write(self, tenant: str, content: bytes) -> bool:
        """Replaces a table; returns whether the write was answered as done."""
        self._ids += 1
        if tenant in self.durable:
            self.durable[tenant].append(content)
        op = ModuleTable(self._ids, tenant, self._versions.get(tenant, 0), content)
        answer = self.variables.table(op)
        if not answer.written:
            self.refused.append(answer.error or "")
            return False
        self._versions[tenant] = answer.version
        self.durable[tenant] = [content]
        return True


def content_of(variables: DurableVariables, tenant: str) -> bytes | None:
    """The table of a tenant."""
    return variables.table(ModuleTable(1 << 40, tenant)).content


def assert_all_is_on_the_disk(disk: Disk, tables: Tables) -> None:
    """Fails unless every image of the disk has the tables that were answered as done."""
    for image in disk.images():
        with fresh_folder() as place:
            place.mkdir()
            for name, content in image.items():
                (place / name).write_bytes(content)
            with opened(place) as variables:
                for tenant, contents in tables.durable.items():
                    assert content_of(variables, tenant) in contents


def fill(variables: DurableVariables, request: int) -> None:
    """Writes a variable of a request ten times, so that the log grows. The variable's value is
    larger than a slice of a compaction."""
    ops = [Variable(request, 0, i, "set", "x", bytes([request, i]) * SLICE) for i in range(10)]
    variables.apply([(op, msgpack.encode(op)) for op in ops])


def history(variables: DurableVariables, tables: Tables, check: Callable[[], None]) -> None:
    """Writes tables and variables while the log is rewritten twice."""
    for first in (1, 11):
        for request in range(first, first + 3):
            fill(variables, request)
        tables.write("ann", b"%d before" % first)
        check()
        for step in range(8):
            wait = variables.maintain()
            tables.write("ann" if step % 2 else "ben", b"%d at %d" % (first, step))
            check()
            if wait >= SYNC_S:
                break
        variables.end([first])
        tables.write("cid", b"%d after" % first)
        check()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(compaction, "SLICE", SLICE)
    with fresh_folder() as folder:
        folder.mkdir()
        yield folder


def test_a_table_that_was_answered_is_on_the_disk_at_every_moment(folder: Path) -> None:
    with disk_of(folder) as disk, opened(folder, compact_floor=1) as variables:
        tables = Tables(variables)
        disk.after = lambda call, name: assert_all_is_on_the_disk(disk, tables)
        history(variables, tables, lambda: assert_all_is_on_the_disk(disk, tables))
        assert not tables.refused
        assert disk.calls.count(("rename", "log.new")) >= 2


def test_a_table_written_while_the_new_log_is_synced_is_on_the_disk(folder: Path) -> None:
    """The new log is synced without the lock, so that operations do not wait for it."""
    with disk_of(folder) as disk, opened(folder, compact_floor=1) as variables:
        tables = Tables(variables)
        fill(variables, 1)
        assert tables.write("ann", b"before")
        done = threading.Event()

        def write_meanwhile(call: str, name: str) -> None:
            if (call, name) == ("sync", "log.new") and not done.is_set():
                done.set()
                thread = threading.Thread(target=tables.write, args=("ann", b"meanwhile"))
                thread.start()
                thread.join(300.0)
                assert not thread.is_alive(), "the lock is held while the new log is synced"
            elif call == "rename":
                assert_all_is_on_the_disk(disk, tables)

        disk.after = write_meanwhile
        rewrite(variables)
        assert done.is_set()
        assert tables.durable == {"ann": [b"meanwhile"]}
        assert_all_is_on_the_disk(disk, tables)


def test_a_sync_that_fails_is_an_error_for_its_caller(folder: Path) -> None:
    with disk_of(folder) as disk, opened(folder) as variables:
        tables = Tables(variables)
        assert tables.write("ann", b"first")
        disk.fails = lambda _, call, name: (call, name) == ("sync", "log")
        assert not tables.write("ann", b"second")
        assert "cannot write its log" in tables.refused[-1]
        assert content_of(variables, "ann") == b"first"
        assert_all_is_on_the_disk(disk, tables)


def test_a_log_whose_sync_has_failed_answers_nothing_until_it_is_written_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel forgets the pages that it could not write, so a later sync succeeds without
    them."""
    monkeypatch.setattr(durable, "SYNC_S", 0.0)
    with disk_of(folder) as disk, opened(folder) as variables:
        tables = Tables(variables)
        fill(variables, 1)
        disk.fails = lambda _, call, name: call == "sync"
        variables.maintain()
        disk.fails = lambda *_: False
        assert not tables.write("ann", b"too early")
        op = Variable(1, 0, 99, "set", "x", b"too early")
        [answer] = variables.apply([(op, msgpack.encode(op))])
        assert answer.again
        assert "cannot write its log" in str(answer.error)
        written_anew(variables, disk)
        assert tables.write("ann", b"now")
        assert variables.apply([(op, msgpack.encode(op))])[0].written
        assert_all_is_on_the_disk(disk, tables)


def test_the_log_of_a_killed_worker_is_on_the_disk_before_the_next_one_answers(
    folder: Path,
) -> None:
    """The disk of this test treats all files of the killed worker as written but not synced."""
    with opened(folder) as variables:
        assert Tables(variables).write("ann", b"written")
        copy = as_killed(folder)
    with disk_of(copy) as disk, opened(copy) as variables:
        assert content_of(variables, "ann") == b"written"
        for image in disk.images():
            assert b"written" in image["log"]


def test_a_worker_that_starts_on_a_full_disk_reads_its_log_and_does_nothing_yet(
    folder: Path,
) -> None:
    with opened(folder) as variables:
        assert Tables(variables).write("ann", b"written")
        fill(variables, 1)
    with files_of_at_most(10):
        variables = DurableVariables(folder)
    try:
        tables = Tables(variables)
        assert content_of(variables, "ann") == b"written"
        assert variables.requests == [1]
        assert not tables.write("ben", b"too early")
        assert "File too large" in tables.refused[-1]
        variables.maintain()
        assert tables.write("ben", b"now")
        copy = as_killed(folder)
    finally:
        variables.close()
    with opened(copy) as variables:
        assert [content_of(variables, tenant) for tenant in ("ann", "ben")] == [b"written", b"now"]
        assert variables.requests == [1]


@pytest.mark.parametrize("deleted", ["", "log"], ids=["the folder", "the log"])
def test_a_table_is_not_answered_as_durable_without_its_file(
    folder: Path, deleted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SYNC_S", 0.0)
    with opened(folder) as variables:
        tables = Tables(variables)
        assert tables.write("ann", b"before")
        if deleted:
            (folder / deleted).unlink()
        else:
            shutil.rmtree(folder)
        assert not tables.write("ann", b"nowhere")
        variables.maintain()
        assert tables.write("ann", b"after")
        with opened(as_killed(folder)) as other:
            assert content_of(other, "ann") == b"after"


def written_anew(variables: DurableVariables, disk: Disk) -> None:
    """Calls ``maintain`` until the log has been rewritten."""
    renamed = disk.calls.count(("rename", "log.new"))
    for _ in range(100):
        variables.maintain()
        if disk.calls.count(("rename", "log.new")) > renamed:
            return
    raise AssertionError("the log was not rewritten")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", ["write", "sync", "rename"])
def test_whichever_call_fails_nothing_is_lost_that_was_answered(
    folder: Path, kind: str, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write, sync or rename that ``history`` causes fails in turn: only this call, or all
    later calls of its kind too."""
    monkeypatch.setattr(durable, "SYNC_S", 0.0)
    with disk_of(folder) as disk, opened(folder, compact_floor=1) as variables:
        start = len(disk.calls)
        history(variables, Tables(variables), lambda: None)
        calls = disk.calls[start:]
    assert kind in {call for call, _ in calls}
    for failing, (call, _) in enumerate(calls):
        if call != kind:
            continue
        with fresh_folder() as place:
            place.mkdir()
            with disk_of(place) as disk, opened(place, compact_floor=1) as variables:
                tables = Tables(variables)
                number = len(disk.calls) + failing + 1

                def fails(n: int, call: str, name: str, at: int = number) -> bool:
                    return call == kind and (n >= at if lasting else n == at)

                disk.fails = fails
                history(variables, tables, lambda: None)
                assert_all_is_on_the_disk(disk, tables)
                disk.fails = lambda *_: False
                for _ in range(100):
                    variables.maintain()
                for tenant in ("ann", "ben", "cid"):
                    assert tables.write(tenant, b"at last")
                assert_all_is_on_the_disk(disk, tables)
