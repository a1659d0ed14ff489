"""A file that several processes write at the same time is complete, and no other file remains."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from tokenbus.workers.whole_files import clear_left, write_first, write_whole


@pytest.fixture
def cleared_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears the folder, as another process would, when a file has been created but not locked."""
    lock = fcntl.flock
    calls: list[int] = []

    def flock(number: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            clear_left(tmp_path)
            assert not list(tmp_path.iterdir())
        lock(number, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("cleared_at_once")
def test_a_file_that_another_process_takes_for_left_is_written_all_the_same(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole", b"content", synced=False)
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]
    assert (tmp_path / "whole").read_bytes() == b"content"


@pytest.mark.usefixtures("cleared_at_once")
def test_the_first_content_stays(tmp_path: Path) -> None:
    write_first(tmp_path / "key", b"one")
    write_first(tmp_path / "key", b"other")
    assert [file.name for file in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").read_bytes() == b"one"
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_what_was_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    left, begun = tmp_path / ".new-left", tmp_path / ".new-begun"
    left.write_bytes(b"le")
    with begun.open("wb") as new:
        fcntl.flock(new, fcntl.LOCK_EX)
        clear_left(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [".new-begun"]
