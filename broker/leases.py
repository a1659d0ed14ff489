"""The leases of workers: registration, heartbeats, expiry, and the loss of a worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from ..protocol.bodies import decode_as, encode_body, error_body
from ..protocol.errors import Code, RequestError, TokenbusError
from ..protocol.header import decode_header, encode_header
from ..protocol.messages import PROTOCOL_VERSION
from ..protocol.worker_messages import Heartbeat, Register, Reregister, Unregister
from .adoption import Adoption
from .contested_names import ContestedNames, process_of, taken
from .dispatch import Dispatcher
from .drains import Drains
from .fences import overdue, registered
from .losses import log_end
from .outgoing import Outgoing, Side
from .quarantine import TRIAL_S
from .rollouts import Rollouts
from .state import BrokerState
from .sweep import Sweep
from .worker import Loss, Worker, WorkerState

log = logging.getLogger(__name__)

_BACK = Side.BACK
_BEAT = (b"HEARTBEAT", encode_header(), encode_body(Heartbeat(), "msgpack"))
LEASES_AT_ONCE = 1_000
"""Number of workers whose leases one tick checks. With very many workers, a tick checks more."""
BEATS_AT_ONCE = 1_000
"""Maximum number of workers to which one tick sends a heartbeat."""


class Leases:
    """Handles the registrations, heartbeats and losses of workers. Stores the workers with a lease
    by connection and by name."""

    def __init__(
        self,
        state: BrokerState,
        dispatcher: Dispatcher,
        adoption: Adoption,
        drains: Drains,
        rollouts: Rollouts,
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._out = state.out
        self._dispatcher = dispatcher
        self._adoption = adoption
        self._drains = drains
        self._quotas = state.quotas
        self._rollouts = rollouts
        self.by_peer: dict[bytes, Worker] = {}
        self._by_name: dict[str, Worker] = {}
        self._leases = Sweep(self.by_peer, LEASES_AT_ONCE)
        self._unbeaten: deque[Worker] = deque()
        """Workers to which the current round of heartbeats was not yet sent."""
        self._beat_again = False
        """Whether another round of heartbeats starts as soon as the current round is complete."""
        self._walked = float("inf")
        self._silent_since = float("inf")
        """The earliest ``Worker.last_seen`` that the last complete walk over all workers has found.
        A walk takes several ticks. ``_walked`` is the earliest ``last_seen`` that the current walk
        has found so far."""
        self._asked: dict[bytes, float] = {}
        """For each connection without a registered worker: the time at which the broker last
        requested a registration. It requests at most one in ``heartbeat_s``, because each
        registration begins a new lease."""
        self._lost: dict[str, tuple[int, float]] = {}
        """The workers that were lost because they were silent or their connections had closed, by
        name. Each value has the number of the worker's process, which may still run, and the time
        of the loss."""
        self._names = ContestedNames(state.settings.expiry_s)
        self._stopped_until = float("-inf")
        """If a connection ends before this time, its worker does not count as dead. The time is set
        when this process was paused, because workers close their connections to a paused broker.
        """
        self._last_beat = float("-inf")

    # --- events ---------------------------------------------------------------------------------

    def on_gone(self, peer: bytes, now: float, unsent: Sequence[bytes] = ()) -> None:
        """Handles the end of a worker's connection: the worker's lease ends. ``unsent``: the frames
        of a message that could not be sent for this reason, if any."""
        worker = self.by_peer.get(peer)
        if worker is None:
            self._names.on_gone(peer)
            return
        if unsent:
            request = worker.requests.get(decode_header(unsent[1]).request)
            if request is not None and request.type == unsent[0]:
                request.dispatched = None
        self._lost[worker.name] = worker.process, now
        self.lose(worker, Loss("its connection closed", died=now > self._stopped_until))

    def revoke(self, peer: bytes, error: TokenbusError, now: float) -> None:
        """Handles a message of a worker whose key was revoked. If the worker is registered, its
        lease ends and its streams move. Otherwise the worker receives the refusal ``error``."""
        worker = self.by_peer.get(peer)
        if worker is not None:
            self.lose(worker, Loss("its key was revoked", died=False))
            self.ask(peer, error.message, now)
        elif now - self._asked.get(peer, float("-inf")) >= self._settings.heartbeat_s:
            self._asked[peer] = now
            self.refuse(peer, peer.hex(), error)

    def renew(self, now: float) -> None:
        """Renews all leases after this process was paused, because messages that workers sent
        during the pause have not been read yet."""
        self._stopped_until = now + 2 * self._settings.heartbeat_s
        for worker in self.by_peer.values():
            worker.last_seen = now
            worker.fences.progressed(now)

    def tick(self, now: float) -> None:
        """Ends leases that were not renewed, and sends the broker's own heartbeat."""
        silent_since = self._walked
        for worker in self._leases.part():
            if self.by_peer.get(worker.peer) is not worker:
                continue
            if now - worker.last_seen > self._settings.expiry_s:
                why = f"no message for {now - worker.last_seen:.1f} s"
                self._lost[worker.name] = worker.process, now
                self.lose(worker, Loss(why, died=True))
            elif why := overdue(self._state, worker):
                self.lose(worker, Loss(why, died=True, returns=False))
            elif worker.last_seen < silent_since:
                silent_since = worker.last_seen
        self._walked = silent_since
        self._drains.hand_over()
        if self._leases.begins:
            self._silent_since, self._walked = silent_since, float("inf")
        if now - self._last_beat >= self._settings.heartbeat_s:
            self._last_beat = now
            long_ago = now - self._settings.expiry_s
            self._asked = {peer: at for peer, at in self._asked.items() if at > long_ago}
            self._lost = {name: one for name, one in self._lost.items() if now - one[1] <= TRIAL_S}
            self.beat()
        elif self._unbeaten:
            self._beat_some()

    def beat(self) -> None:
        """Sends the broker's heartbeat to every worker; with many workers, some receive it in later
        ticks."""
        self._beat_again = bool(self._unbeaten)
        if not self._unbeaten:
            self._unbeaten.extend(self.by_peer.values())
        self._beat_some()

    def _beat_some(self) -> None:
        for _ in range(min(len(self._unbeaten), BEATS_AT_ONCE)):
            worker = self._unbeaten.popleft()
            self._out.append(Outgoing(_BACK, worker.peer, _BEAT, True))
        if self._beat_again and not self._unbeaten:
            self._beat_again = False
            self._unbeaten.extend(self.by_peer.values())

    @property
    def behind(self) -> bool:
        """Whether the next tick must send further heartbeats."""
        return bool(self._unbeaten)

    @property
    def expires_at(self) -> float:
        """The earliest time at which a lease may end, as far as the last complete walk shows."""
        return self._silent_since + self._settings.expiry_s

    def ask(self, peer: bytes, reason: str, now: float) -> None:
        """Requests a registration on a connection that has no registered worker."""
        if now - self._asked.get(peer, float("-inf")) >= self._settings.heartbeat_s:
            self._asked[peer] = now
            self._out.to_worker(peer, b"REREGISTER", Reregister(reason=reason))

    # --- messages -------------------------------------------------------------------------------

    def on_heartbeat(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's HEARTBEAT."""
        beat: Heartbeat = decode_as(Heartbeat, frames[2], "msgpack")
        hung = self._state.is_hung(worker)
        worker.step_age_s = beat.step_age_s
        worker.stepped_at = worker.last_seen - (beat.step_age_s or 0.0)
        worker.load, worker.metrics = beat.load, beat.metrics
        if beat.elsewhere != worker.elsewhere:
            self._dispatcher.count_elsewhere(worker, beat.elsewhere)
        if beat.sandbox_ms:
            self._quotas.on_sandbox(worker, beat.sandbox_ms, self._state.now)
        if self._state.is_hung(worker):
            if worker.requests:
                why = f"its step has run for {beat.step_age_s:.0f} s"
                self.lose(worker, Loss(why, died=True))
        elif hung:
            self._dispatcher.resume(worker)

    def on_unregister(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's UNREGISTER."""
        gone: Unregister = decode_as(Unregister, frames[2], "msgpack")
        self.lose(worker, Loss(gone.reason or "it unregistered", died=False))

    def on_register(self, peer: bytes, frames: list[bytes], now: float) -> None:
        """Handles a worker's REGISTER: a lease begins, or the worker changes what it serves."""
        message: Register = decode_as(Register, frames[2], "msgpack")
        if message.version != PROTOCOL_VERSION:
            self._state.counters.bad_worker_messages += 1
            error = RequestError(
                Code.UNSUPPORTED_VERSION,
                f"the worker {message.name} speaks version {message.version} of the protocol; this "
                f"broker speaks version {PROTOCOL_VERSION}; run broker and workers of one release",
            )
            self.refuse(peer, message.name, error)
            return
        known = self.by_peer.get(peer)
        if known is not None and message.update:
            self._update(known, message)
            self._out.to_worker(known, b"REGISTERED", registered(self._state, known))
            return
        if message.update:
            # The worker has not noticed that its lease has ended. An update does not begin a lease.
            # So the worker must send a complete registration, with its requests.
            self.ask(peer, "this connection has no registered worker", now)
            return
        holder = self._by_name.get(message.name)
        if holder is not None and holder.peer != peer and not self._gives_way(holder, message):
            self._contend(holder, peer, frames, now)
            return
        for other in (known, holder):
            if other is not None and self.by_peer.get(other.peer) is other:
                why = "it registered again on a new connection"
                self.lose(other, Loss(why, died=False, replaced=True))
        self._begin(peer, message)

    def _begin(self, peer: bytes, message: Register) -> None:
        """Begins the lease of a worker."""
        worker = Worker(
            id=next(self._state.ids),
            peer=peer,
            name=message.name,
            role=message.role,
            pid=message.pid,
            host=message.host,
            capacity=message.capacity,
            models=self._rollouts.current(message),
            patterns=message.patterns,
            default=message.default,
            tools={tool.name: tool for tool in message.tools},
            missing_layers=message.missing_layers,
            last_seen=self._state.now,
            step_age_s=message.step_age_s,
            process=process_of(message),
            registration=message.registration,
            brokers=message.brokers,
        )
        self.by_peer[peer] = self._by_name[worker.name] = worker
        process, _ = self._lost.pop(worker.name, (0, 0.0))
        if process == worker.process:
            self._dispatcher.worker_lives(worker.name)
        self._asked.pop(peer, None)
        log.info("worker %s (%s) registered: %s", worker.name, worker.role, worker.names())
        self._rollouts.adopt(worker, message.states)
        unknown, wanted = self._adoption.reported(worker, message)
        answer = registered(self._state, worker, unknown, wanted)
        self._out.to_worker(worker, b"REGISTERED", answer)
        self._adoption.on_registered(worker)
        self._dispatcher.add(worker)
        self._drains.hand_over()

    def _gives_way(self, holder: Worker, message: Register) -> bool:
        """Whether a worker loses its name to another connection that registers with this name. This
        is so if the worker drains, or if the other connection is from the same process. It is also
        so if the worker's step hangs and the step of the other process does not.
        """
        if holder.process == process_of(message) or holder.state is WorkerState.DRAINING:
            return True
        age_s = message.step_age_s or 0.0
        return self._state.is_hung(holder) and age_s <= self._settings.hung_step_s

    def _contend(self, holder: Worker, peer: bytes, frames: list[bytes], now: float) -> None:
        """Handles another process that registers with the name of the worker ``holder``. The
        process receives the name when the holder is lost. The process is refused if the holder has
        sent a message since the process first registered."""
        contender = self._names.contend(holder.name, peer, frames, now)
        if holder.last_seen <= contender.since:
            # This heartbeat tests the holder's connection. If the connection has closed, sending
            # fails, and the holder's lease ends.
            self._out.append(Outgoing(_BACK, holder.peer, _BEAT, True))
            return
        error = taken(holder)
        if not contender.refused:
            contender.refused = True
            log.warning("a worker was refused: %s", error)
        self._out.to_worker(peer, b"ERROR", error_body(error))

    def _update(self, worker: Worker, message: Register) -> None:
        """Handles a changed registration: other models, patterns or tools, or another capacity."""
        pools = self._state.pools
        pools.remove(worker)
        worker.models = self._rollouts.current(message)
        worker.patterns = message.patterns
        worker.tools = {tool.name: tool for tool in message.tools}
        worker.default = message.default
        worker.capacity = message.capacity
        pools.add(worker)
        self._rollouts.adopt(worker, message.states)
        self._dispatcher.rebalance()
        self._drains.hand_over()

    def refuse(self, peer: bytes, name: str, error: TokenbusError) -> None:
        """Refuses the registration of a worker with ``error``. ``name`` is for the log."""
        log.warning("the worker %s was refused: %s", name, error)
        self._out.to_worker(peer, b"ERROR", error_body(error))

    def lose_unread(self, worker: Worker, error: Exception) -> None:
        """Handles a worker's message that cannot be read. Any stream of this worker may now miss
        tokens, so the worker counts as lost and all its streams move."""
        why = f"one of its messages cannot be read: {error}"
        self.lose(worker, Loss(why, died=True, returns=False))
        self.ask(worker.peer, "a message of this worker cannot be read", self._state.now)

    def lose(self, worker: Worker, loss: Loss) -> None:
        self.by_peer.pop(worker.peer, None)
        if self._by_name.get(worker.name) is worker:
            del self._by_name[worker.name]
        if worker.requests:
            self._state.counters.workers_lost += 1
        streams = [request for request in worker.requests.values() if request.open]
        self._dispatcher.remove(worker, loss)
        live, wait_s = self._state.requests, self._settings.move_wait_s
        log_end(worker, loss, streams, live, wait_s)
        self._adoption.on_lost(worker)
        self._drains.on_lost(worker)
        self._rollouts.on_lost(worker)
        contender = None if loss.replaced else self._names.left(worker.name, self._state.now)
        if contender is not None:
            self.on_register(contender.peer, contender.frames, self._state.now)
