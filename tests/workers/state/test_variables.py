"""Operations on variables: commands, versions, repetition, isolation and quotas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack, structs
from tokenbus.protocol.messages import (
    MAX_INPUT_BYTES,
    MAX_WAITING_INPUT_BYTES,
    MAX_WAITING_INPUTS,
)
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.variables import (
    KIB,
    MIB,
    SavedRequest,
    StorageLimits,
    VariableStorage,
)

SMALL = StorageLimits(
    value_bytes=20, name_bytes=8, variables=3, request_bytes=4000, total_bytes=10_000
)

Do = Callable[..., VariableAnswer]


@pytest.fixture
def storage() -> VariableStorage:
    return VariableStorage()


@pytest.fixture
def do(storage: VariableStorage) -> Do:
    return doing(storage)


def doing(storage: VariableStorage) -> Do:
    """Does operations of request 1 and lineage 0, each with the next count, unless a test gives
    other fields."""
    counts = count(1)

    def do(op: Any, name: str, value: bytes = b"", when: int | None = None, **more: int) -> Any:
        given = {"request": 1, "lineage": 0, "count": next(counts), **more}
        return storage.apply(Variable(**given, op=op, name=name, value=value, when_version_is=when))

    return do


def seen(answer: VariableAnswer) -> tuple[int, bytes | None, bool]:
    """The version, value and ``written`` of an answer. Fails if the answer is an error."""
    assert answer.error is None
    return answer.version, answer.value, answer.written


def wrote(version: int) -> tuple[int, None, bool]:
    return version, None, True


def test_a_variable_that_is_not_there_has_version_0_and_no_value(do: Do) -> None:
    assert seen(do("get", "x")) == (0, None, False)


def test_set_replaces_and_append_adds_and_each_is_a_version(do: Do) -> None:
    assert seen(do("set", "x", b"ab")) == wrote(1)
    assert seen(do("append", "x", b"c")) == wrote(2)
    assert seen(do("get", "x")) == (2, b"abc", False)
    assert seen(do("set", "x", b"d")) == wrote(3)
    assert seen(do("get", "x")) == (3, b"d", False)


def test_append_makes_a_variable_that_is_not_there(do: Do) -> None:
    assert seen(do("append", "x", b"a")) == wrote(1)
    assert seen(do("get", "x")) == (1, b"a", False)


def test_an_empty_value_is_not_a_missing_one(do: Do) -> None:
    assert seen(do("set", "x", b"")) == wrote(1)
    assert seen(do("get", "x")) == (1, b"", False)


@pytest.mark.parametrize("op", ["set", "append"])
def test_a_write_with_the_right_version_is_made(do: Do, op: str) -> None:
    assert seen(do(op, "x", b"a", 0)) == wrote(1)
    assert seen(do(op, "x", b"b", 1)) == wrote(2)


@pytest.mark.parametrize("op", ["set", "append"])
@pytest.mark.parametrize("when", [0, 2, 99, -1])
def test_a_write_with_another_version_gives_what_get_gives(do: Do, op: str, when: int) -> None:
    do("set", "x", b"a")
    assert seen(do(op, "x", b"b", when)) == seen(do("get", "x")) == (1, b"a", False)


def test_a_write_to_a_version_of_a_missing_variable_gives_what_get_gives(do: Do) -> None:
    assert seen(do("set", "x", b"b", 1)) == seen(do("get", "x")) == (0, None, False)


def test_a_repeated_operation_gets_its_first_answer_byte_for_byte(
    storage: VariableStorage, do: Do
) -> None:
    do("append", "x", b"a", count=1)
    asked = [
        Variable(1, 0, 2, "append", "x", b"b"),
        Variable(1, 0, 3, "get", "x"),
        Variable(1, 0, 4, "set", "x", b"c", 1),
        Variable(1, 0, 5, "get", "y"),
        Variable(1, 7, 2, "set", "y", b"d", 0),
    ]
    first = [storage.apply(op) for op in asked]
    assert not any(answer.repeated for answer in first)
    do("append", "x", b"later", lineage=9)
    do("set", "x", b"later still", lineage=9)
    do("set", "y", b"now it is there", lineage=9)
    again = [storage.apply(op) for op in asked]
    assert again == [structs.replace(answer, repeated=True, first=False) for answer in first]
    assert seen(do("get", "x", lineage=10)) == (4, b"later still", False)


def test_requests_do_not_see_each_other(do: Do) -> None:
    do("set", "x", b"a", request=1)
    assert seen(do("get", "x", request=2)) == (0, None, False)
    assert seen(do("set", "x", b"b", 0, request=2)) == wrote(1)
    assert seen(do("get", "x", request=1)) == (1, b"a", False)


def test_the_sequences_of_a_request_share_its_variables(do: Do) -> None:
    do("set", "x", b"a", lineage=0, count=1)
    assert seen(do("get", "x", lineage=1, count=1)) == (1, b"a", False)


def test_a_request_that_ended_leaves_nothing_and_cannot_come_back(
    storage: VariableStorage, do: Do
) -> None:
    do("set", "x", b"a", request=2)
    alone = storage.bytes, storage.variables
    do("set", "x", b"a", request=1)
    assert storage.end(1)
    assert not storage.end(1)
    assert (storage.bytes, storage.variables, storage.requests) == (*alone, [2])
    late = do("set", "x", b"b", request=1)
    assert "the request 1 has ended" in str(late.error)
    assert storage.requests == [2]


@pytest.mark.parametrize(
    ("name", "text"), [("", "'' has 0"), ("é" * 129, "has 258"), ("n" * 257, "has 257")]
)
def test_a_name_has_1_to_256_bytes(storage: VariableStorage, do: Do, name: str, text: str) -> None:
    for op in ("get", "set", "append"):
        error = do(op, name, b"a").error
        assert "a name has 1 to 256" in str(error)
        assert text in str(error)
    assert storage.requests == []


def test_names_of_256_bytes_and_of_any_characters_are_taken(do: Do) -> None:
    for name in ("é" * 128, "\0", "🙂", " ", "n" * 256):
        assert seen(do("set", name, name.encode())) == wrote(1)
        assert seen(do("get", name)) == (1, name.encode(), False)


def test_a_value_has_a_mebibyte_at_most(storage: VariableStorage, do: Do) -> None:
    error = str(do("set", "x", bytes(MIB + 1)).error)
    assert "at most 1048576 are allowed" in error
    assert "the variable 'x' would have 1048577 bytes" in error
    assert seen(do("set", "x", bytes(MIB))) == wrote(1)
    assert "would have 1048577" in str(do("append", "x", b"a").error)
    assert seen(do("get", "x")) == (1, bytes(MIB), False)


def test_a_request_has_1000_variables_at_most(do: Do) -> None:
    for i in range(1000):
        assert seen(do("set", f"x{i}", b"a")) == wrote(1)
    assert "the request has 1000 variables" in str(do("set", "y", b"a").error)
    assert seen(do("get", "y")) == (0, None, False)
    assert seen(do("set", "x0", b"b")) == wrote(2)


def test_a_request_has_8_mebibytes_at_most(storage: VariableStorage, do: Do) -> None:
    for i in range(7):
        assert seen(do("set", f"x{i}", bytes(MIB))) == wrote(1)
    error = str(do("set", "y", bytes(MIB)).error)
    assert "1048576 bytes for 'y' are too many" in error
    assert "at most 8388608 are allowed" in error
    assert seen(do("get", "y")) == (0, None, False)
    # The replaced value no longer counts.
    assert seen(do("set", "x0", b"")) == wrote(2)
    assert seen(do("set", "y", bytes(MIB - 8 * KIB))) == wrote(1)
    assert storage.bytes <= 8 * MIB


def test_a_replaced_value_that_an_answer_gives_counts_still(
    storage: VariableStorage, do: Do
) -> None:
    for _ in range(100):
        assert seen(do("set", "x", bytes(MIB)))[2]
    answers = []
    while (answer := do("get", "x")).error is None and do("set", "x", bytes(MIB)).error is None:
        answers.append(answer)
    # Besides the current value, six earlier values are kept.
    assert len(answers) == 6
    assert storage.bytes <= 8 * MIB


def test_reading_a_value_that_grows_costs_its_growth_alone(
    storage: VariableStorage, do: Do
) -> None:
    for i in range(10_000):
        assert seen(do("append", "x", b"0123456789"))[0] == i + 1
        assert len(do("get", "x").value or b"") == 10 * (i + 1)
    assert storage.bytes < 6 * MIB


def test_a_request_whose_answers_fill_its_quota_is_refused_for_good(
    storage: VariableStorage, do: Do
) -> None:
    answer = do("get", "x")
    while answer.error is None:
        answer = do("get", "x")
    assert "the request cannot do more operations" in answer.error
    assert storage.bytes <= 8 * MIB
    again = Variable(1, answer.lineage, answer.count, "get", "x")
    assert storage.apply(again) == answer
    assert seen(do("get", "x", count=1)) == (0, None, False)


def test_an_error_of_a_quota_is_given_again(storage: VariableStorage) -> None:
    storage.limits = SMALL
    do = doing(storage)
    do("set", "x", b"a" * 20)
    too_long = Variable(1, 0, 99, "append", "x", b"a")
    first = storage.apply(too_long)
    assert first.error is not None
    do("set", "x", b"")
    assert storage.apply(too_long) == structs.replace(first, repeated=True, first=False)


def test_where_all_requests_fill_the_worker_new_writes_are_refused_for_now() -> None:
    storage = VariableStorage(SMALL)
    do = doing(storage)
    held = 0
    while (answer := do("set", "x", b"a", request=held)).error is None:
        held += 1
    assert "the state worker is full" in answer.error
    assert "try again when other requests have ended" in answer.error
    assert storage.bytes <= SMALL.total_bytes
    storage.end(0)
    repeated = Variable(held, answer.lineage, answer.count, "set", "x", b"a")
    assert seen(storage.apply(repeated)) == wrote(1)


def test_operations_that_go_before_are_counted_before_they_are_done() -> None:
    storage = VariableStorage(SMALL)
    op = Variable(1, 0, 1, "set", "x", b"a")
    assert storage.refusal(op, SMALL.total_bytes - storage.cost(op)) is None
    assert storage.refusal(op, SMALL.total_bytes - storage.cost(op) + 1) is not None


# --- against a plain model ------------------------------------------------------------------------

requests = st.integers(1, 3)
operations = st.builds(
    Variable,
    request=requests,
    lineage=st.integers(0, 2),
    count=st.integers(0, 1 << 40),
    op=st.sampled_from(["get", "set", "append"]),
    name=st.sampled_from(["x", "y", "ü"]),
    value=st.binary(max_size=12),
    when_version_is=st.none() | st.integers(0, 4),
)
again = st.builds(lambda n: ("again", n), st.integers(0))
ends = st.builds(lambda n: ("end", n), requests)
histories = st.lists(operations | operations | operations | again | ends, max_size=60)


class Model:
    """A plain model: variables in one dict, and all answers in another."""

    def __init__(self) -> None:
        self.variables: dict[tuple[int, str], tuple[int, bytes]] = {}
        self.answers: dict[tuple[int, int, int], VariableAnswer] = {}

    def apply(self, op: Variable) -> VariableAnswer:
        name = op.request, op.lineage, op.count
        if name in self.answers:
            return structs.replace(self.answers[name], repeated=True, first=False)
        first = all(request != op.request for request, _, _ in self.answers)
        self.answers[name] = VariableAnswer(*name, *self._do(op), first=first)
        return self.answers[name]

    def _do(self, op: Variable) -> tuple[int, bytes | None, bool]:
        variable = op.request, op.name
        version, value = self.variables.get(variable, (0, b""))
        if op.op == "get" or op.when_version_is not in (None, version):
            return version, value if version else None, False
        new = op.value if op.op == "set" else value + op.value
        self.variables[variable] = version + 1, new
        return version + 1, None, True


@given(histories)
def test_any_sequence_of_operations_does_what_a_dict_does(history: list[Any]) -> None:
    storage, model = VariableStorage(), Model()
    done: list[Variable] = []
    ended: set[int] = set()
    for event in history:
        op = event
        if isinstance(event, tuple):
            what, number = event
            if what == "end":
                ended.add(number)
                storage.end(number)
                continue
            if not done:
                continue
            op = done[number % len(done)]
        answer = storage.apply(op)
        done.append(op)
        if op.request in ended:
            assert "has ended" in str(answer.error)
        else:
            assert msgpack.encode(answer) == msgpack.encode(model.apply(op))
    for request in ended:
        storage.end(request)
    alive = {r: v for r, v in model.variables.items() if r[0] not in ended}
    assert storage.variables == len(alive)
    for number, ((request, name), (version, value)) in enumerate(alive.items()):
        now = storage.apply(Variable(request, 99, number, "get", name))
        assert (now.version, now.value) == (version, value)


@given(histories)
def test_no_quota_is_passed_and_what_is_refused_changes_nothing(history: list[Any]) -> None:
    storage = VariableStorage(SMALL)
    for op in history:
        if isinstance(op, tuple):
            if op[0] == "end":
                storage.end(op[1])
            continue
        before = storage.save(op.request) if op.request in storage.requests else None
        new = not storage.answered(op)
        answer = storage.apply(op)
        after = storage.save(op.request) if op.request in storage.requests else None
        if answer.error is not None and new:
            assert (before.variables if before else []) == (after.variables if after else [])
            assert (before.values if before else []) == (after.values if after else [])
        assert storage.bytes <= SMALL.total_bytes
        for request in storage.requests:
            text = max([0, *(len(a[6] or "") for a in storage.save(request).answers)])
            assert storage.size(request) <= SMALL.request_bytes + text
            held = storage.save(request)
            assert len(held.variables) <= SMALL.variables
            assert all(len(value) <= SMALL.value_bytes for value in held.values)


@given(histories)
def test_a_request_that_is_saved_and_restored_is_the_same(history: list[Any]) -> None:
    storage, other = VariableStorage(SMALL), VariableStorage(SMALL)
    ops = [op for op in history if isinstance(op, Variable)]
    for op in ops:
        storage.apply(op)
    for request in storage.requests:
        other.restore(
            msgpack.decode(msgpack.encode(storage.save(request)), type=type(storage.save(request)))
        )
    assert (other.bytes, other.variables) == (storage.bytes, storage.variables)
    for op in ops:
        if storage.answered(op):
            assert msgpack.encode(other.apply(op)) == msgpack.encode(storage.apply(op))
    for number, op in enumerate(ops):
        op.lineage, op.count = 50, number
        assert other.apply(op) == storage.apply(op)


# --- inputs ---------------------------------------------------------------------------------------


def give(storage: VariableStorage, number: int, text: bytes = b"x") -> VariableAnswer:
    return storage.apply(Variable(1, 0, number, "give", "", text))


def test_inputs_are_taken_in_order_and_each_once(storage: VariableStorage, do: Do) -> None:
    assert seen(do("take", "")) == (0, None, False)
    assert seen(give(storage, 1, b"a")) == wrote(1)
    assert seen(give(storage, 2, b"")) == wrote(2)
    assert [seen(do("take", ""))[:2] for _ in range(3)] == [(1, b"a"), (2, b""), (0, None)]


def test_an_input_that_is_given_again_is_not_stored_again(storage: VariableStorage, do: Do) -> None:
    assert not give(storage, 1, b"a").repeated
    assert give(storage, 1, b"b").repeated
    assert seen(do("take", ""))[:2] == (1, b"a")
    assert give(storage, 1, b"b").repeated
    assert seen(do("take", ""))[:2] == (0, None)


def test_a_repeated_take_has_its_first_answer(storage: VariableStorage, do: Do) -> None:
    give(storage, 1, b"a")
    first = do("take", "", count=1)
    give(storage, 2, b"b")
    again = do("take", "", count=1)
    assert (again.version, again.value, again.repeated) == (1, b"a", True)
    assert not first.repeated
    assert seen(do("take", "", count=2))[:2] == (2, b"b")


def test_an_input_before_its_turn_is_refused_for_now(storage: VariableStorage) -> None:
    early = give(storage, 2)
    assert (early.again, early.error) == (
        True,
        "input 2 arrived before input 1; send the inputs of a stream in order",
    )


def test_a_bounded_number_of_inputs_waits(storage: VariableStorage, do: Do) -> None:
    for number in range(1, MAX_WAITING_INPUTS + 1):
        assert give(storage, number).error is None
    beyond = give(storage, MAX_WAITING_INPUTS + 1)
    assert beyond.again
    assert f"{MAX_WAITING_INPUTS} inputs with" in (beyond.error or "")
    do("take", "")
    assert give(storage, MAX_WAITING_INPUTS + 1).error is None


def test_a_bounded_number_of_bytes_waits(storage: VariableStorage) -> None:
    text = b"x" * MAX_INPUT_BYTES
    fit = MAX_WAITING_INPUT_BYTES // MAX_INPUT_BYTES
    for number in range(1, fit + 1):
        assert give(storage, number, text).error is None
    assert give(storage, fit + 1).again
    assert "at most" in (give(storage, fit + 1, text + b"x").error or "")


def test_a_restored_request_has_its_inputs_and_their_answers(
    storage: VariableStorage, do: Do
) -> None:
    for number, text in enumerate((b"a", b"b", b"c"), 1):
        give(storage, number, text)
    do("take", "", count=1)
    restored = VariableStorage()
    restored.restore(msgpack.decode(msgpack.encode(storage.save(1)), type=SavedRequest))
    assert restored.size(1) == storage.size(1)
    again = doing(restored)
    assert again("take", "", count=1).value == b"a"
    assert [again("take", "", count=n).value for n in (2, 3, 4)] == [b"b", b"c", None]
    assert give(restored, 3).repeated
    assert not give(restored, 4).repeated
