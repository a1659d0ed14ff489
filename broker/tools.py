"""Handles the calls of tools: checks whether a client's program may make a call, chooses the tool
worker, and records the end of the call.

The controller worker that runs a program sends CALL, and the broker passes the call to a tool
worker. When the answer arrives, the broker passes the answer to the controller worker that runs the
program by then. No call is passed to a second tool worker. If the last worker of a tool drains or
was lost a moment ago, new calls of the tool wait for a worker that serves the tool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from msgspec import Struct

from ..protocol.bodies import decode_as, encode_body
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.header import encode_header
from ..protocol.messages import Tool
from ..protocol.shares import fits_share, max_share
from ..protocol.worker_messages import Call, CallAnswer, End
from .outgoing import Outgoing, Side
from .request import Request
from .session import Session
from .state import BrokerState
from .waiting_calls import CallId, WaitingCall, WaitingCalls, id_of
from .worker import RETRY_AFTER_S, Worker, WorkerState

MAX_ENDED = 64
"""Maximum number of answered calls of a request that the broker records."""
MAX_CALLS = 1_000
"""Maximum number of running calls of a request."""
MAX_SHOWN = 20
"""Maximum number of names of tools in an error message."""

_Place = tuple[str, str | None, int]
"""Identifies a count of running calls: the owner of the calls, a user of the owner (None: all users
together), and the id of a tool worker. The owner is the client's key or, without a key, the
client's session."""


class _Name(Struct, array_like=True):
    """The fields of a CALL_ANSWER that the broker reads: the id of the call."""

    request: int
    lineage: int
    count: int


@dataclass(slots=True, eq=False)
class _Passed:
    """A call that was passed to a tool worker."""

    worker: Worker
    tool: str
    owner: str
    user: str
    answered: bool = False

    @property
    def places(self) -> tuple[_Place, _Place]:
        """The two counts in ``Tools._running`` that include the call."""
        return (self.owner, None, self.worker.id), (self.owner, self.user, self.worker.id)


