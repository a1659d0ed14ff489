"""A RESULT is sent before the work that follows from it, even if the next STEP arrives
immediately."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache

import msgspec
import pytest
import wasmtime
from tokenbus.protocol.worker_messages import Result, StepResult
from tokenbus.workers.controller.fair_jobs import Job
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.pending_result import PendingResult
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.wasm_binary import with_exported_globals
from tokenbus.workers.variables import VariableStorage

from .played import WORDS, vocabulary
from .wasm.hostile.guests import call, guest

MORE = """(if (i32.eq (global.get $round) (i32.const 1)) (then
  (i32.store (i32.const 1056) (i32.const 2)) (return (i32.const 3))))"""
WRITES = f"(drop {call('var_set', 512, 4, 512, 1, -1, 0)})"


@cache
def program(pre: str) -> NativeProgram:
    engine = make_engine(Limits())
    return NativeProgram(engine, wasmtime.Module(engine, with_exported_globals(guest(pre=pre))))


def run_all(jobs: Iterable[Job], *, tenant: str = "") -> None:
    for job in jobs:
        job()


def begun(pre: str = "") -> tuple[SequenceGroup, list[StepResult]]:
    group = SequenceGroup(1, 1, Limits(), b"", 50, False, VariableStorage().apply)
    return group, group.begin(program(pre), vocabulary(WORDS), [1, 2])


def test_a_step_that_comes_as_soon_as_the_answer_is_sent_is_played() -> None:
    group, results = begun()
    found: list[bool] = []

    def post(frames: list[bytes]) -> None:
        # The GPU worker is so fast that its STEP arrives before post returns.
        found.append(group.step(0, [65], False, None) is not None)

    PendingResult(1, 1, post, lambda *_: None, run_all, threading.Lock()).add(group, results)
    assert found == [True]
    group.close()
    group.free()


@pytest.mark.parametrize("reads_usual", [False, True])
def test_results_that_only_sample_in_a_row_are_numbers_for_a_worker_that_reads_them(
    reads_usual: bool,
) -> None:
    group, _ = begun()
    group.reads_usual = reads_usual
    rows = [StepResult(1, 0, "sample", row=5), StepResult(1, 0, "sample", row=5, logs="a")]
    sent: list[list[bytes]] = []
    pending = PendingResult(1, 2, sent.append, lambda *_: None, run_all, threading.Lock())
    pending.add_all([(group, [row]) for row in rows])
    result = msgspec.msgpack.decode(sent[0][2], type=Result)
    assert result.usual == ([1, 0, 5] if reads_usual else [])
    assert result.sequences == (rows[1:] if reads_usual else rows)
    group.close()
    group.free()


def test_a_sequence_that_is_woken_by_an_answer_is_played_after_it_was_sent() -> None:
    # Sequence 1 suspends itself. Then sequence 0 writes a variable.
    group, results = begun(MORE + f"(if (call $seq_id) (then (return (i32.const 2)))) {WRITES}")
    done: list[str] = []

    def post(frames: list[bytes]) -> None:
        done.append("sent")

    def woken(group: SequenceGroup, rounds: list[Round], failed: list[StepResult]) -> None:
        assert not failed
        done.extend(["woken"] * len(rounds))

    PendingResult(1, 1, post, woken, run_all, threading.Lock()).add(group, results)
    steps = [group.step(seq, [65], False, None) for seq in (1, 0)]
    for stepped in steps:
        assert stepped is not None
        PendingResult(1, 1, post, woken, run_all, threading.Lock()).add(group, stepped[1]())
    assert done == ["sent", "sent", "sent", "woken"]
    group.close()
    group.free()


def test_controllers_that_are_over_are_freed_after_the_answer_was_sent() -> None:
    group, results = begun("(return (i32.const 0))")
    left: list[int] = []

    def post(frames: list[bytes]) -> None:
        left.append(len(group._unfreed))

    PendingResult(1, 1, post, lambda *_: None, run_all, threading.Lock()).add(group, results)
    assert left == [1]
    assert not group._unfreed


def test_controllers_are_freed_by_a_job_and_not_by_the_thread_that_flushes() -> None:
    group, results = begun("(return (i32.const 0))")
    group.tenant = "ann"
    jobs: dict[str, Iterable[Job]] = {}

    def submit(submitted: Iterable[Job], *, tenant: str = "") -> None:
        jobs[tenant] = submitted

    pending = PendingResult(1, 2, lambda _: None, lambda *_: None, submit, threading.Lock())
    pending.add(group, results)
    pending.flush()
    assert group.has_unfreed
    # The time to free a controller counts towards the share of its tenant.
    assert list(jobs) == ["ann"]
    run_all(jobs["ann"])
    assert not group.has_unfreed
