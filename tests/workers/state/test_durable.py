"""The log of the variables: restarts, damage, rewriting, a full disk, the lock."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack, structs
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.state import durable
from tokenbus.workers.state.durable import SYNC_S, DurableVariables
from tokenbus.workers.state.folder import FolderError
from tokenbus.workers.state.log import HEAD, Log, Record
from tokenbus.workers.variables import KIB, MIB, StorageLimits

NAMES = ("x", "y", "ü")
SMALL = StorageLimits(value_bytes=20, name_bytes=8, variables=2, request_bytes=4000)

operations = st.builds(
    Variable,
    request=st.integers(1, 3),
    lineage=st.integers(0, 1),
    count=st.integers(0, 1000),
    op=st.sampled_from(["get", "set", "append"]),
    name=st.sampled_from(NAMES),
    value=st.binary(max_size=12),
    when_version_is=st.none() | st.integers(0, 3),
)
bursts = st.lists(st.lists(operations, min_size=1, max_size=4), max_size=12)


@contextmanager
def opened(
    folder: Path, limits: StorageLimits | None = None, compact_floor: int = 16 * MIB
) -> Iterator[DurableVariables]:
    variables = DurableVariables(folder, limits, compact_floor)
    try:
        yield variables
    finally:
        variables.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with fresh_folder() as folder:
        yield folder


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """A new folder for each test, and for each example of a property. It is in memory if possible,
    because on some disks the many calls of ``fsync`` take long."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.path.isdir(memory) else None) as path:
        yield Path(path) / "state"


def do(variables: DurableVariables, *ops: Variable) -> list[bytes]:
    """The answers to operations of one message, without the marks of first and repeated answers."""
    answers = variables.apply([(op, msgpack.encode(op)) for op in ops])
    bare = [structs.replace(answer, repeated=False, first=False) for answer in answers]
    return [msgpack.encode(answer) for answer in bare]


def one(variables: DurableVariables, op: Variable) -> VariableAnswer:
    return msgpack.decode(do(variables, op)[0], type=VariableAnswer)


def wrote(variables: DurableVariables, op: Variable) -> bool:
    answer = one(variables, op)
    assert answer.error is None
    return answer.written


def as_killed(folder: Path) -> Path:
    """A copy of the files as they are if the process is killed now."""
    return Path(shutil.copytree(folder, tempfile.mkdtemp(dir=folder.parent), dirs_exist_ok=True))


def held(variables: DurableVariables) -> tuple[int, int, int]:
    return variables.counts[:3]


def read(variables: DurableVariables) -> list[tuple[int, bytes | None]]:
    """The version and the value of every variable. A read is also an operation, so a second call
    for the same log returns the answers of the first call."""
    ops = [Variable(r, 1000, i, "get", n) for r in (1, 2, 3) for i, n in enumerate(NAMES)]
    answers = [one(variables, op) for op in ops]
    return [(answer.version, answer.value) for answer in answers]


# --- restarts -------------------------------------------------------------------------------------


@given(bursts, st.integers(0, 11))
def test_a_restart_finds_the_same_variables_and_gives_the_same_answers(
    history: list[list[Variable]], ended_after: int
) -> None:
    with fresh_folder() as folder, opened(folder, SMALL) as variables:
        answers: dict[tuple[int, int, int], tuple[Variable, bytes]] = {}
        for i, burst in enumerate(history):
            for op, answer in zip(burst, do(variables, *burst), strict=True):
                answers.setdefault((op.request, op.lineage, op.count), (op, answer))
            if i == ended_after:
                variables.end([2, 17])
        if ended_after < len(history):
            answers = {name: kept for name, kept in answers.items() if name[0] != 2}
        with opened(as_killed(folder), SMALL) as other:
            assert held(other) == held(variables)
            for op, answer in answers.values():
                assert do(other, op) == do(variables, op) == [answer]
            assert held(other) == held(variables)
            assert sorted(other.requests) == sorted(variables.requests)
            assert read(other) == read(variables)


