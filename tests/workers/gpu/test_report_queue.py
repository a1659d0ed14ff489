"""The queue of unanswered ATTACHes and CLAIMs: owners take turns, and so do the sessions of each
owner."""

from __future__ import annotations

from itertools import takewhile

from tokenbus.workers.gpu.serving.attaching import Attaching, ClaimEnd, ReportQueue

from .test_live_streams import Sent

LINK = 0


def taken(queue: ReportQueue) -> list[int]:
    """The session of each message in the queue, in the order in which they are answered."""
    queue.renew()
    found = takewhile(lambda one: one is not None, iter(queue.next, object()))
    return [
        one.session if isinstance(one, ClaimEnd) else one.stream.session
        for one in found
        if one is not None
    ]


def test_an_owner_with_many_sessions_delays_another_owner_by_one_message() -> None:
    streams = list(Sent(1, 2, 3, 4).streams)
    queue = ReportQueue()
    for stream in streams[:3]:
        queue.add_claim(stream.session, 7, LINK, [stream])
    queue.add(Attaching(streams[3], LINK, 0), 8)
    assert taken(queue) == [101, 104, 102, 103, 101, 102, 103]
    assert not queue


def test_a_session_of_a_broker_that_names_no_owner_is_an_owner() -> None:
    streams = list(Sent(1, 2).streams)
    queue = ReportQueue()
    for stream in [streams[0], streams[0], streams[1]]:
        queue.add(Attaching(stream, LINK, 0), 0)
    assert taken(queue) == [101, 102, 101]


def test_dropped_claims_leave_the_attaches_of_their_sessions() -> None:
    [stream] = list(Sent(1).streams)
    queue = ReportQueue()
    queue.add_claim(101, 7, 1, [stream])
    queue.add(Attaching(stream, LINK, 0), 7)
    queue.drop_claims(1)
    assert stream.claimed_by is None
    assert taken(queue) == [101]
    assert not queue