class Tools:
    """Passes the calls of requests to tool workers, and the answers back to controller workers."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._out = state.out
        self._calls: dict[int, dict[CallId, _Passed]] = {}
        """By request: its running calls, and the last ``MAX_ENDED`` calls that were answered."""
        self._waiting = WaitingCalls(state.settings.expiry_s)
        self._running: Counter[_Place] = Counter()
        """Number of running calls, by ``_Place``."""

    # --- messages -------------------------------------------------------------------------------

    def on_call(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles CALL of a controller worker."""
        call: Call = decode_as(Call, frames[2], "msgpack")
        request = self._state.requests.get(call.request)
        if request is None or request.steered_by is not worker or not request.open:
            return
        if id_of(call) not in self._waiting:
            self._pass(request, call)

    def tick(self, now: float) -> None:
        """Passes the waiting calls whose tools are served again, and answers those that have waited
        too long."""
        for waiting in self._waiting.take():
            if waiting.request.open:
                self._pass(waiting.request, waiting.call)

    def on_answer(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles CALL_ANSWER of a tool worker."""
        name: _Name = decode_as(_Name, frames[2], "msgpack")
        id_ = (name.request, name.lineage, name.count)
        request = self._state.requests.get(name.request)
        passed = self._calls.get(name.request, {}).get(id_)
        if request is None or passed is None or passed.worker is not worker:
            return
        self._end(request.id, id_, passed)
        receiver = request.steered_by
        if receiver is not None:
            head = encode_header(request.id, worker.id)
            sent = (b"CALL_ANSWER", head, *frames[2:])
            self._out.append(Outgoing(Side.BACK, receiver.peer, sent, True))

    def on_lost(self, worker: Worker) -> None:
        """Handles the loss of a tool worker: its running calls fail."""
        if worker.tools and not worker.system_ends:
            served = {tool for other in self._workers() for tool in other.tools}
            self._waiting.lost(worker.tools.keys() - served, self._state.now)
        for id_ in list(worker.calls):
            request = self._state.requests.get(id_[0])
            passed = self._calls.get(id_[0], {}).get(id_)
            if request is None or passed is None:
                continue
            self._end(id_[0], id_, passed)
            error = RequestError(
                Code.WORKER_LOST,
                f"the worker of the tool {passed.tool!r} was lost during the call; the tool may "
                "have done its work, and is not called again",
            )
            self._answer(request, id_, error)

    def end(self, request: Request) -> None:
        """Handles the end of a request: tool workers drop the request's calls."""
        self._waiting.take(request.id)
        calls = self._calls.pop(request.id, {})
        for id_, passed in calls.items():
            self._release(id_, passed)
        for worker in {passed.worker.id for passed in calls.values()}:
            found = self._state.workers.get(worker)
            if found is not None:
                self._out.to_worker(found, b"END", End(requests=[request.id]))

    def described(self, session: Session, names: Iterable[str], *, carried: bool) -> list[Tool]:
        """The descriptions of the tools with these names. ``carried``: whether a gateway asks for
        one of its users. Raises RequestError if a client's programs may not call a tool, or if no
        worker serves it."""
        found = []
        for name in names:
            self._check_allowed(session, name, carried=carried)
            found.append(self._serving(name)[0].tools[name])
        return found

    # --- one call -------------------------------------------------------------------------------

    def _pass(self, request: Request, call: Call) -> None:
        """Passes a call to a tool worker, lets it wait for a worker, or answers it with an
        error."""
        try:
            try:
                passed = self._passed(request, call)
            except TokenbusError as error:
                if not self._is_awaited(error):
                    raise
                self._waiting.add(WaitingCall(request, call, _owner(request)))
                return
        except TokenbusError as error:
            self._answer(request, id_of(call), error)
            return
        sent_by = encode_header(call.request, request.steered_by.id if request.steered_by else 0)
        call.owner, call.user = passed.owner, passed.user
        frames = (b"CALL", sent_by, encode_body(call, "msgpack"))
        self._out.append(Outgoing(Side.BACK, passed.worker.peer, frames, True))

    def _is_awaited(self, error: TokenbusError) -> bool:
        """Whether a call waits instead of being refused with ``error``. It waits as long as a
        worker that serves the call's tool may register."""
        if error.code != Code.NO_WORKER:
            return False
        settles = self._state.recovery.settles(self._state.now)
        return settles or isinstance(error, UnavailableError)

    def _passed(self, request: Request, call: Call) -> _Passed:
        """Assigns a call to a tool worker, or returns the earlier assignment. Raises TokenbusError
        if the call is refused."""
        calls = self._calls.get(request.id, {})
        known = calls.get(id_of(call))
        if known is not None and known.worker.id in self._state.workers:
            return known
        if known is not None or call.again:
            raise RequestError(
                Code.WORKER_LOST,
                f"the call of the tool {call.tool!r} was interrupted, and its answer is lost; the "
                "tool may have done its work, and is not called again",
            )
        # A user of a gateway may have a session without HELLO. The broker then knows only by the
        # group of the request that the request comes from a gateway.
        self._check_allowed(request.session, call.tool, carried=bool(request.fields.group))
        if sum(not each.answered for each in calls.values()) >= MAX_CALLS:
            raise RequestError(
                Code.CLIENT_LIMIT,
                f"the request has {MAX_CALLS} running calls, which is the maximum",
            )
        owner, user = _owner(request), request.fields.by
        worker = self._choose(call.tool, owner, user)
        passed = _Passed(worker, call.tool, owner, user)
        self._calls.setdefault(request.id, {})[id_of(call)] = passed
        self._running.update(passed.places)
        worker.calls.add(id_of(call))
        return passed

    def _check_allowed(self, session: Session, tool: str, *, carried: bool) -> None:
        """Raises RequestError if a client's programs may not call a tool. ``carried``: whether the
        client is a gateway that sends the request of a user."""
        allowed = self._state.keyring.client(session.key)
        patterns: Iterable[str] = self._state.settings.allow_tools
        if allowed is not None and allowed.tools is not None:
            patterns = allowed.tools
        elif self._state.is_operator(session) and not carried:
            return
        if not any(fnmatchcase(tool, pattern) for pattern in patterns):
            raise RequestError(
                Code.NOT_ALLOWED,
                f"this client's programs may not call the tool {tool!r}; the operator allows it "
                "with 'tokenbus keys allow NAME --tools' or the setting allow_tools",
            )

    def _serving(self, tool: str) -> list[Worker]:
        """The ready workers that serve a tool. Raises UnavailableError if the last such worker was
        lost a moment ago or drains, and RequestError if the tool is unknown."""
        workers = self._workers()
        serving = [w for w in workers if tool in w.tools and w.state is WorkerState.READY]
        drains = any(tool in w.tools and not w.system_ends for w in workers)
        if not serving and (drains or self._waiting.has_left(tool, self._state.now)):
            raise UnavailableError(
                Code.NO_WORKER,
                f"the last worker of the tool {tool!r} was lost; start one, or try again in a "
                "moment",
                retry_after_s=RETRY_AFTER_S,
            )
        if not serving:
            names = sorted({name for w in workers for name in w.tools})
            shown = ", ".join(names[:MAX_SHOWN]) + (", …" if names[MAX_SHOWN:] else "")
            without = (
                ", because no tool worker is running; start one with: tokenbus tool serve FILE"
            )
            why = f"; the served tools: {shown}" if names else without
            raise RequestError(Code.NO_WORKER, f"no worker serves the tool {tool!r}{why}")
        return serving

    def _workers(self) -> list[Worker]:
        return list(self._state.pools.of_role("tool").values())

    def _choose(self, tool: str, owner: str, user: str) -> Worker:
        """The least filled worker that serves a tool. Raises TokenbusError if no worker serves the
        tool, or if ``owner`` or its user ``user`` may not have another call now."""
        serving = self._serving(tool)
        capacity = sum(worker.capacity for worker in serving)
        running = sum(len(worker.calls) for worker in serving)
        own = sum(self._running[owner, None, worker.id] for worker in serving)
        worker = min(serving, key=lambda w: (len(w.calls) / w.capacity, w.id))
        if len(worker.calls) >= worker.capacity or not fits_share(own, running, capacity):
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"the workers of the tool {tool!r} run {running} of {capacity} calls, "
                f"{own} of them for this client; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        of_user = sum(self._running[owner, user, worker.id] for worker in serving)
        most = max_share(own, running, capacity)
        if user and not fits_share(of_user, own, most):
            raise UnavailableError(
                Code.CLIENT_LIMIT,
                f"the workers of the tool {tool!r} run {of_user} calls for you, and "
                f"{own - of_user} for other users of this client; all users of this client "
                f"together may have {most} calls, and one user at most half of the calls that "
                "other users leave free; wait until one of your calls ends",
                retry_after_s=RETRY_AFTER_S,
            )
        return worker

    def _end(self, request: int, id_: CallId, passed: _Passed) -> None:
        """Records the end of a call. If more than ``MAX_ENDED`` calls of the request have ended,
        forgets the call that ended first."""
        self._release(id_, passed)
        calls = self._calls[request]
        ended = [other for other, each in calls.items() if each.answered]
        if len(ended) > MAX_ENDED:
            del calls[ended[0]]

    def _release(self, id_: CallId, passed: _Passed) -> None:
        if passed.answered:
            return
        passed.answered = True
        passed.worker.calls.discard(id_)
        for place in passed.places:
            self._running[place] -= 1
            if not self._running[place]:
                del self._running[place]

    def _answer(self, request: Request, id_: CallId, error: TokenbusError) -> None:
        """Answers a call with an error of the broker itself. The tool was not called, or did not
        answer."""
        if request.steered_by is not None:
            answer = CallAnswer(*id_, error=error.message, code=str(error.code))
            self._out.to_worker(request.steered_by, b"CALL_ANSWER", answer)


def _owner(request: Request) -> str:
    """The owner of a request's calls (``_Place``): the client's key or, without a key, the client's
    session."""
    return request.session.key or str(request.session.id)