def test_one_burst_may_hold_an_operation_twice(folder: Path) -> None:
    with opened(folder) as variables:
        op = Variable(1, 0, 1, "append", "x", b"a")
        first, second = do(variables, op, op)
        assert first == second
        assert one(variables, Variable(1, 0, 2, "get", "x")).value == b"a"
        with opened(as_killed(folder)) as other:
            assert one(other, Variable(1, 0, 3, "get", "x")).value == b"a"


def test_what_is_refused_is_not_in_the_log(folder: Path) -> None:
    with opened(folder) as variables:
        before = variables.counts.log_bytes
        assert one(variables, Variable(1, 0, 1, "set", "x", bytes(2 * MIB))).error
        assert one(variables, Variable(1, 0, 2, "get", "")).error
        assert variables.counts.log_bytes == before


def test_limits_that_were_lowered_take_nothing_back(folder: Path) -> None:
    with opened(folder) as variables:
        for i in range(20):
            assert wrote(variables, Variable(1, 0, i, "set", f"x{i}", b"a" * 100))
    for limits in (SMALL, SMALL, StorageLimits()):
        with opened(folder, limits) as variables:
            assert one(variables, Variable(1, 0, 19, "set", "x19", b"a" * 100)).written
            assert variables.counts.variables == 20
            if limits is SMALL:
                assert one(variables, Variable(1, 9, 0, "set", "y", b"a")).error


# --- damage ---------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """A history of single operations, and the state of the log after each."""

    ops: list[Variable]
    answers: list[list[bytes]]
    sizes: list[int]
    """Bytes of the log before the first operation, and after each operation."""
    counts: list[tuple[int, int, int]]


def stepped(folder: Path, ops: list[Variable]) -> Steps:
    with opened(folder) as variables:
        steps = Steps(ops, [], [variables.counts.log_bytes], [held(variables)])
        for op in ops:
            steps.answers.append(do(variables, op))
            steps.sizes.append(variables.counts.log_bytes)
            steps.counts.append(held(variables))
    return steps


def assert_only_the_tail_is_lost(folder: Path, steps: Steps, whole: int) -> None:
    """Fails if the log has lost an operation within its first ``whole`` bytes, which are
    undamaged."""
    done = sum(size <= whole for size in steps.sizes) - 1
    with opened(folder) as variables:
        assert held(variables) == steps.counts[done]
        # All operations are sent again, and have the same answers as before.
        for op, answer in zip(steps.ops, steps.answers, strict=True):
            assert do(variables, op) == answer
    with opened(folder) as variables:
        assert held(variables) == steps.counts[-1]


singles = st.lists(operations, min_size=1, max_size=12)


@given(singles, st.data())
def test_a_log_that_was_cut_anywhere_loses_only_its_tail(
    ops: list[Variable], data: st.DataObject
) -> None:
    with fresh_folder() as folder:
        steps = stepped(folder, ops)
        whole = data.draw(st.integers(steps.sizes[0], steps.sizes[-1]))
        os.truncate(folder / "log", whole)
        assert_only_the_tail_is_lost(folder, steps, whole)


@given(singles, st.data())
def test_a_log_with_damaged_bytes_is_whole_before_them(
    ops: list[Variable], data: st.DataObject
) -> None:
    with fresh_folder() as folder:
        steps = stepped(folder, ops)
        if steps.sizes[-1] == steps.sizes[0]:
            return
        content = bytearray((folder / "log").read_bytes())
        where = data.draw(st.integers(steps.sizes[0], len(content) - 1))
        for i in range(where, min(len(content), where + data.draw(st.integers(1, 4)))):
            content[i] ^= data.draw(st.integers(1, 255))
        (folder / "log").write_bytes(content)
        assert_only_the_tail_is_lost(folder, steps, where)


@given(singles, st.binary(min_size=1, max_size=40) | st.integers(1, 9000).map(bytes))
def test_garbage_behind_a_log_is_cut_off(ops: list[Variable], garbage: bytes) -> None:
    with fresh_folder() as folder:
        steps = stepped(folder, ops)
        with (folder / "log").open("ab") as file:
            file.write(garbage)
        assert_only_the_tail_is_lost(folder, steps, steps.sizes[-1])


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"not a log of ours, but something else"],
    ids=["empty", "zeros", "text"],
)
def test_a_file_that_is_no_log_is_set_aside(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / "log").write_bytes(content)
    with opened(folder) as variables:
        assert variables.requests == []
        assert wrote(variables, Variable(1, 0, 1, "set", "x", b"a"))
    assert (folder / "log.damaged").read_bytes() == content
    with opened(folder) as variables:
        assert variables.requests == [1]


