"""The workers' side of the broker: registrations, leases, and messages to clients."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

from ..protocol.bodies import decode_as, encode_body, error_body
from ..protocol.errors import Code, RequestError, ServiceError, TokenbusError
from ..protocol.header import Flag, decode_header, decode_manifest, encode_header
from ..protocol.messages import PROTOCOL_VERSION, Buffer
from ..protocol.packing import pack
from ..protocol.pages import split_keys
from ..protocol.tenants import Tenant
from ..protocol.worker_messages import (
    Claimed,
    Drain,
    Heartbeat,
    Journal,
    Pages,
    Refused,
    Register,
    Released,
    Reregister,
    Unregister,
)
from .adoption import Adoption
from .attaches import Attaches
from .buffers import Buffers
from .contested_names import ContestedNames, process_of, taken
from .dispatch import Dispatcher
from .drains import Drains
from .losses import log_end
from .outgoing import Outgoing, Outgoings, Side
from .quarantine import TRIAL_S
from .quotas import Quotas
from .recovery import Recovery
from .returns import Returns
from .revocations import NO_SESSION, overdue, registered
from .settings import BrokerSettings
from .status import Counters
from .sweep import Sweep
from .tables import Loss, SessionTable, Worker, WorkerState
from .withdrawn import without_withdrawn

log = logging.getLogger(__name__)

_FRONT, _BACK = Side.FRONT, Side.BACK
_BEAT = (b"HEARTBEAT", encode_header(), encode_body(Heartbeat(), "msgpack"))
LEASES_AT_ONCE = 1_000
"""Workers whose leases one tick checks."""
BEATS_AT_ONCE = 1_000
"""Workers to which one tick sends a heartbeat."""
RELAYED = frozenset(
    (
        b"STEP",
        b"RESULT",
        b"FETCH_TOKENIZER",
        b"TOKENIZER_JSON",
        b"VARIABLE",
        b"VARIABLE_ANSWER",
        b"MODULE_TABLE",
        b"MODULE_TABLE_ANSWER",
        b"FETCH_MODULE",
        b"MODULE_BYTES",
    )
)
"""Messages from one worker to another; the broker reads only their header."""


class Back:
    """Handles what workers send."""

    def __init__(
        self,
        settings: BrokerSettings,
        sessions: SessionTable,
        dispatcher: Dispatcher,
        buffers: Buffers,
        attaches: Attaches,
        adoption: Adoption,
        out: Outgoings,
        ids: Iterator[int],
        counters: Counters,
        drains: Drains,
        quotas: Quotas,
        recovery: Recovery,
    ) -> None:
        self._settings = settings
        self._attaches = attaches
        self._adoption = adoption
        self._returns = Returns(dispatcher, attaches, out)
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._keeps = sessions.recent.enabled
        self._keep = sessions.recent.pending.append
        self._buffers = buffers
        self._out = out
        self._ids = ids
        self._counters = counters
        self._drains = drains
        self._quotas = quotas
        self._recovery = recovery
        self._by_peer: dict[bytes, Worker] = {}
        self._by_name: dict[str, Worker] = {}
        self._leases = Sweep(self._by_peer, LEASES_AT_ONCE)
        self._unbeaten: deque[Worker] = deque()
        """Workers to which the broker's heartbeat is still to be sent."""
        self._beat_again = False
        """Whether another round of heartbeats starts as soon as this one is complete."""
        self._walked = float("inf")
        self._silent_since = float("inf")
        """When the longest silent worker sent its last message: ``_silent_since`` as of the last
        complete walk over the workers, ``_walked`` so far in the current walk."""
        self._asked: dict[bytes, float] = {}
        """By connection without a worker: when the broker last asked the peer to register. The
        broker asks at most once in ``heartbeat_s``, because each registration begins a new
        lease."""
        self._lost: dict[str, tuple[int, float]] = {}
        """By name of a worker that was silent or whose connection closed: the number of its
        process, which may still run, and the time of the loss."""
        self._names = ContestedNames(settings.expiry_s)
        self._stopped_until = float("-inf")
        """If this process was stopped, connections that close before this time do not show that
        their workers died."""
        self._last_beat = float("-inf")

    # --- events ---------------------------------------------------------------------------------

    def on_frames(self, peer: bytes, frames: list[bytes], now: float) -> None:
        """Handles one message of a worker."""
        worker = self._by_peer.get(peer)
        if worker is not None:
            worker.last_seen = now
        try:
            if len(frames) < 3:
                raise RequestError(
                    Code.BAD_MESSAGE,
                    f"this message has {len(frames)} frames; a worker's message has a type, a "
                    "header and a body",
                )
            message_type, head = frames[0], frames[1]
            if message_type == b"REGISTER":
                self._register(peer, frames, now)
            elif worker is None:
                self._recovery.follow()
                self._ask(peer, "this connection has no registered worker", now)
            elif worker.revoked and worker.is_revoked(decode_header(head).request):
                # The message belongs to an attempt that was revoked.
                pass
            elif message_type in (b"ERROR", b"MSG", b"SYSTEM"):
                self._pass_on(worker, message_type, head, frames)
            else:
                self._on_worker_message(worker, message_type, head, frames)
        except Exception as error:
            self._on_failure(worker, peer, frames, error)

    def on_tokens(
        self, peer: bytes, frames: list[bytes], now: float, received: list[bytes]
    ) -> None:
        """Routes the tokens of a step: one body for each client, passed on unread. ``received`` has
        the same frames, packed.

        This is the code of the broker that runs most often, so the method does only the necessary.
        """
        worker = self._by_peer.get(peer)
        if worker is None:
            self.on_frames(peer, frames, now)
            return
        worker.last_seen = now
        try:
            head = frames[1]
            if worker.manifest[0] != head:
                manifest = decode_manifest(head)
                found = list(map(self._sessions.by_id.get, manifest.sessions))
                worker.manifest = (head, manifest, found)
            _, (sessions, finished, deltas), found = worker.manifest
            if len(frames) != 2 + len(sessions) + len(deltas):
                raise RequestError(
                    Code.BAD_MESSAGE,
                    f"a manifest of {len(sessions)} bodies came with {len(frames)} frames",
                )
        except (TokenbusError, IndexError) as error:
            self._counters.bad_worker_messages += 1
            self._lose_unread(worker, error)
            return
        if worker.withdrawn:
            try:
                frames = without_withdrawn(frames, sessions, worker.withdrawn)
                received = pack(frames)
            except RequestError as error:
                self._lose_unread(worker, error)
                return
        known = self._sessions.by_id
        out = self._out
        for i, session in enumerate(found, 2):
            if session is None or not session.alive:
                session = known.get(sessions[i - 2])
            body = frames[i]
            if session is not None and body:
                out.tokens(session, body)
        if sessions and self._keeps:
            if len(received) == 1:
                self._keep(received[0])
            else:
                self._sessions.recent.keep(sessions, frames[2:])
        self._counters.token_bodies += len(sessions)
        for number in finished:
            try:
                request = self._dispatcher.requests.get(number)
                if request is None or request.worker is not worker:
                    continue
                if not worker.is_revoked(number):
                    self._attaches.on_finished(request)
            except Exception as error:
                self._on_failure(worker, peer, frames, error)

    def on_unreadable(self, peer: bytes, error: TokenbusError) -> None:
        """Handles a message whose frames cannot be separated, or that is in another version's
        form."""
        self._counters.bad_worker_messages += 1
        worker = self._by_peer.get(peer)
        if worker is None:
            self._refuse(peer, peer.hex(), error)
        else:
            self._lose_unread(worker, error)

    def on_gone(self, peer: bytes, now: float, unsent: Sequence[bytes] = ()) -> None:
        """Handles the end of a worker's connection: its lease ends. ``unsent`` is the message that
        could not be sent."""
        worker = self._by_peer.get(peer)
        if worker is None:
            self._names.on_gone(peer)
            return
        if unsent:
            request = worker.requests.get(decode_header(unsent[1]).request)
            if request is not None and request.type == unsent[0]:
                request.dispatched = None
        self._lost[worker.name] = worker.process, now
        self._lose(worker, Loss("its connection closed", died=now > self._stopped_until))

    def revoke(self, peer: bytes, error: TokenbusError, now: float) -> None:
        """Handles a message of a worker whose key was revoked. The worker's lease ends and its
        streams move; if it is not registered, its registration is refused."""
        worker = self._by_peer.get(peer)
        if worker is not None:
            self._lose(worker, Loss("its key was revoked", died=False))
            self._ask(peer, error.message, now)
        elif now - self._asked.get(peer, float("-inf")) >= self._settings.heartbeat_s:
            self._asked[peer] = now
            self._refuse(peer, peer.hex(), error)

    def renew(self, now: float) -> None:
        """Renews all leases, because messages that the workers have sent meanwhile were not read
        yet."""
        self._stopped_until = now + 2 * self._settings.heartbeat_s
        for worker in self._by_peer.values():
            worker.last_seen = now
            worker.renew_revocations(now)

    def tick(self, now: float) -> None:
        """Ends leases that were not renewed, and sends the broker's own heartbeat."""
        silent_since = self._walked
        for worker in self._leases.part():
            if self._by_peer.get(worker.peer) is not worker:
                continue
            if now - worker.last_seen > self._settings.expiry_s:
                why = f"no message for {now - worker.last_seen:.1f} s"
                self._lost[worker.name] = worker.process, now
                self._lose(worker, Loss(why, died=True))
            elif why := overdue(worker, self._settings, now):
                self._lose(worker, Loss(why, died=True, returns=False))
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
            self._unbeaten.extend(self._by_peer.values())
        self._beat_some()

    def _beat_some(self) -> None:
        for _ in range(min(len(self._unbeaten), BEATS_AT_ONCE)):
            worker = self._unbeaten.popleft()
            self._out.append(Outgoing(_BACK, worker.peer, _BEAT, True))
        if self._beat_again and not self._unbeaten:
            self._beat_again = False
            self._unbeaten.extend(self._by_peer.values())

    @property
    def behind(self) -> bool:
        """Whether heartbeats are left for the next tick."""
        return bool(self._unbeaten)

    @property
    def expires_at(self) -> float:
        """When the first lease ends if no message renews it; a lower bound."""
        return self._silent_since + self._settings.expiry_s

    def _ask(self, peer: bytes, reason: str, now: float) -> None:
        """Asks a connection without a worker to register."""
        if now - self._asked.get(peer, float("-inf")) >= self._settings.heartbeat_s:
            self._asked[peer] = now
            self._out.to_worker(peer, b"REREGISTER", Reregister(reason=reason))

    def _on_failure(
        self, worker: Worker | None, peer: bytes, frames: list[bytes], error: Exception
    ) -> None:
        """Handles a message that caused an error. If it belongs to a stream, the stream ends."""
        name = worker.name if worker is not None else peer.hex()
        if isinstance(error, TokenbusError | IndexError):
            self._counters.bad_worker_messages += 1
            log.warning("a message of worker %s was dropped: %s", name, error)
        else:
            self._counters.internal_errors += 1
            log.error("a defect of the broker: a message of %s failed", name, exc_info=error)
        try:
            header = decode_header(frames[1])
        except (TokenbusError, IndexError):
            return
        request = self._dispatcher.requests.get(header.request)
        if request is None or worker is None or worker not in (request.worker, request.steered_by):
            return
        failure = ServiceError(
            Code.INTERNAL,
            f"a message of the worker {name} about this stream could not be handled; the broker's "
            "log says why",
        )
        self._dispatcher.abandon(request, failure)
        if header.flags & Flag.FINAL:
            self._dispatcher.forget(request)

    # --- messages -------------------------------------------------------------------------------

    def _pass_on(
        self, worker: Worker, message_type: bytes, head: bytes, frames: list[bytes]
    ) -> None:
        header = decode_header(head)
        request = self._dispatcher.requests.get(header.request)
        if request is not None and worker not in (request.worker, request.steered_by):
            return
        if header.request and (request is None or not request.open):
            if request is not None and header.flags & Flag.FINAL:
                self._dispatcher.forget(request)
            return
        if request is not None and request.attaching and message_type == b"MSG":
            # The worker sends the entries that follow this answer a second time.
            request.session.journal.repeats(request.id, request.attaching.pop(0))
            self._dispatcher.moves.keep_bounds()
        if request is not None and header.flags & Flag.FINAL:
            self._dispatcher.ends.answered(request, (message_type, *frames[2:]))
            self._dispatcher.forget(request)
            return
        session = self._sessions.by_id.get(header.address)
        if session is not None and session.peer is not None:
            self._sessions.unread.add(session.peer, sum(map(len, frames[2:])))
            self._out.append(Outgoing(_FRONT, session.peer, (message_type, *frames[2:]), True))

    def _on_worker_message(
        self, worker: Worker, message_type: bytes, head: bytes, frames: list[bytes]
    ) -> None:
        if message_type in RELAYED:
            self._relay(worker, message_type, head, frames)
        elif message_type == b"HEARTBEAT":
            beat: Heartbeat = decode_as(Heartbeat, frames[2], "msgpack")
            hung = self._dispatcher.is_hung(worker)
            worker.step_age_s = beat.step_age_s
            worker.stepped_at = worker.last_seen - (beat.step_age_s or 0.0)
            worker.load, worker.metrics = beat.load, beat.metrics
            if beat.elsewhere != worker.elsewhere:
                self._count_elsewhere(worker, beat.elsewhere)
            if beat.sandbox_ms:
                self._quotas.on_sandbox(worker, beat.sandbox_ms, self._dispatcher.now)
            if self._dispatcher.is_hung(worker):
                if worker.requests:
                    why = f"its step has run for {beat.step_age_s:.0f} s"
                    self._lose(worker, Loss(why, died=True))
            elif hung:
                self._dispatcher.resume(worker)
        elif message_type == b"DRAIN":
            drain: Drain = decode_as(Drain, frames[2], "msgpack")
            self._drains.begin(worker, drain)
        elif message_type == b"UNREGISTER":
            gone: Unregister = decode_as(Unregister, frames[2], "msgpack")
            self._lose(worker, Loss(gone.reason or "it unregistered", died=False))
        elif message_type == b"JOURNAL":
            self._on_journal(worker, frames)
        elif message_type == b"CLAIMED":
            claimed: Claimed = decode_as(Claimed, frames[2], "msgpack")
            if worker.revoked and claimed.session == NO_SESSION:
                worker.confirmed()
            else:
                self._adoption.on_claimed(worker, claimed.session)
        elif message_type == b"RELEASED":
            released: Released = decode_as(Released, frames[2], "msgpack")
            self._adoption.on_released(worker, released.requests)
        elif message_type == b"REFUSED":
            self._on_refused(worker, head, frames)
        elif message_type == b"PAGES":
            pages: Pages = decode_as(Pages, frames[2], "msgpack")
            if len(frames) != 5:
                raise RequestError(
                    Code.BAD_MESSAGE,
                    f"this PAGES message has {len(frames)} frames; expected 5: type, header, body, "
                    "added pages, removed pages",
                )
            came, went = split_keys(frames[3]), split_keys(frames[4])
            self._dispatcher.prefixes.report(worker, came, went, pages.reset)
        elif message_type == b"BUFFER":
            self._save_buffer(head, frames)
        elif message_type == b"START":
            self._start_controller(worker, head, frames)
        else:
            shown = message_type[:40].decode("ascii", "backslashreplace")
            raise RequestError(Code.UNKNOWN_TYPE, f"{shown!r} is not a message type of workers")

    def _on_journal(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles the JOURNAL of a stream that a worker has reported, after the worker has
        returned or after the broker has restarted."""
        header = decode_header(frames[1])
        body: Journal = decode_as(Journal, frames[2], "msgpack")
        request = self._returns.awaits(header.request, worker)
        if request is None:
            if not body.gone:
                self._adoption.on_journal(worker, header, body, frames[3:], self._dispatcher.now)
            return
        try:
            self._returns.on_journal(request, body, b"".join(frames[3:4]))
        except RequestError as error:
            self._lose_unread(worker, error)

    def _count_elsewhere(self, worker: Worker, elsewhere: int) -> None:
        """Records how many requests of other brokers a worker runs."""
        worker.elsewhere, before = elsewhere, worker.elsewhere
        self._dispatcher.pools.note(worker)
        if elsewhere < before:
            self._dispatcher.resume(worker)
            self._dispatcher.controllers.fill(worker)

    def _on_refused(self, worker: Worker, head: bytes, frames: list[bytes]) -> None:
        """Handles REFUSED: a worker has no room for a message that the broker sent to it."""
        refused: Refused = decode_as(Refused, frames[2], "msgpack")
        request = self._dispatcher.requests.get(decode_header(head).request)
        worker.elsewhere = refused.elsewhere
        self._dispatcher.pools.note(worker)
        if request is None or len(frames) < 4:
            return
        if refused.type == "START":
            self._dispatcher.controllers.refused(request, worker, frames[3])
        else:
            self._dispatcher.refused(request, worker, frames[3:])

    def _register(self, peer: bytes, frames: list[bytes], now: float) -> None:
        message: Register = decode_as(Register, frames[2], "msgpack")
        if message.version != PROTOCOL_VERSION:
            self._counters.bad_worker_messages += 1
            error = RequestError(
                Code.UNSUPPORTED_VERSION,
                f"the worker {message.name} speaks version {message.version} of the protocol; this "
                f"broker speaks version {PROTOCOL_VERSION}; run broker and workers of one release",
            )
            self._refuse(peer, message.name, error)
            return
        known = self._by_peer.get(peer)
        if known is not None and message.update:
            self._update(known, message)
            self._out.to_worker(known, b"REGISTERED", registered(known, self._settings))
            return
        if message.update:
            # The worker's lease has ended without its knowledge. An update does not begin a lease:
            # the worker registers again and reports its requests.
            self._ask(peer, "this connection has no registered worker", now)
            return
        holder = self._by_name.get(message.name)
        if holder is not None and holder.peer != peer and not self._gives_way(holder, message):
            self._contend(holder, peer, frames, now)
            return
        for other in (known, holder):
            if other is not None and self._by_peer.get(other.peer) is other:
                why = "it registered again on a new connection"
                self._lose(other, Loss(why, died=False, replaced=True))
        worker = Worker(
            id=next(self._ids),
            peer=peer,
            name=message.name,
            role=message.role,
            pid=message.pid,
            host=message.host,
            capacity=message.capacity,
            models={m.name: m for m in message.models},
            patterns=message.patterns,
            default=message.default,
            last_seen=now,
            step_age_s=message.step_age_s,
            process=process_of(message),
            registration=message.registration,
        )
        self._by_peer[peer] = self._by_name[worker.name] = worker
        process, _ = self._lost.pop(worker.name, (0, 0.0))
        if process == worker.process:
            self._dispatcher.moves.quarantine.lives(worker.name)
        self._asked.pop(peer, None)
        log.info("worker %s (%s) registered: %s", worker.name, worker.role, worker.names())
        returned = self._returns.reported(worker, message)
        unknown, wanted = self._adoption.reported(worker, message, returned, now)
        answer = registered(worker, self._settings, unknown, wanted)
        self._out.to_worker(worker, b"REGISTERED", answer)
        self._adoption.on_registered(worker)
        self._dispatcher.add(worker)
        self._drains.hand_over()

    def _gives_way(self, holder: Worker, message: Register) -> bool:
        """Whether a worker gives up its name to another connection that registers with it.

        It does if the process is the same, if the worker drains, or if its step hangs and the other
        process's step does not.
        """
        if holder.process == process_of(message) or holder.state is WorkerState.DRAINING:
            return True
        age_s = message.step_age_s or 0.0
        return self._dispatcher.is_hung(holder) and age_s <= self._settings.hung_step_s

    def _contend(self, holder: Worker, peer: bytes, frames: list[bytes], now: float) -> None:
        """Handles another process that registers with the name of a worker. It receives the name if
        that worker is lost, and is refused if that worker proves to be alive."""
        contender = self._names.contend(holder.name, peer, frames, now)
        if holder.last_seen <= contender.since:
            # If the worker's connection has closed, this send fails, and its lease ends.
            self._out.append(Outgoing(_BACK, holder.peer, _BEAT, True))
            return
        error = taken(holder)
        if not contender.refused:
            contender.refused = True
            log.warning("a worker was refused: %s", error)
        self._out.to_worker(peer, b"ERROR", error_body(error))

    def _update(self, worker: Worker, message: Register) -> None:
        """Handles a change of a worker's models, which were loaded or unloaded."""
        pools = self._dispatcher.pools
        pools.remove(worker)
        worker.models = {m.name: m for m in message.models}
        worker.patterns = message.patterns
        worker.default = message.default
        worker.capacity = message.capacity
        pools.add(worker)
        self._dispatcher.rebalance()
        self._drains.hand_over()

    def _relay(self, worker: Worker, message_type: bytes, head: bytes, frames: list[bytes]) -> None:
        """Passes a message from one worker to another. The sender replaces the receiver as the
        address in its header."""
        header = decode_header(head)
        controllers = self._dispatcher.controllers
        tenant: Tenant | None = None
        receivers: list[Worker | None]
        if message_type in (b"VARIABLE", b"MODULE_TABLE"):
            # Without a state worker the message is dropped; the controller worker sends it again.
            receivers = [controllers.state_worker()]
            if message_type == b"VARIABLE":
                tenant = self._quotas.variables(self._dispatcher.requests.get(header.request))
        elif message_type == b"FETCH_MODULE" and not header.address:
            receivers = [other for other in controllers.of_modules() if other is not worker]
        else:
            receivers = [self._dispatcher.workers.get(header.address)]
        sent_by = encode_header(header.request, worker.id, header.flags)
        whose = () if tenant is None else (tenant.encode(),)
        for receiver in receivers:
            if receiver is not None:
                sent = (message_type, sent_by, *frames[2:], *whose)
                self._out.append(Outgoing(_BACK, receiver.peer, sent, True))

    def _start_controller(self, worker: Worker, head: bytes, frames: list[bytes]) -> None:
        """Sends the START of a controller to a controller worker, when a GPU worker begins its
        request."""
        request = self._dispatcher.requests.get(decode_header(head).request)
        if request is None or request.worker is not worker or not request.open:
            return
        if request.controller_started or not request.controller:
            return
        self._dispatcher.controllers.start(request, frames[2], self._dispatcher.now)

    def _save_buffer(self, head: bytes, frames: list[bytes]) -> None:
        """Stores the tokens of a stream with ``save``, which is about to end, as a buffer of its
        session."""
        message: Buffer = decode_as(Buffer, frames[2], "msgpack")
        header = decode_header(head)
        session = self._sessions.by_id.get(header.address)
        if session is None:
            return
        try:
            self._buffers.keep(session, message.name, frames[3])
        except TokenbusError as error:
            request = self._dispatcher.requests.get(header.request)
            if request is not None:
                error.path = "$.save"
                self._dispatcher.abandon(request, error)

    def _refuse(self, peer: bytes, name: str, error: TokenbusError) -> None:
        """Refuses a connection that cannot register here, with the reason."""
        log.warning("the worker %s was refused: %s", name, error)
        self._out.to_worker(peer, b"ERROR", error_body(error))

    def _lose_unread(self, worker: Worker, error: Exception) -> None:
        """Handles a message of a worker that cannot be read. Any stream of this worker may now miss
        tokens, so the worker counts as lost and all its streams move."""
        why = f"one of its messages cannot be read: {error}"
        self._lose(worker, Loss(why, died=True, returns=False))
        self._ask(worker.peer, "a message of this worker cannot be read", self._dispatcher.now)

    def _lose(self, worker: Worker, loss: Loss) -> None:
        self._by_peer.pop(worker.peer, None)
        if self._by_name.get(worker.name) is worker:
            del self._by_name[worker.name]
        if worker.requests:
            self._counters.workers_lost += 1
        streams = [request for request in worker.requests.values() if request.open]
        self._dispatcher.remove(worker, loss)
        live, wait_s = self._dispatcher.requests, self._settings.move_wait_s
        log_end(worker, loss, streams, live, wait_s)
        self._adoption.on_lost(worker)
        self._drains.on_lost(worker)
        contender = None if loss.replaced else self._names.left(worker.name, self._dispatcher.now)
        if contender is not None:
            self._register(contender.peer, contender.frames, self._dispatcher.now)
