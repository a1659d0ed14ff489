"""Guests in processes make the same decisions as guests on threads, even if their processes end at
any time."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wasmtime
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.guest_memory import GuestMemory
from tokenbus.workers.controller.guests import process as process_module
from tokenbus.workers.controller.guests.process import GuestProcess
from tokenbus.workers.controller.guests.remote import RemoteController
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.wasm.compiled_modules import Loaded
from tokenbus.workers.variables import VariableStorage

from ....processes import until
from ..played import EOS, WORDS, Run, Steered, engine, program
from ..wasm.guests import SDK, compile_guest
from .remote_guests import CALM, Runtime, Sequence, running, stop

pytestmark = pytest.mark.process

TALK = """
#include "tokenbus.h"
#pragma clang diagnostic ignored "-Wunused-parameter"
static uint32_t *mask;
static uint32_t rounds;
void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    mask = tb_mask_new();
}
tb_answer tb_pre_process(void) {
    static bool forked;
    tb_var_append("rounds", "x", 1);
    if (++rounds == 2 && !forked) return forked = true, tb_fork(3);
    if (rounds == 5 && tb_seq_id() == 0) {
        tb_bytes value = {0};
        if (!tb_var_get("said", &value, 0)) return rounds--, tb_suspend();
        tb_tokens said = tb_tokenize((const char *)value.data, value.len);
        tb_log("said %d", (int)said.n);
        return tb_append(said.ids, said.n);
    }
    if (rounds == 6 && tb_seq_id() == 2) tb_var_set("said", "the cat", 7);
    return rounds == 9 ? tb_stop() : tb_go_on();
}
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    tb_mask_clear_all(mask);
    for (uint32_t token = 1; token < tb_vocab_size(); token++)
        if ((token + rounds + tb_seq_id()) % 3 == 0) tb_mask_set(mask, token);
    return tb_sample(mask);
}
"""
"""A guest that forks into three sequences, whose masks depend on their rounds. One sequence waits
for a variable, and appends its value."""
READS = """
#include "tokenbus.h"
tb_answer tb_pre_process(void) {
    tb_var_append("rounds", "x", 1);
    return tb_go_on();
}
"""
ASKS = """
#include "tokenbus.h"
tb_answer tb_pre_process(void) {
    for (int i = 0; i < 9; i++) tb_var_append("asked", "x", 1);
    return tb_go_on();
}
"""
BIAS = """
#include "tokenbus.h"
#pragma clang diagnostic ignored "-Wunused-parameter"
static uint32_t rounds;
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    tb_bias *bias = tb_bias_new();
    if (++rounds % 2) tb_bias_values(bias);
    tb_bias_set(bias, 7, 1.5f * rounds);
    tb_bias_set(bias, 3, -1.0f);
    return tb_sample_bias(0, bias);
}
"""
"""A guest that returns dense and sparse biases in turn."""
LOOPS = """
#include "tokenbus.h"
static volatile uint32_t rounds;
tb_answer tb_pre_process(void) {
    if (++rounds == 3) for (;;) rounds = 3;
    return tb_go_on();
}
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with running() as made:
        yield made


def smallest(_seq: int, _tokens: list[int], may: set[int]) -> int:
    return min(may - {EOS})


def seen(run: Run) -> tuple[object, ...]:
    return run.tokens, run.logs, run.ended, run.sampled, run.dropped