def test_a_log_of_another_version_is_refused_and_left_alone(folder: Path) -> None:
    folder.mkdir()
    log = Log.create(folder / "log", StorageLimits())
    log.close()
    os.truncate(folder / "log", 0)
    log = Log.reopen(folder / "log", 0)
    log.append([Record(HEAD, 0, msgpack.encode([999, {"some": "thing"}]))])
    log.close()
    content = (folder / "log").read_bytes()
    with pytest.raises(FolderError, match="written by another version"):
        DurableVariables(folder)
    assert (folder / "log").read_bytes() == content


# --- rewriting ------------------------------------------------------------------------------------


def rewrite(variables: DurableVariables) -> None:
    """Calls ``maintain`` until there is nothing to rewrite."""
    while variables.maintain() < SYNC_S:
        pass


@given(bursts)
def test_a_log_that_was_rewritten_holds_the_same(history: list[list[Variable]]) -> None:
    with fresh_folder() as folder, opened(folder, SMALL, compact_floor=1) as variables:
        ops = [op for burst in history for op in burst]
        for i, burst in enumerate(history):
            do(variables, *burst)
            if i % 3 == 2:
                rewrite(variables)
            if i == 5:
                # Only a worker that has not restarted refuses later operations of the request.
                variables.end([1])
                history[i + 1 :] = [[op for op in b if op.request != 1] for b in history[i + 1 :]]
                ops = [op for op in ops if op.request != 1]
        with opened(as_killed(folder), SMALL) as other:
            assert held(other) == held(variables)
            for op in ops:
                assert do(other, op) == do(variables, op)
            assert read(other) == read(variables)


def test_a_long_log_gets_as_short_as_what_is_held(folder: Path) -> None:
    with opened(folder) as variables:
        for i in range(40):
            assert wrote(variables, Variable(1, 0, i, "set", "x", bytes([i]) * MIB))
        assert variables.counts.log_bytes > 40 * MIB
        rewrite(variables)
        assert variables.counts.log_bytes < MIB + 4 * KIB
        assert (folder / "log").stat().st_size == variables.counts.log_bytes
        assert not (folder / "log.new").exists()
    with opened(folder) as variables:
        assert one(variables, Variable(1, 1, 0, "get", "x")).value == bytes([39]) * MIB
        assert one(variables, Variable(1, 0, 3, "set", "x", b"")).version == 4


def test_operations_go_on_while_the_log_is_rewritten(folder: Path) -> None:
    """Each request has 600 KiB and is saved in a slice of its own. When operations arrive, some
    requests are already saved, and others are not."""
    with opened(folder, compact_floor=1) as variables:
        for request in range(1, 9):
            for i in range(3):
                op = Variable(request, 0, i, "set", "x", bytes([request, i]) * 300 * KIB)
                assert wrote(variables, op)
        kept = [do(variables, Variable(r, 0, 9, "get", "x")) for r in range(1, 9)]
        ended = {3, 6}
        rounds = 0
        while variables.maintain() < SYNC_S:
            rounds += 1
            for request in {*range(1, 9), 20 + rounds} - ended:
                assert wrote(variables, Variable(request, 1, rounds, "append", "y", b"%d" % rounds))
            if rounds == 3:
                variables.end(sorted(ended))
            with opened(as_killed(folder)) as other:
                assert held(other) == held(variables)
        assert rounds >= 5
        assert variables.counts.log_bytes < 6 * MIB
        text = b"".join(b"%d" % i for i in range(1, rounds + 1))
        with opened(as_killed(folder)) as other:
            assert held(other) == held(variables)
            for request in {*range(1, 9)} - ended:
                assert one(other, Variable(request, 2, 0, "get", "y")).value == text
                assert do(other, Variable(request, 0, 9, "get", "x")) == kept[request - 1]
            assert not ended & set(other.requests)
            assert set(range(21, 21 + rounds)) <= set(other.requests)


