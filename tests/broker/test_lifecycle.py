"""Tests of the transitions of a request, and of the broker's tables after each transition."""

from __future__ import annotations

import itertools

import pytest
from tokenbus.broker.lifecycle import (
    AT_WORKER,
    OPEN,
    TAKEN,
    TRANSITIONS,
    Event,
    NoTransitionError,
    RequestState,
    transition,
)
from tokenbus.broker.outgoing import Side
from tokenbus.broker.request import Request
from tokenbus.protocol.worker_messages import Journal, LiveRequest

from ..lint.lifecycle import PAGE, diagram
from ..worlds.broker import Bench, generate
from .invariants import check, check_empty

WAYS = {
    RequestState.QUEUED: [],
    RequestState.RUNNING: [Event.START],
    RequestState.MOVING: [Event.START, Event.LOSE],
    RequestState.RETURNING: [Event.START, Event.LOSE, Event.RETURN],
    RequestState.ENDED: [Event.START, Event.CLOSE],
    RequestState.GONE: [Event.END],
}
"""Events that bring a request from its queue to each state."""


class Case:
    """A broker's state with one worker, and a request in the state ``state``. Tests make further
    transitions of this request."""

    def __init__(self, state: RequestState) -> None:
        self.bench = Bench()
        self.state = self.bench.broker.state
        self.bench.worker("busy", capacity=1)
        self.bench.client("c", "GENERATE", generate(1))
        self.bench.client("d", "GENERATE", generate(1))
        [self.worker] = self.state.workers.values()
        [self.request] = [r for r in self.state.requests.values() if r.worker is None]
        for event in WAYS[state]:
            self.apply(event)
        assert self.request.state is state

    def apply(self, event: Event) -> None:
        transition(self.state, self.request, event, self.worker if event in TAKEN else None)

    def places(self) -> dict[str, bool]:
        """For each table, whether the request is in it."""
        request = self.request
        return {
            "open": request.session.streams.get(1) is request,
            "queued": any(request in queue for queue in self.state.queues.values()),
            "waiting": self.state.waiting.get(request.id) is request,
            "at its worker": self.worker.requests.get(request.id) is request,
            "known": self.state.requests.get(request.id) is request,
        }


def places_of(state: RequestState) -> dict[str, bool]:
    """For each table, whether a request of this state is in it."""
    return {
        "open": state in OPEN,
        "queued": state is RequestState.QUEUED,
        "waiting": state is RequestState.MOVING,
        "at its worker": state in AT_WORKER,
        "known": state is not RequestState.GONE,
    }


@pytest.mark.parametrize(("state", "event"), list(itertools.product(WAYS, Event)), ids=str)
def test_each_transition_moves_a_request_between_tables_or_changes_nothing(
    state: RequestState, event: Event
) -> None:
    case = Case(state)
    after = TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(NoTransitionError, match=f"is {state} and cannot {event}"):
            case.apply(event)
        after = state
    else:
        case.apply(event)
    assert case.request.state is after
    assert case.places() == places_of(after)
    assert (case.request.worker is not None) == (after in AT_WORKER)


def test_every_state_can_be_reached_and_each_but_gone_can_be_left() -> None:
    reached = {RequestState.NEW}
    while True:
        more = {after for state in reached for after in TRANSITIONS[state].values()}
        if more <= reached:
            break
        reached |= more
    assert reached == set(RequestState)
    for state, changes in TRANSITIONS.items():
        assert state is RequestState.GONE or changes, f"{state} is never left"
        assert (RequestState.GONE in changes.values()) == (
            state not in (RequestState.NEW, RequestState.GONE)
        )


@pytest.mark.parametrize("state", [s for s in WAYS if s is not RequestState.GONE], ids=str)
def test_a_missing_transition_ends_the_request_for_its_client_and_is_counted(
    state: RequestState,
) -> None:
    case = Case(state)
    client = "d" if case.request.session.peer == b"\0d" else "c"
    open_before = case.request.open
    case.bench.to_client(client)
    dispatcher = case.bench.broker.dispatcher
    dispatcher.on_defect("a test", NoTransitionError(case.request, Event.QUEUE))
    case.bench.sent += case.state.out.take()
    ends = [body["code"] for kind, body in case.bench.to_client(client) if kind == "ERROR"]
    assert ends == (["internal"] if open_before else [])
    assert case.state.counters.internal_errors == 1
    assert not case.request.open


def test_the_docs_have_the_diagram_of_the_table() -> None:
    assert diagram() in PAGE.read_text()


def test_a_request_that_lost_its_worker_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.worker("a", process=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.pass_time(6.0)
    check(bench.broker)
    request: Request = bench.broker.state.requests[header.request]
    assert request.state is RequestState.MOVING
    bench.worker("b")
    assert request.state is RequestState.RUNNING
    assert [kind for kind, _ in bench.to_worker("b")] == ["GENERATE"]
    bench.tokens("b", header, final=True)
    check(bench.broker)
    check_empty(bench.broker)


@pytest.mark.parametrize("over", [{"gone": True}, {"ended": True}], ids=str)
def test_a_client_that_leaves_while_its_stream_returns_costs_the_worker_no_place(
    over: dict[str, bool],
) -> None:
    """The worker does not have the stream any more, so it does not report an end after a CANCEL."""
    bench = Bench()
    bench.worker("a", process=1)
    bench.client("c", "GENERATE", generate(1))
    [(_, header)] = bench.to_worker("a")
    bench.sent += bench.broker.on_gone(Side.BACK, b"\0a", bench.now)
    live = LiveRequest(request=header.request, session=header.address, stream_id=1)
    answer = bench.worker("a", process=1, live=[live])
    assert answer.wanted == [header.request]
    request = bench.broker.state.requests[header.request]
    assert request.state is RequestState.RETURNING
    bench.client("c", "BYE", {})
    assert request.state is RequestState.ENDED
    bench.send("a", "JOURNAL", Journal(type="GENERATE", **over), header)
    check(bench.broker)
    check_empty(bench.broker)
