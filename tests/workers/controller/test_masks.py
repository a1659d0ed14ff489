"""A controller worker maps files of masks only while a request uses them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.host import allowed
from tokenbus.workers.controller.masks import MAX_REFUSED, MaskFiles, MaskRows
from tokenbus.workers.controller.python import Controller, Decision, sample
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup

from .test_sequence_group import SIZE, decides, opened, stepped

ROW_BYTES = 4 * -(-SIZE // 32)
NAME = "masks-of-the-test"


@contextmanager
def file(rows: int = 4) -> Iterator[str]:
    """The path of a file of masks, which is closed afterwards."""
    descriptor = os.memfd_create(NAME)
    try:
        os.ftruncate(descriptor, rows * ROW_BYTES)
        yield f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"
    finally:
        os.close(descriptor)


def mapped() -> int:
    """The number of files of masks that this process maps."""
    return sum(NAME in line for line in Path("/proc/self/maps").read_text().splitlines())


def masked(rows: MaskRows | None) -> SequenceGroup:
    """A group whose sequence waits for the model. Its mask has one token, and is in the file."""
    group, _ = opened(decides([], [sample({1}), sample({7})]))
    [result] = stepped(group, 5, rows=rows)
    assert result.row is not None
    group.record([result])
    return group


def test_a_file_is_unmapped_with_the_last_request_that_uses_it() -> None:
    files = MaskFiles()
    for _ in range(10):
        with file() as path:
            groups = [masked(files.get(path, 4, ROW_BYTES)) for _ in range(3)]
            assert mapped() == 1
            for group in groups:
                assert mapped() == 1
                group.close()
            assert mapped() == 0


def test_a_request_keeps_its_file_when_the_other_end_has_closed_it() -> None:
    files = MaskFiles()
    with file() as path:
        group = masked(files.get(path, 4, ROW_BYTES))
    with file() as path:
        other = masked(files.get(path, 4, ROW_BYTES))
        assert mapped() == 2
        mask = group.mask(0)
        assert mask is not None
        assert list(allowed(mask, SIZE)) == [7]
        group.close()
        assert mapped() == 1
        other.close()
    assert mapped() == 0


def test_a_file_is_mapped_until_the_last_round_of_a_request_that_ended_is_over() -> None:
    files = MaskFiles()
    entered, leave = threading.Event(), threading.Event()

    class Waits(Controller):
        posted = False

        def post_process(self, tokens: list[int], backtrack: int) -> None:
            self.posted = True

        def mid_process(self, fork_group: list[int]) -> Decision:
            if self.posted:
                entered.set()
                assert leave.wait(300)
            return sample({3})

    group, _ = opened(Waits)
    with file() as path:
        rows = files.get(path, 4, ROW_BYTES)
        found = group.step(0, [5], False, rows)
        del rows
        assert found is not None
        results: list[StepResult] = []

        def play(round_: Round) -> None:
            results.extend(round_())

        thread = threading.Thread(target=play, args=(found[1],))
        thread.start()
        assert entered.wait(300)
        group.close()
        assert mapped() == 1
        leave.set()
        thread.join(300)
        del found
        group.record(results)
        assert mapped() == 0


def test_paths_that_cannot_be_mapped_are_remembered_up_to_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = MaskFiles()
    for number in range(2 * MAX_REFUSED):
        for _ in range(2):
            assert files.get(f"/proc/1/fd/99999#{number}", 4, 4) is None
    assert len(caplog.records) == 2 * MAX_REFUSED
    assert len(files._refused) == MAX_REFUSED
