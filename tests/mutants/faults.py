"""The seeded faults. Each changes one place in the life cycle of requests, in the journal and the
stored ends of streams, or in the rules that decide which worker has a stream."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: ``old`` occurs once in ``broker/<file>``, and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


FAULTS = (
    # --- the life cycle ---------------------------------------------------------------------------
    Fault(
        "a queued request cannot end",
        "lifecycle.py",
        "        Event.START: _RUNNING,\n        Event.END: _GONE,\n    },\n    _RUNNING",
        "        Event.START: _RUNNING,\n    },\n    _RUNNING",
    ),
    Fault(
        "a refused request is taken for lost",
        "lifecycle.py",
        "Event.REFUSE: _QUEUED",
        "Event.REFUSE: _MOVING",
    ),
    Fault(
        "a returning request cannot lose its worker again",
        "lifecycle.py",
        "        Event.REPORT: _RUNNING,\n        Event.LOSE: _MOVING,\n",
        "        Event.REPORT: _RUNNING,\n",
    ),
    Fault(
        "a moving request cannot return",
        "lifecycle.py",
        "        Event.RETURN: _RETURNING,\n",
        "",
    ),
    Fault(
        "an ended request cannot be withdrawn",
        "lifecycle.py",
        "    _ENDED: {\n        Event.END: _GONE,\n        Event.WITHDRAW: _GONE,\n",
        "    _ENDED: {\n        Event.END: _GONE,\n",
    ),
    Fault(
        "an ended request stays among the streams of its session",
        "lifecycle.py",
        "if before in OPEN and after not in OPEN:",
        "if after is _GONE and before in OPEN:",
    ),
    Fault(
        "a moving request stays in its table",
        "lifecycle.py",
        "        state.waiting.remove(request)\n",
        "        pass\n",
    ),
    Fault(
        "an ended request keeps its place at its worker",
        "lifecycle.py",
        "    del worker.requests[request.id]\n",
        "",
    ),
    Fault(
        "the deadline of a request stays",
        "lifecycle.py",
        "    state.deadlines.remove(request)\n",
        "",
    ),
    Fault(
        "the tokenizers of a key are counted for ever",
        "lifecycle.py",
        "        state.tokenizers[request.session.key] -= 1\n",
        "",
    ),
    Fault(
        "the pools do not notice a free place",
        "lifecycle.py",
        "    state.pools.note(worker)\n    request.worker = None",
        "    request.worker = None",
    ),
    # --- the log ----------------------------------------------------------------------------------
    Fault(
        "a moved stream gets the entries of an earlier stream with its number",
        "chunks.py",
        "        if number < self.first:",
        "        if number < 0:",
    ),
    Fault(
        "entries that a worker sends again count twice",
        "chunks.py",
        "        if self._length < self._limits[self._at]:",
        "        if self._length < 1 << 62:",
    ),
    Fault(
        "entries that are sent again get the numbers after the last entry",
        "chunks.py",
        "            self._length = min(self._length, self._again[self._at][1])\n",
        "",
    ),
    Fault(
        "the entries before a move are lost at the next move",
        "stream_log.py",
        "if sent:\n            for body",
        "if not sent:\n            for body",
    ),
    Fault(
        "a chunk is dropped that a live request needs",
        "stream_log.py",
        "oldest = next(iter(self._places.values()), None)",
        "oldest = [None, *self._places.values()][-1]",
    ),
    Fault(
        "chunks that nobody needs stay",
        "stream_log.py",
        "self._chunks[0].numbers[-1] < self.first:",
        "self._chunks[0].numbers[-1] < 0:",
    ),
    Fault(
        "a body that waits in the buffer is not read",
        "stream_log.py",
        "while self._recent.distributed < end:",
        "while self._recent.distributed < 0:",
    ),
    Fault(
        "a request begins before the messages that precede it",
        "stream_log.py",
        "first = self._recent.next",
        "first = self._recent.distributed",
    ),
    Fault(
        "a request begins before the messages of its event",
        "recent.py",
        "return self._segments[-1].next + len(self.pending)",
        "return self._segments[-1].next",
    ),
    Fault(
        "an end is not stored while its client has no connection",
        "ends.py",
        "wanted = session.acks or request.awaits_attach or session.peer is None",
        "wanted = session.acks or request.awaits_attach",
    ),
    Fault(
        "the last tokens are not stored while the client has no connection",
        "ends.py",
        "if not (session.acks or request.awaits_attach or session.peer is None):",
        "if not (session.acks or request.awaits_attach):",
    ),
    Fault(
        "an acknowledgement drops an end that came later",
        "stream_log.py",
        "item[0] <= position",
        "item[0] <= position + 1",
    ),
    Fault(
        "positions of an earlier connection are acknowledged",
        "stream_log.py",
        "            end.since, end.position = now, 0",
        "            end.since = now",
    ),
    Fault(
        "an end that was dropped by a full queue counts as sent",
        "stream_log.py",
        "        self.lost[end.stream_id] = end\n",
        "",
    ),
    # --- which worker has a stream ----------------------------------------------------------------
    Fault(
        "the worker with fewer entries is right",
        "reconcile.py",
        "and copy <= known.other:",
        "and copy >= known.other:",
    ),
    Fault(
        "a report that is behind the client is adopted",
        "reconcile.py",
        "    return copy < client or ",
        "    return ",
    ),
    Fault(
        "a stale end is right because the stream has ended",
        "adoption.py",
        "                copy, over = end.reached, end.reached is None\n",
        "                copy, over = end.reached, True\n",
    ),
    Fault(
        "a stream that is behind its client is attached",
        "adoption.py",
        "reported is not None and is_behind(reported, False, client):\n",
        "reported is not None and is_behind(reported, False, Progress(0, 0)):\n",
    ),
    Fault(
        "a session that began here adopts a stream again",
        "adoption.py",
        "complete = bool(session.token) and not session.recovering",
        "complete = False",
    ),
    Fault(
        "withdrawn streams do not count towards the bounds of live streams",
        "session.py",
        "return len(self.streams) + len(self.withdrawn)",
        "return len(self.streams)",
    ),
    Fault(
        "a client with several brokers multiplies its streams without a bound",
        "quotas.py",
        "return self._num_live(session.key) < factor * allowed.streams",
        "return True",
    ),
    Fault(
        "a claimed stream does not keep its place at the worker",
        "worker.py",
        "len(self.requests) + len(self.fences) + elsewhere",
        "len(self.requests) + elsewhere",
    ),
    Fault(
        "a cancelled stream is adopted",
        "adoption.py",
        "cancelled=self._attaches.is_cancelled(header.address, stream_id),",
        "cancelled=False,",
    ),
    Fault(
        "a worker keeps a stream that continues at another broker",
        "adoption.py",
        "                self._dispatcher.withdraw(request)\n\n    def on_attach",
        "                pass\n\n    def on_attach",
    ),
    Fault(
        "a worker whose step hangs gets its streams back",
        "returns.py",
        "        if self._state.is_hung(worker):\n            return []\n",
        "",
    ),
    Fault(
        "the entries of a return are sent from the first one",
        "returns.py",
        "self._continue(request, entries[request.entries :], body.ended)",
        "self._continue(request, entries, body.ended)",
    ),
    Fault(
        "a stream that its worker has lost stays there",
        "returns.py",
        '                self._dispatcher.move(request, "it has lost the stream")\n',
        "                pass\n",
    ),
    Fault(
        "entries of a withdrawn stream reach its client",
        "fences.py",
        "own = [entry for entry in entries if entry.stream_id not in streams]",
        "own = list(entries)",
    ),
    Fault(
        "the earlier attempt of a request is not revoked",
        "dispatch.py",
        "                give_up(state, worker, fence.request, fence.session, fence.stream_id)\n",
        "                pass\n",
    ),
    Fault(
        "an earlier confirmation ends a fence that began anew",
        "fences.py",
        " and fence.end == number:",
        ":",
    ),
    Fault(
        "a fence never ends",
        "fences.py",
        "                self._remove(fence)\n        return number\n\n    def progressed",
        "                pass\n        return number\n\n    def progressed",
    ),
    Fault(
        "messages about a void attempt are handled",
        "fences.py",
        "return fence is not None and fence.void in self._unanswered",
        "return False",
    ),
    Fault(
        "the fence of a stream that goes on at its worker stays",
        "adoption.py",
        "        worker.fences.reported(header.request)\n",
        "",
    ),
    Fault(
        "a worker that returns is not asked to end its fences",
        "adoption.py",
        "                send_claim(self._state, worker, fences)\n",
        "                pass\n",
    ),
    Fault(
        "a claim ends with its first answer",
        "claims.py",
        "        if claim is None or claim.asked:\n            return False",
        "        if claim is None:\n            return False",
    ),
)
