"""The calls of a tool worker, on a real event loop and real threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Header
from tokenbus.protocol.worker_messages import MAX_RESULT_BYTES, Call, CallAnswer
from tokenbus.workers.bus import FromBus
from tokenbus.workers.tool import kept_answers, tool
from tokenbus.workers.tool.calls import Calls
from tokenbus.workers.tool.functions import Function

LONG_S = 300.0


class Worker:
    """The calls of a tool worker, and their answers."""

    def __init__(self, *functions: Callable[..., Any], threads: int = 2, capacity: int = 9) -> None:
        served = {made.info.name: made for made in (Function(f, LONG_S) for f in functions)}
        self.answers: asyncio.Queue[CallAnswer] = asyncio.Queue()
        self.calls = Calls(served, self._post, threads, capacity)

    def _post(self, frames: list[bytes], link: int) -> None:
        self.answers.put_nowait(msgspec.msgpack.decode(frames[2], type=CallAnswer))

    def call(self, name: str, count: int = 1, again: bool = False, **arguments: Any) -> None:
        self.call_of("", name, count, again=again, **arguments)

    def call_of(
        self,
        owner: str,
        name: str,
        count: int = 1,
        user: str = "",
        request: int = 7,
        again: bool = False,
        **arguments: Any,
    ) -> None:
        """Begins a call of an owner and its user."""
        call = Call(request, 0, count, name, msgspec.json.encode(arguments), again, owner, user)
        self.calls.begin(FromBus(b"CALL", Header(request), encode_body(call, "msgpack"), []))

    async def next(self) -> CallAnswer:
        return await asyncio.wait_for(self.answers.get(), LONG_S)


pytestmark = pytest.mark.anyio


def double(n: int) -> int:
    return 2 * n


async def triple(n: int) -> int:
    return 3 * n


async def test_functions_with_and_without_async_answer() -> None:
    worker = Worker(double, triple)
    worker.call("double", n=4)
    assert await worker.next() == CallAnswer(7, 0, 1, b"8")
    worker.call("triple", 2, n=4)
    assert await worker.next() == CallAnswer(7, 0, 2, b"12")
    assert worker.calls.num_running == 0


async def test_a_repeated_call_is_made_once_and_gets_the_same_answer() -> None:
    made = []
    go_on = asyncio.Event()

    async def count() -> int:
        made.append(1)
        await go_on.wait()
        return len(made)

    worker = Worker(count)
    worker.call("count")
    worker.call("count", again=True)
    go_on.set()
    first = await worker.next()
    worker.call("count", again=True)
    assert await worker.next() == first == CallAnswer(7, 0, 1, b"1")
    assert made == [1]
    assert worker.answers.empty()


async def test_a_call_of_an_earlier_attempt_that_is_unknown_is_not_made() -> None:
    worker = Worker(double)
    worker.call("double", again=True, n=1)
    answer = await worker.next()
    assert answer.code == "worker_lost"
    assert worker.calls.num_running == 0


async def test_a_function_that_hangs_ends_with_its_time_out_and_keeps_its_thread() -> None:
    release = threading.Event()

    @tool(timeout_s=0.01)
    def hang() -> None:
        release.wait(LONG_S)

    worker = Worker(hang, double, threads=1)
    worker.call("hang")
    answer = await worker.next()
    assert (answer.code, answer.error) == (
        "timeout",
        "the tool 'hang' did not answer within 0.01 s",
    )
    worker.call("double", 2, n=1)
    await asyncio.sleep(0)
    assert worker.answers.empty()
    release.set()
    assert (await worker.next()).value == b"2"


class Held:
    """A tool without ``async`` that returns when the test says so."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        """The names of the calls whose functions have begun."""
        self._release: dict[str, threading.Event] = {}
        self._loop = asyncio.get_running_loop()

    def release(self, name: str) -> None:
        """Lets the function of a call return."""
        self._release.setdefault(name, threading.Event()).set()

    async def next(self) -> str:
        """The name of the next call whose function begins."""
        return await asyncio.wait_for(self.begun.get(), LONG_S)

    @property
    def tool(self) -> Callable[..., Any]:
        """The function ``hold``."""

        def hold(label: str) -> str:
            self._loop.call_soon_threadsafe(self.begun.put_nowait, label)
            self._release.setdefault(label, threading.Event()).wait(LONG_S)
            return label

        return hold


async def test_an_owner_with_slow_functions_leaves_threads_to_another_owner() -> None:
    held = Held()
    worker = Worker(held.tool, double, threads=4)
    for count in range(4):
        worker.call_of("ann", "hold", count, label=f"a{count}")
    assert {await held.next(), await held.next()} == {"a0", "a1"}
    worker.call_of("ben", "double", 9, n=1)
    assert (await worker.next()).value == b"2"
    assert held.begun.empty()
    for count in range(4):
        held.release(f"a{count}")
    assert {(await worker.next()).count for _ in range(4)} == {0, 1, 2, 3}


async def test_the_users_of_an_owner_share_its_threads() -> None:
    held = Held()
    worker = Worker(held.tool, double, threads=6)
    for count in range(4):
        worker.call_of("gateway", "hold", count, user="ann", label=f"a{count}")
    assert {await held.next(), await held.next()} == {"a0", "a1"}
    worker.call_of("gateway", "double", 9, user="ben", n=1)
    assert (await worker.next()).value == b"2"
    assert held.begun.empty()
    for count in range(4):
        held.release(f"a{count}")


async def test_a_cancelled_call_counts_until_its_function_returns() -> None:
    held = Held()
    worker = Worker(held.tool, double, threads=4)
    for request in (1, 2, 3):
        worker.call_of("ann", "hold", request=request, label=f"a{request}")
    assert {await held.next(), await held.next()} == {"a1", "a2"}
    for request in (1, 2, 3):
        worker.calls.end(0, request)
    worker.call_of("ann", "hold", request=4, label="a4")
    worker.call_of("ben", "double", 9, n=1)
    assert (await worker.next()).value == b"2"
    assert held.begun.empty()
    held.release("a1")
    # The call of the request 3 was cancelled while it waited, so it does not begin.
    assert await held.next() == "a4"
    held.release("a2")
    held.release("a4")
    assert (await worker.next()).request == 4


async def test_owners_take_turns_if_all_threads_are_busy() -> None:
    held = Held()
    worker = Worker(held.tool, threads=1)
    for count in (1, 2, 3):
        worker.call_of("ann", "hold", count, label=f"a{count}")
    worker.call_of("ben", "hold", 4, label="b4")
    begun = []
    for _ in range(4):
        begun.append(await held.next())
        held.release(begun[-1])
    assert begun == ["a1", "a2", "b4", "a3"]


async def test_an_async_function_is_cancelled_at_its_time_out() -> None:
    cancelled = asyncio.Event()

    @tool(timeout_s=0.01)
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    worker = Worker(hang)
    worker.call("hang")
    assert (await worker.next()).code == "timeout"
    assert cancelled.is_set()


def fail(how: str) -> Any:
    match how:
        case "raise":
            raise ValueError("no luck")
        case "exit":
            raise SystemExit(1)
        case "stop":
            raise StopIteration
        case "type":
            return object()
        case _:
            return "x" * MAX_RESULT_BYTES


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raise", "the tool 'fail' failed: ValueError: no luck"),
        ("exit", "the tool 'fail' failed: RuntimeError: SystemExit: 1"),
        ("stop", "the tool 'fail' failed: RuntimeError: StopIteration: "),
        ("type", "the result of the tool 'fail' cannot be written as JSON"),
        ("long", f"has {MAX_RESULT_BYTES + 2} bytes; at most {MAX_RESULT_BYTES} are allowed"),
    ],
)
async def test_a_failure_is_the_answer(how: str, error: str) -> None:
    worker = Worker(fail)
    worker.call("fail", how=how)
    answer = await worker.next()
    assert answer.code == "tool_failed"
    assert answer.error is not None
    assert error in answer.error


async def test_calls_beyond_the_capacity_are_refused() -> None:
    go_on = asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    worker = Worker(wait, capacity=2)
    for count in (1, 2, 3):
        worker.call("wait", count)
    assert (await worker.next()).code == "queue_full"
    go_on.set()
    assert {(await worker.next()).count for _ in range(2)} == {1, 2}


async def test_the_end_of_a_request_cancels_its_calls_and_drops_its_answers() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    worker = Worker(wait, double)
    worker.call("double", 2, n=1)
    await worker.next()
    worker.call("wait")
    await begun.wait()
    worker.calls.end(0, 7)
    await asyncio.wait_for(ended.wait(), LONG_S)
    assert worker.answers.empty()
    worker.call("double", 2, again=True, n=1)
    assert (await worker.next()).code == "worker_lost"


async def test_kept_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MAX_BYTES", 20)
    worker = Worker(double)
    for count in (1, 2, 3):
        worker.call("double", count, n=count)
        await worker.next()
    worker.call("double", 1, again=True, n=1)
    assert (await worker.next()).code == "worker_lost"


async def test_only_the_last_answers_of_a_request_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MAX_OF_REQUEST", 2)
    worker = Worker(double)
    for count in (1, 2, 3):
        worker.call("double", count, n=count)
        await worker.next()
    worker.call("double", 3, again=True, n=3)
    assert (await worker.next()).value == b"6"
    worker.call("double", 1, again=True, n=1)
    assert (await worker.next()).code == "worker_lost"


def large(n: int) -> str:
    return "x" * n


async def test_large_answers_of_a_client_do_not_drop_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_answers, "MAX_BYTES", 10_000)
    worker = Worker(double, large)
    worker.call_of("a", "double", request=1, n=1)
    await worker.next()
    worker.call_of("b", "double", request=2, user="first", n=2)
    await worker.next()
    for request in range(3, 20):
        worker.call_of("b", "large", request=request, user="second", n=2000)
        await worker.next()
    for owner, request, value in (("a", 1, b"2"), ("b", 2, b"4")):
        worker.call_of(owner, "double", request=request, again=True, n=0)
        assert (await worker.next()).value == value
    worker.call_of("b", "large", request=3, user="second", again=True, n=2000)
    assert (await worker.next()).code == "worker_lost"
    worker.call_of("b", "large", request=19, user="second", again=True, n=2000)
    assert len((await worker.next()).value) == 2002


async def test_ended_requests_leave_nothing_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MAX_BYTES", 3_000)
    worker = Worker(double)
    for request in range(1, 12):
        worker.call_of("ab"[request % 2], "double", request=request, n=1)
        await worker.next()
        worker.call_of("ab"[request % 2], "double", 2, request=request, again=True, n=1)
        await worker.next()
    worker.calls.end(0)
    kept = worker.calls._kept
    assert (kept.requests, dict(kept._of_client), dict(kept._of_owner)) == ([], {}, {})