def test_the_log_is_rewritten_on_another_thread_than_the_operations(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rng = random.Random(1)
    with opened(folder, compact_floor=64 * KIB) as variables:
        over = threading.Event()

        def keep() -> None:
            while not over.is_set():
                over.wait(min(variables.maintain(), 0.001))

        thread = threading.Thread(target=keep)
        thread.start()
        answers = {}
        for i in itertools.count():
            if i >= 4000 and caplog.text.count("the log was rewritten") >= 3:
                break
            op = Variable(
                rng.randrange(40),
                0,
                i,
                "get" if i % 10 == 3 else "append" if i % 10 == 7 else "set",
                rng.choice(NAMES),
                rng.randbytes(rng.randrange(20_000)),
            )
            answers[i] = op, do(variables, op)
        over.set()
        thread.join()
        with opened(as_killed(folder)) as other:
            assert held(other) == held(variables)
            for op, answer in answers.values():
                assert do(other, op) == answer


def test_a_log_that_cannot_be_rewritten_goes_on_as_it_is(folder: Path) -> None:
    with opened(folder, compact_floor=1) as variables:
        (folder / "log.new").mkdir()
        for i in range(5):
            assert wrote(variables, Variable(1, 0, i, "set", "x", bytes(100 * KIB)))
            variables.maintain()
        assert variables.counts.log_bytes > 500 * KIB
        (folder / "log.new").rmdir()
        for i in range(5, 15):
            assert wrote(variables, Variable(1, 0, i, "set", "x", bytes(100 * KIB)))
            rewrite(variables)
        assert variables.counts.log_bytes < 500 * KIB
        with opened(as_killed(folder)) as other:
            assert held(other) == held(variables)


# --- the disk and the folder ----------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Makes the kernel refuse to write beyond ``size`` bytes of a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_is_refused_and_not_done(folder: Path) -> None:
    with opened(folder) as variables:
        assert wrote(variables, Variable(1, 0, 1, "set", "x", b"a"))
        size = variables.counts.log_bytes
        kept = Variable(1, 0, 1, "set", "x", b"a")
        new = Variable(1, 0, 2, "set", "x", b"b" * 200)
        with files_of_at_most(size + 100):
            old, refused = variables.apply([(op, msgpack.encode(op)) for op in (kept, new)])
            assert old.written
            assert "cannot write its log" in str(refused.error)
            assert "try again" in str(refused.error)
            assert refused.again
            # There is still room for a small operation.
            assert one(variables, Variable(1, 0, 3, "get", "x")).value == b"a"
        with opened(as_killed(folder)) as other:
            assert held(other) == held(variables)
        # When there is room again, the repeated operation is done.
        assert wrote(variables, new)
        with opened(as_killed(folder)) as other:
            assert held(other) == held(variables)
            assert one(other, Variable(1, 1, 0, "get", "x")).value == b"b" * 200


def test_a_log_whose_folder_was_deleted_is_written_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SYNC_S", 0.0)
    with opened(folder) as variables:
        assert wrote(variables, Variable(1, 0, 1, "set", "x", b"a"))
        shutil.rmtree(folder)
        # The log has no name now, but still accepts operations.
        assert wrote(variables, Variable(1, 0, 2, "append", "x", b"b"))
        variables.maintain()
        assert wrote(variables, Variable(1, 0, 3, "append", "x", b"c"))
        with opened(as_killed(folder)) as other:
            assert held(other) == held(variables)
            assert one(other, Variable(1, 1, 0, "get", "x")).value == b"abc"
        with pytest.raises(FolderError, match="in use by another state worker"):
            DurableVariables(folder)


def test_a_folder_has_one_worker_at_a_time(folder: Path) -> None:
    with opened(folder), pytest.raises(FolderError) as caught:
        DurableVariables(folder)
    assert f"{folder} is in use by another state worker, process {os.getpid()};" in str(
        caught.value
    )
    with opened(folder):
        pass


def test_nobody_else_may_read_the_variables(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with opened(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=f"cannot use the folder {tmp_path}/file"):
        DurableVariables(tmp_path / "file")