SOURCES: dict[str, str | Path] = {
    "talk": TALK,
    "calm": CALM,
    "reads": READS,
    "backtrack": SDK / "examples/backtrack.c",
    "upper4": SDK / "examples/upper4.c",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_request_has_the_tokens_that_it_has_on_a_thread(runtime: Runtime, name: str) -> None:
    source = SOURCES[name]
    made = Run(runtime.program(source, module=name), WORDS, smallest, "x", max_tokens=30)
    assert seen(made) == seen(Run(program(source), WORDS, smallest, "x", max_tokens=30))


@pytest.mark.parametrize("name", SOURCES)
def test_a_request_is_the_same_after_each_of_its_processes_was_killed(
    runtime: Runtime, name: str
) -> None:
    source, calls = SOURCES[name], 0

    def killing(seq: int, tokens: list[int], may: set[int]) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            runtime.kill()
        return smallest(seq, tokens, may)

    made = Run(runtime.program(source, "killed", name), WORDS, killing, "x", max_tokens=30)
    assert seen(made) == seen(Run(program(source), WORDS, smallest, "x", max_tokens=30))


def test_the_parent_of_all_processes_is_started_again(runtime: Runtime) -> None:
    def killing(seq: int, tokens: list[int], may: set[int]) -> int:
        if len(tokens) == 4:
            os.kill(runtime.table._launcher.pid, signal.SIGKILL)
        return smallest(seq, tokens, may)

    made = Run(runtime.program(CALM), WORDS, killing, max_tokens=9)
    assert made.tokens == {0: list(range(1, 10))}


def test_biases_arrive_as_on_a_thread(runtime: Runtime) -> None:
    many = [*WORDS, *(f"word {n}".encode() for n in range(3_000))]
    for tokens in (WORDS, many):
        made = (runtime.program(BIAS, "bias", "bias"), program(BIAS))
        results = []
        for each in made:
            steered = Steered(each, tokens)
            steered.begin([1])
            mask, found = memoryview(bytearray(4 * -(-len(tokens) // 32))), []
            for _ in range(4):
                assert steered.controller.pre_process().action is Action.CONTINUE
                bias = steered.controller.mid_process((0,), mask).bias
                assert bias is not None
                found.append(bias.encoded())
                assert steered.controller.post_process([5], 0).action is Action.CONTINUE
            results.append(found)
        assert results[0] == results[1]


# --- calls one by one -----------------------------------------------------------------------------


def batched(*sequences: Sequence) -> Callable[[], list[bool]]:
    """The call that runs the rounds of some sequences in a batch."""
    batches, turns = set(), []
    for each in sequences:
        assert isinstance(each.controller, RemoteController)
        # A sequence whose last round was slow on a busy machine would not join the batch.
        each.controller._slow = False
        found = each.controller.batch(5)
        assert found is not None
        batches.add(found[0])
        turns.append((found[1], 5))
    [batch] = batches
    return lambda: batch.rounds(turns, [each.mask for each in sequences])


def all_usual(*sequences: Sequence) -> bool:
    """Runs a round of each sequence in a batch; returns whether the batch completed all rounds. A
    round that it did not complete runs alone."""
    done = batched(*sequences)()
    for each, over in zip(sequences, done, strict=True):
        if not over:
            each.round()
    return all(done)


def test_a_batch_writes_the_masks_of_its_rounds(runtime: Runtime) -> None:
    made = runtime.program(CALM)
    one, two = Sequence(made), Sequence(made)
    two.round()
    until(lambda: all_usual(one, two), 60, "a batch whose rounds are all quick")
    assert two.allowed()[0] == one.allowed()[0] + 1
    rounds = one.allowed()[0]
    one.round()
    assert one.allowed() == [rounds + 1]


def test_the_rounds_of_a_batch_whose_process_ends_run_again(runtime: Runtime) -> None:
    made = runtime.program(CALM, "batch")
    one, two = Sequence(made), Sequence(made)
    pid = stop(one)
    done: list[bool] = []
    run = batched(one, two)
    thread = threading.Thread(target=lambda: done.extend(run()))
    thread.start()
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert done == [False, False]
    one.round()
    two.round()
    assert one.allowed() == two.allowed() == [2]


def test_a_loop_is_ended_at_its_limit_and_its_process_lives(runtime: Runtime) -> None:
    made = runtime.program(LOOPS, "loops", "loops")
    calm = Sequence(runtime.program(CALM, "loops"))
    sequence = Sequence(made)
    pids = runtime.table.pids()
    sequence.round()
    with pytest.raises(ControllerError) as caught:
        sequence.round()
    assert (caught.value.code, caught.value.message) == (
        "controller_timeout",
        "pre_process ran for longer than its 100 ms",
    )
    calm.round()
    assert runtime.table.pids() == pids


def test_a_process_that_hangs_is_killed_and_only_its_call_fails(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, hung = Sequence(runtime.program(CALM, "hung")), Sequence(runtime.program(CALM, "hung"))
    other = Sequence(runtime.program(CALM, "other"))
    before = other.controller._process  # type: ignore[attr-defined]
    stop(hung)
    monkeypatch.setattr(process_module, "MAX_WALL_S", 0.5)
    with pytest.raises(ControllerError) as caught:
        hung.round()
    assert caught.value.message == (
        "the process of the controller was ended during its call: it did not answer within 0.5 s"
    )
    monkeypatch.undo()
    calm.round()
    other.round()
    assert calm.allowed() == other.allowed() == [2]
    assert other.controller._process is before  # type: ignore[attr-defined]


def test_a_call_may_ask_as_often_as_its_time_limit_allows(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox counts the time of questions too, so only a compromised process asks more."""
    monkeypatch.setattr(process_module, "QUESTION_S", 1000.0)
    monkeypatch.setattr(process_module, "MIN_QUESTIONS", 9)
    sequence = Sequence(runtime.program(ASKS, "asks", "asks"))
    monkeypatch.setattr(process_module, "MIN_QUESTIONS", 8)
    with pytest.raises(ControllerError, match="more than 8 questions in a call"):
        sequence.round()


def test_a_process_cannot_begin_its_items_again_without_end(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = Sequence(runtime.program(CALM, "items", "items"))
    process = sequence.controller._process  # type: ignore[attr-defined]
    stop(sequence)
    monkeypatch.setattr(process_module, "MAX_WALL_S", 0.5)
    failed = threading.Event()

    def call() -> None:
        with pytest.raises(ControllerError, match="it did not answer within"):
            sequence.round()
        failed.set()

    threading.Thread(target=call, daemon=True).start()
    numbers = itertools.count(1)

    def begun_again() -> bool:
        for channel in list(process._running):
            channel.current = next(numbers)
        return failed.is_set()

    until(begun_again, 60, "the process is killed")


def test_the_second_process_that_runs_without_a_call_ends_the_sequence(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that handles SIGPROF represents a thread that was taken over."""
    sequence = Sequence(runtime.program(CALM, "idle", "idle"))

    def run_without_a_call() -> None:
        process = sequence.controller._process  # type: ignore[attr-defined]

        def runs() -> bool:
            for _ in range(100):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGPROF)
            return bool(process.dead)

        with monkeypatch.context() as patch:
            patch.setattr(process_module, "EXCESS_S", 0.02)
            until(runs, 120, "the process is killed")
        assert process.dead == "it used CPU time without a call"

    run_without_a_call()
    sequence.round()
    assert sequence.allowed() == [2]
    run_without_a_call()
    with pytest.raises(ControllerError, match="it used CPU time without a call"):
        sequence.round()


def test_a_call_whose_process_dies_once_is_made_again_and_writes_once(runtime: Runtime) -> None:
    storage, deaths = VariableStorage(), 0

    def perform(operation: Variable) -> VariableAnswer:
        nonlocal deaths
        answer = storage.apply(operation)
        if operation.count == 2 and deaths < 1:
            deaths += 1
            runtime.kill()
        return answer

    sequence = Sequence(runtime.program(READS, "once", "once"), perform)
    sequence.round()
    sequence.round()
    assert deaths == 1
    assert storage.apply(Variable(1, 9, 1, "get", "rounds")).value == b"xxx"
    assert len(sequence.variables.take_writes()) == 3


def test_processes_that_another_party_kills_do_not_count(runtime: Runtime) -> None:
    storage, kills = VariableStorage(), 0

    def perform(operation: Variable) -> VariableAnswer:
        nonlocal kills
        if operation.count == 2 and kills < 2:
            kills += 1
            runtime.kill()
        return storage.apply(operation)

    sequence = Sequence(runtime.program(READS, "others", "others"), perform)
    sequence.round()
    assert kills == 2
    assert ("others", "others") not in runtime.table.deaths._times


def test_a_call_that_ends_two_processes_ends_with_an_error(runtime: Runtime) -> None:
    storage = VariableStorage()

    def perform(operation: Variable) -> VariableAnswer:
        answer = storage.apply(operation)
        if operation.count == 2:
            # This signal ends all threads at once. After a signal that writes a core dump, the
            # thread of the call may run on until the main thread is scheduled.
            runtime.kill(signal.SIGUSR1)
        return answer

    sequence = Sequence(runtime.program(READS, "twice", "twice"), perform)
    with pytest.raises(ControllerError, match="its process was ended by SIGUSR1"):
        sequence.round()
    assert len(runtime.table.deaths._times["twice", "twice"]) == 1
    with pytest.raises(ControllerError, match="its process was ended by SIGUSR1"):
        sequence.controller.pre_process()


def test_the_modules_of_a_process_count_towards_the_memory_of_its_tenant(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, counted = GuestMemory(1024**3), []
    count_module = GuestProcess.count_module

    def noted(process: GuestProcess, module: str, size: int) -> None:
        before = memory.used
        count_module(process, module, size)
        counted.append((module, memory.used - before == size > 0))
        count_module(process, module, size)
        assert memory.used - before == size

    monkeypatch.setattr(GuestProcess, "count_module", noted)
    sequences = [
        Sequence(runtime.program(CALM, module=module), memory=memory)
        for module in ("first", "second", "first")
    ]
    assert counted == [("first", True), ("second", True)]
    runtime.kill()
    for sequence in sequences:
        sequence.controller.close()
    until(lambda: memory.used == 0, 60, "the memory of the ended process is free")


def test_a_process_that_ends_while_a_module_is_read_is_replaced() -> None:
    """Reading a module may include its compilation, which takes up to a minute."""
    compiled = wasmtime.Module(engine, compile_guest(CALM, "-Wno-unused-parameter"))
    reasons = ["it was idle"]
    with running() as runtime:

        def load() -> Loaded:
            while reasons:
                reason = reasons.pop()
                for process in list(runtime.table._processes.values()):
                    process.kill(reason)
            return Loaded("native", compiled)

        made = runtime.runtime.program("tenant", "module", load)
        Sequence(made, memory=GuestMemory(1024**3)).controller.close()
    assert not reasons
