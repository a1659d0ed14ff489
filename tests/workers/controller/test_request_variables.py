"""A request's operations on variables are answered from a copy, in the order in which the state
worker applies them. Messages that depend on an operation are sent after its confirmation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.worker_messages import Result, StepResult, Variable, VariableAnswer
from tokenbus.workers.controller import request_variables
from tokenbus.workers.controller.guest_memory import GuestMemory
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.pending_result import PendingResult
from tokenbus.workers.controller.pool import Pool, waiting
from tokenbus.workers.controller.request_variables import (
    GRANT_BYTES,
    MAX_UNCONFIRMED,
    OPERATION_BYTES,
    RequestVariables,
)
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.controller.tool_calls import GroupTools, ToolCalls
from tokenbus.workers.controller.variable_calls import (
    AGAIN_S,
    GIVE_UP_S,
    SequenceVariables,
    VariableCalls,
)
from tokenbus.workers.variables import VariableStorage

from ...processes import until
from .played import WORDS, vocabulary
from .test_pending_result import MORE, program, run_all

BOUND_S = 300.0
"""A limit in seconds that only bounds a hang."""
Op = Literal["get", "set", "append", "take", "save", "open"]


@dataclass
class State:
    """A state worker. It applies the operations of ``send`` when ``deliver`` is called."""

    storage: VariableStorage = field(default_factory=VariableStorage)
    sent: deque[tuple[Variable, Callable[[VariableAnswer], None]]] = field(default_factory=deque)
    waited: list[Variable] = field(default_factory=list)
    """The operations that ``perform`` has received."""
    delivers: bool = False
    """Whether ``flush`` delivers the operations."""
    flushed: bool = False

    def perform(self, operation: Variable) -> VariableAnswer:
        self.waited.append(operation)
        answer = self.storage.apply(operation)
        if answer.error is not None:
            raise ControllerError("controller_failed", answer.error)
        return answer

    def send(self, operation: Variable, answered: Callable[[VariableAnswer], None]) -> None:
        self.sent.append((operation, answered))

    def flush(self) -> None:
        self.flushed = True
        if self.delivers:
            self.deliver()

    def deliver(self, count: int | None = None) -> None:
        for _ in range(len(self.sent) if count is None else count):
            operation, answered = self.sent.popleft()
            answered(self.storage.apply(operation))


class Sequence:
    """The operations of one sequence of request 1."""

    def __init__(self, variables: RequestVariables, lineage: int = 0) -> None:
        self.variables = variables
        self.lineage = lineage
        self.count = 0

    def do(
        self, op: Op, name: str = "", value: bytes = b"", when: int | None = None
    ) -> VariableAnswer:
        self.count += 1
        return self.variables.perform(Variable(1, self.lineage, self.count, op, name, value, when))


def begun() -> tuple[State, RequestVariables, Sequence]:
    """A request after its first operation."""
    state = State()
    variables = RequestVariables(state)
    sequence = Sequence(variables)
    sequence.do("set", "x", b"0")
    return state, variables, sequence


def test_only_the_first_operation_waits_for_the_state_worker() -> None:
    state, variables, sequence = begun()
    assert len(state.waited) == 1
    assert sequence.do("append", "x", b"1").version == 2
    assert sequence.do("get", "x").value == b"01"
    assert not sequence.do("set", "x", b"2", 1).written
    assert len(state.waited) == 1
    assert [operation.place for operation, _ in state.sent] == [1, 2, 3]
    assert variables.waits
    state.deliver()
    assert not variables.waits
    assert state.storage.num_answers(1) == 4


def test_a_request_with_earlier_operations_waits_for_each_operation() -> None:
    state = State()
    state.storage.apply(Variable(1, 7, 1, "set", "x", b"earlier"))
    sequence = Sequence(RequestVariables(state))
    assert sequence.do("get", "x").value == b"earlier"
    assert sequence.do("get", "x").value == b"earlier"
    assert len(state.waited) == 2
    assert not state.sent


def test_a_worker_that_continues_a_request_waits_for_each_operation() -> None:
    # Another worker may still run the request, and may make its first operation later.
    state = State()
    sequence = Sequence(RequestVariables(state, moved=True))
    for _ in range(3):
        sequence.do("append", "x", b"1")
    assert [operation.place for operation in state.waited] == [None] * 3


def test_an_input_that_came_before_is_no_operation() -> None:
    state = State()
    state.storage.apply(Variable(1, 0, 1, "give", "", b"hello"))
    sequence = Sequence(RequestVariables(state))
    sequence.do("set", "x", b"1")
    sequence.do("set", "y", b"2")
    assert len(state.waited) == 1


def test_an_action_is_done_when_all_operations_before_it_are_confirmed() -> None:
    state, variables, sequence = begun()
    done: list[str] = []
    variables.when_confirmed(lambda: done.append("before"))
    assert done == ["before"]
    sequence.do("set", "x", b"1")
    sequence.do("set", "x", b"2")
    variables.when_confirmed(lambda: done.append("after two"))
    sequence.do("set", "x", b"3")
    variables.when_confirmed(lambda: done.append("after three"))
    state.deliver(1)
    assert done == ["before"]
    state.deliver(1)
    assert done == ["before", "after two"]
    state.deliver(1)
    assert done == ["before", "after two", "after three"]


def test_answers_in_another_order_confirm_nothing_too_early() -> None:
    state, variables, sequence = begun()
    done: list[int] = []
    for number in (1, 2):
        sequence.do("set", "x", b"1")
        variables.when_confirmed(partial(done.append, number))
    answers = [(answered, state.storage.apply(op)) for op, answered in state.sent]
    for answered, answer in reversed(answers):
        assert not done
        answered(answer)
    assert done == [1, 2]


def test_the_operations_after_a_lost_operation_are_applied_after_it() -> None:
    state, variables, sequence = begun()
    sequence.do("set", "x", b"1")
    sequence.do("append", "x", b"2")
    lost, after = state.sent
    refused = state.storage.apply(after[0])
    assert refused.again
    assert not variables.failure
    for operation, answered in (lost, after):
        answered(state.storage.apply(operation))
    assert not variables.waits
    assert sequence.do("get", "x").value == b"12"


def test_an_operation_that_is_sent_twice_is_confirmed_once() -> None:
    state, variables, sequence = begun()
    sequence.do("append", "x", b"1")
    operation, answered = state.sent[0]
    state.storage.apply(operation)
    answered(state.storage.apply(operation))
    assert not variables.waits
    assert not variables.failure
    state.sent.clear()
    sequence.do("append", "x", b"2")
    state.deliver()
    assert not variables.failure


def test_a_request_ends_here_after_an_operation_of_another_worker() -> None:
    failed: list[bool] = []
    state = State()
    variables = RequestVariables(state, lambda: failed.append(True))
    sequence = Sequence(variables)
    sequence.do("set", "x", b"0")
    sequence.do("set", "x", b"1")
    done: list[bool] = []
    variables.when_confirmed(lambda: done.append(True))
    state.storage.apply(Variable(1, 5, 1, "set", "x", b"of another worker"))
    state.deliver()
    assert failed == [True]
    assert "but 2 were applied" in variables.failure
    with pytest.raises(ControllerError, match="but 2 were applied"):
        sequence.do("get", "x")
    variables.when_confirmed(lambda: done.append(True))
    assert not done
    # The state worker has not applied the operation.
    assert state.storage.apply(Variable(1, 6, 1, "get", "x")).value == b"of another worker"


def test_a_request_ends_here_if_another_worker_has_done_the_same_operation_differently() -> None:
    state, variables, sequence = begun()
    state.storage.apply(Variable(1, 5, 1, "append", "x", b"1"))
    state.storage.apply(Variable(1, 0, 2, "append", "x", b"2"))
    assert sequence.do("append", "x", b"2").version == 2
    state.deliver()
    assert variables.failure


def test_a_guest_that_runs_again_gets_the_same_answers_and_sends_nothing() -> None:
    state, _, sequence = begun()
    first = sequence.do("append", "x", b"1")
    state.deliver()
    sequence.count = 0
    assert sequence.do("set", "x", b"0").repeated
    again = sequence.do("append", "x", b"1")
    assert (again.version, again.repeated) == (first.version, True)
    assert not state.sent
    sequence.do("append", "x", b"2")
    state.deliver()
    assert not sequence.variables.failure


def test_a_refused_operation_raises_at_once() -> None:
    state, variables, sequence = begun()
    with pytest.raises(ControllerError, match="a name has 1 to 256"):
        sequence.do("set", "", b"1")
    assert not state.sent
    for number in range(1000 - 1):
        sequence.do("set", f"v{number}", b"")
        state.deliver()
    with pytest.raises(ControllerError, match="no more are allowed"):
        sequence.do("set", "one more", b"")
    # The state worker stores this refusal, so it counts as an operation.
    state.deliver()
    assert not variables.failure
    sequence.do("get", "x")
    state.deliver()
    assert not variables.failure


@pytest.mark.parametrize("op", ["take", "save", "open"])
def test_an_operation_that_the_copy_cannot_do_follows_the_others(op: Op) -> None:
    state, variables, sequence = begun()
    sequence.do("set", "x", b"1")
    state.delivers = True  # From now on, ``flush`` delivers operations.
    sequence.do(op, "" if op == "take" else "c", b"")
    assert [operation.op for operation in state.waited] == ["set", op]
    sequence.do("set", "x", b"2")
    sequence.do("get", "x")
    state.deliver()
    assert not variables.failure
    assert not variables.waits
    assert state.storage.num_answers(1) == 5


def test_a_large_copy_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    state, variables, sequence = begun()
    state.delivers = True
    monkeypatch.setattr(request_variables, "MAX_COPY_BYTES", 10_000)
    for number in range(100):
        sequence.do("append", "x", b"1" * 1000)
        assert sequence.do("get", "x").version == number + 2
    assert len(state.waited) > 100
    state.deliver()
    assert not variables.failure
    assert not variables.waits


def test_a_copy_counts_towards_the_memory_of_its_tenant_while_its_request_runs() -> None:
    memory = GuestMemory(16 * GRANT_BYTES)
    state = State(delivers=True)
    variables = RequestVariables(state, memory=memory.of("ann"))
    sequence = Sequence(variables)
    for _ in range(3):
        sequence.do("append", "x", b"1" * 1000)
    assert memory.used == GRANT_BYTES
    variables.close()
    assert memory.used == 0
    # A tenant without memory has no copy, and no error.
    memory.of("ann").take(8 * GRANT_BYTES)
    variables = RequestVariables(state, memory=memory.of("ann"))
    sequence = Sequence(variables, 9)
    sequence.do("set", "x", b"1")
    sequence.do("set", "x", b"2")
    state.deliver()
    assert memory.used == 8 * GRANT_BYTES
    assert not variables.failure


def test_a_request_that_ends_during_an_operation_frees_its_copy() -> None:
    memory = GuestMemory(1 << 30)
    state = State()
    variables = RequestVariables(state, memory=memory.of("ann"))
    sequence = Sequence(variables)
    sequence.do("set", "x", b"1")
    for _ in range(MAX_UNCONFIRMED):
        sequence.do("append", "x", b"2")
    errors: list[str] = []

    def one_more() -> None:
        try:
            sequence.do("append", "x", b"3")
        except ControllerError as error:
            errors.append(error.message)

    thread = threading.Thread(target=one_more)
    thread.start()
    while not variables._turn.locked():
        pass
    assert len(state.sent) == MAX_UNCONFIRMED
    variables.close()
    thread.join(60)
    assert errors == ["the request has ended"]
    assert memory.used == 0


def test_an_operation_waits_while_many_are_not_confirmed() -> None:
    state, variables, sequence = begun()
    for _ in range(MAX_UNCONFIRMED):
        sequence.do("append", "x", b"2")
    thread = threading.Thread(target=lambda: sequence.do("append", "x", b"3"))
    thread.start()
    while not variables._turn.locked():
        pass
    assert len(state.sent) == MAX_UNCONFIRMED
    state.deliver(1)
    thread.join(60)
    assert not thread.is_alive()
    state.deliver()
    assert not variables.waits
    assert not variables.failure


@dataclass
class SlowState(State):
    """A state worker whose answers to ``perform`` arrive when ``answers`` is set. A thread of a
    pool frees its slot while it waits for an answer."""

    answers: threading.Event = field(default_factory=threading.Event)

    def perform(self, operation: Variable) -> VariableAnswer:
        with waiting():
            assert self.answers.wait(BOUND_S)
        return super().perform(operation)


@pytest.mark.parametrize("waits_for", ["first operation", "other operation", "confirmation"])
def test_an_operation_that_waits_for_a_slot_delays_no_operation_of_another_thread(
    waits_for: str,
) -> None:
    state = SlowState()
    variables = RequestVariables(state)
    sequence = Sequence(variables)
    if waits_for != "first operation":
        state.answers.set()
        sequence.do("set", "x", b"0")
        state.answers.clear()
    for _ in range(MAX_UNCONFIRMED * (waits_for == "confirmation")):
        sequence.do("append", "x", b"1")
    pool = Pool(1)
    has_slot, gives_slot, done = threading.Event(), threading.Event(), threading.Event()

    def spins() -> None:
        has_slot.set()
        assert gives_slot.wait(BOUND_S)

    def operates() -> None:
        sequence.do("take" if waits_for == "other operation" else "get", "x")
        done.set()

    pool.submit([operates, spins])
    assert has_slot.wait(BOUND_S)
    state.answers.set()
    state.deliver()
    # The first thread has its answer, and cannot continue, because ``spins`` has the only slot.
    until(lambda: pool._jobs, BOUND_S, "a thread that waits for a slot")
    answered = threading.Thread(target=Sequence(variables, 1).do, args=("get", "x"), daemon=True)
    answered.start()
    answered.join(BOUND_S)
    assert not answered.is_alive()
    assert not done.is_set()
    gives_slot.set()
    assert done.wait(BOUND_S)
    pool.close()


def test_an_action_is_done_before_later_actions_may_overtake_it() -> None:
    state, variables, sequence = begun()
    sequence.do("append", "x", b"1")
    waited = []
    variables.when_confirmed(lambda: waited.append(variables.waits))
    state.deliver()
    assert waited == [True]
    assert not variables.waits


def test_beyond_the_share_of_its_tenant_each_operation_waits_for_its_confirmation() -> None:
    shares = GuestMemory(8 * OPERATION_BYTES)
    state = State()
    variables = RequestVariables(state, unconfirmed=shares.of("ann"))
    sequence = Sequence(variables)
    sequence.do("get", "x")
    for _ in range(4):  # A single tenant may use half of the memory.
        sequence.do("append", "x", b"")
    assert len(state.sent) == 4
    assert not state.flushed
    state.delivers = True
    sequence.do("append", "x", b"")
    assert state.flushed
    assert not variables.waits
    assert shares.used == 0


def test_the_share_of_a_request_that_ends_is_free_again() -> None:
    shares = GuestMemory(1 << 20)
    state = State()
    for ends in (True, False):
        variables = RequestVariables(state, unconfirmed=shares.of("ann"))
        sequence = Sequence(variables, int(ends))
        state.storage = VariableStorage()
        sequence.do("get", "x")
        sequence.do("append", "x", b"1")
        assert shares.used == OPERATION_BYTES + 1
        if ends:
            variables.close()
        else:
            state.storage.apply(Variable(1, 5, 1, "set", "x", b"of another worker"))
            state.deliver()
            assert variables.failure
        assert shares.used == 0
        state.sent.clear()


steps = st.one_of(
    st.tuples(
        st.just("do"),
        st.integers(0, 2),
        st.sampled_from(["get", "set", "append", "take"]),
        st.sampled_from(["x", "y"]),
        st.none() | st.integers(0, 3),
    ),
    st.tuples(st.just("deliver"), st.integers(0, 3)),
    st.tuples(st.just("lose"), st.integers(0, 2)),
    st.tuples(st.just("again")),
    st.tuples(st.just("give")),
)


@given(st.lists(steps, max_size=60))
def test_any_order_of_losses_gives_the_answers_of_the_state_worker(
    history: list[Any],
) -> None:
    state = State()
    variables = RequestVariables(state)
    sequences = [Sequence(variables, lineage) for lineage in range(3)]
    wire: deque[Variable] = deque()
    open_: dict[tuple[int, int], tuple[Variable, Callable[[VariableAnswer], None]]] = {}
    told: dict[tuple[int, int], VariableAnswer] = {}
    actions: list[int] = []
    promised = 0

    def send(operation: Variable, answered: Callable[[VariableAnswer], None]) -> None:
        open_[operation.lineage, operation.count] = operation, answered
        wire.append(operation)

    def deliver(count: int) -> None:
        for operation in [wire.popleft() for _ in range(min(count, len(wire)))]:
            answer = state.storage.apply(operation)
            name = operation.lineage, operation.count
            if not answer.again and name in open_:
                open_.pop(name)[1](answer)

    def send_again() -> None:
        wire.extend(operation for operation, _ in open_.values())
        deliver(len(wire))

    state.send = send  # type: ignore[method-assign]
    state.flush = send_again  # type: ignore[method-assign]
    given_inputs = 0
    for what, *rest in history:
        match what, rest:
            case "do", [int(number), op, name, when]:
                sequence = sequences[number]
                value = b"%d" % len(told)
                answer = sequence.do(op, name, value, when)  # type: ignore[arg-type]
                told[number, sequence.count] = answer
                promised += 1
                count = len(told)

                def act(count: int = count) -> None:
                    assert state.storage.num_answers(1) >= count
                    actions.append(count)

                variables.when_confirmed(act)
            case "deliver", [int(count)]:
                deliver(count)
            case "lose", [int(place)] if place < len(wire):
                del wire[place]
            case "again", []:
                send_again()
            case "give", []:
                given_inputs += 1
                state.storage.apply(Variable(1, 0, given_inputs, "give", "", b"input"))
    send_again()
    assert not variables.failure
    assert not variables.waits
    assert actions == list(range(1, promised + 1))
    for (lineage, count), answer in told.items():
        kept = state.storage.apply(Variable(1, lineage, count, "get", "x"))
        assert kept.repeated
        assert (kept.version, kept.value, kept.written) == (
            answer.version,
            answer.value,
            answer.written,
        )


# --- messages of the worker -----------------------------------------------------------------------


def ordered_group(request: int = 1, pre: str = "") -> tuple[State, SequenceGroup, list[StepResult]]:
    state = State()
    variables = RequestVariables(state)
    group = SequenceGroup(request, 1, Limits(), b"", 50, False, variables.perform)
    group.ordered = variables
    results = group.begin(program(pre), vocabulary(WORDS), [1, 2])
    Sequence(variables, 99).do("set", "first", b"")
    return state, group, results


def result_of(frames: list[bytes]) -> Result:
    return msgspec.msgpack.decode(frames[2], type=Result)


def test_a_result_is_sent_when_the_operations_before_it_are_confirmed() -> None:
    state, group, results = ordered_group()
    _, other, others = ordered_group(2)
    assert group.ordered is not None
    sent: list[list[bytes]] = []
    Sequence(group.ordered, 5).do("set", "x", b"1")
    pending = PendingResult(1, 2, sent.append, lambda *_: None, run_all, threading.Lock())
    pending.add_all([(group, results), (other, others)])
    assert [one.request for frames in sent for one in result_of(frames).sequences] == [2]
    # The result is recorded: the sequence waits for the model.
    assert not group.running(0)
    state.deliver()
    assert [one.request for frames in sent for one in result_of(frames).sequences] == [2, 1]
    for each in (group, other):
        each.close()
        each.free()


def test_results_of_a_group_are_sent_in_their_order() -> None:
    state, group, results = ordered_group(pre=MORE)
    assert group.ordered is not None
    sent: list[list[bytes]] = []
    Sequence(group.ordered, 5).do("set", "x", b"1")

    def add(results: list[StepResult]) -> None:
        pending = PendingResult(1, 1, sent.append, lambda *_: None, run_all, threading.Lock())
        pending.add(group, results)

    add(results)
    add([StepResult(1, 0, "sample", logs="later")])
    assert not sent
    state.deliver()
    assert [result_of(frames).sequences[-1].logs for frames in sent] == ["", "later"]
    group.close()
    group.free()


def test_the_sequences_of_a_failed_request_end_with_its_error() -> None:
    state, group, results = ordered_group(pre=MORE)
    assert group.ordered is not None
    sent: list[list[bytes]] = []

    def add(results: list[StepResult]) -> None:
        pending = PendingResult(1, 1, sent.append, lambda *_: None, run_all, threading.Lock())
        pending.add(group, results)

    Sequence(group.ordered, 5).do("set", "x", b"1")
    add(results)
    state.storage.apply(Variable(1, 6, 1, "set", "x", b"of another worker"))
    stepped = group.step(0, [65], False, None)
    assert stepped is not None  # The round of sequence 0 is running.
    state.deliver()
    assert "but 2 were applied" in group.failure
    failed = group.fail()
    assert {one.seq for one in failed} == group._numbers - {0}
    add(failed)
    add(stepped[1]())
    found = [one for frames in sent for one in result_of(frames).sequences]
    assert {one.seq for one in found} == group._numbers
    assert {(one.action, one.error) for one in found} == {("error", group.failure)}
    assert group.num_sequences == 0
    group.close()
    group.free()


# --- lost operations ------------------------------------------------------------------------------


def test_all_operations_of_a_request_are_sent_again_in_their_order() -> None:
    posted: list[tuple[int, int, int]] = []
    answers: list[VariableAnswer] = []

    def post(frames: list[bytes], link: int) -> None:
        operation = msgspec.msgpack.decode(frames[2], type=Variable)
        posted.append((operation.request, operation.count, link))

    calls = VariableCalls(post)
    calls.send(Variable(1, 0, 1, "get", "x"), answers.append, 3)
    calls.send(Variable(2, 0, 1, "get", "x"), answers.append)
    first = time.monotonic()
    while time.monotonic() == first:
        pass
    calls.send(Variable(1, 0, 2, "get", "x"), answers.append, 3)
    posted.clear()
    calls._sent[0, 2, 0, 1].at_s += 10  # This operation is not overdue.
    calls.send_again(first + AGAIN_S)
    assert posted == [(1, 1, 3), (1, 2, 3)]
    # After a refusal for a temporary reason, the operation is sent again.
    again = VariableAnswer(1, 0, 1, error="the disk is full", again=True)
    calls.on_answer(msgspec.msgpack.encode(again), 3)
    assert not answers
    calls.on_answer(msgspec.msgpack.encode(VariableAnswer(1, 0, 2)), 3)
    assert answers == [VariableAnswer(1, 0, 2)]
    posted.clear()
    calls.send_again(first + GIVE_UP_S + 5)
    assert posted == [(1, 1, 3), (2, 1, 0)]
    assert [answer.error for answer in answers[1:]] == [
        "the disk is full",
        f"the state worker did not answer within {GIVE_UP_S:g} s; variables need a running state "
        "worker",
    ]
    assert not calls._sent


def test_a_request_that_has_ended_sends_nothing_again() -> None:
    posted: list[int] = []
    calls = VariableCalls(lambda frames, link: posted.append(link))
    calls.send(Variable(1, 0, 1, "get", "x"), lambda _: None)
    calls.cancel(1)
    calls.send_again(time.monotonic() + 10)
    assert posted == [0]


def test_a_tool_is_called_when_the_state_worker_has_the_mark() -> None:
    state, group, _ = ordered_group()
    assert group.ordered is not None
    sent: list[list[bytes]] = []
    tools = GroupTools(
        ToolCalls(lambda frames, link: sent.append(frames)),
        0,
        group.perform_within_quota,
        lambda store: store(),
        lambda: None,
        group.ordered.when_confirmed,
    )
    variables = SequenceVariables(1, 0, group.perform_within_quota, lambda: None)
    record = tools.begin(variables, "tool", b"{}")
    assert variables.get(record) is not None
    assert tools.waits
    assert not sent
    state.deliver(1)
    assert [frames[0] for frames in sent] == [b"CALL"]
    group.close()
    group.free()
