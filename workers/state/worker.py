"""The state worker: applies operations on variables and tables of modules, and sends the answers.

The bus thread applies the operations of a burst together and sends their answers immediately. The
worker's own thread syncs and compacts the log.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from itertools import takewhile

from msgspec import DecodeError, Struct, msgpack

from ...protocol.bodies import decode_as
from ...protocol.decoders import msgpack_decoder
from ...protocol.errors import TokenbusError
from ...protocol.header import encode_header
from ...protocol.health_file import HealthFile
from ...protocol.keys import own_key
from ...protocol.messages import PROTOCOL_VERSION
from ...protocol.settings import Settings
from ...protocol.tenants import Tenant
from ...protocol.worker_messages import (
    End,
    LiveRequest,
    ModuleTable,
    Register,
    Registered,
    Variable,
    VariableAnswer,
)
from ..bus import LEASE_ENDED, Bus, FromBus
from ..machine import machine_memory
from ..variables import StorageLimits
from .durable import DurableVariables

log = logging.getLogger(__name__)

CAPACITY = 1_000_000
"""Maximum number of requests. In practice, the bound on bytes is reached first."""
ABSENT_S = 300.0
"""If no broker is known to have a request, the worker keeps the request's variables for this number
of seconds. The request may be moving to another broker, which may first have to wait for a
controller worker."""
VARIABLES_PART, TABLES_PART = 8, 32
"""Variables take at most 1/8 of this machine's memory. Tables of modules take at most 1/32. The log
may be on a file system in memory. It takes up to three times the bytes of variables and tables
together."""


class _Name(Struct, array_like=True):
    """The fields of an operation that the answer repeats."""

    request: int
    lineage: int
    count: int


_encode = msgpack.Encoder().encode
_operation = msgpack_decoder(Variable).decode
_name = msgpack_decoder(_Name).decode
_table = msgpack_decoder(ModuleTable).decode


class StateWorker:
    """The state worker. ``run`` serves until ``stop``."""

    def __init__(self, settings: Settings, name: str = "") -> None:
        """Replays the log; raises FolderError if its folder or a file in it cannot be used."""
        self._name = name or f"state-{socket.gethostname()}-{os.getpid()}"
        self._variables = DurableVariables(settings.run_folder / "state", _limits())
        self._bus = Bus(
            settings.back_endpoint,
            self._registration,
            self._load,
            self._on_messages,
            health=HealthFile(settings),
            key=own_key(settings, "worker"),
        )
        every = range(self._bus.num_links)
        self._links: dict[int, set[int]] = {
            request: set(every) for request in self._variables.requests
        }
        """For each request: the links to the brokers that may have the request. These are the links
        over which its operations came. For a request that was restored from the log, these are all
        links. A broker also reports a request as ended if the request has moved to another
        broker."""
        self._absent: dict[int, float] = {}
        """Requests that no broker is known to have. The values are the times at which the requests'
        last brokers dropped them, in seconds of the monotonic clock, the earliest first. Operations
        of such a request may still arrive over another link."""
        self._ops = 0
        self._stop_reason = ""

    def run(self) -> int:
        """Serves; returns 0."""
        self._bus.start()
        while not self._stop_reason:
            for message in self._bus.take(self._variables.maintain()):
                if message.type == b"DRAIN":
                    # The worker can stop at once: the operations before the DRAIN are applied, and
                    # the next state worker replays the log.
                    self.stop("the broker requested it")
                elif message.type != LEASE_ENDED:
                    # After LEASE_ENDED, the variables are kept, because the requests may continue
                    # at another broker.
                    log.warning(
                        "ignored a message of type %r, which a state worker does not handle",
                        message.type,
                    )
        log.info("stopping: %s", self._stop_reason)
        self._bus.close(self._stop_reason)
        self._variables.close()
        return 0

    def stop(self, reason: str, *, restarts: bool = False) -> None:
        """Stops the worker after the current operations; may be called from a signal handler.
        ``restarts`` has no effect: every state worker leaves its folder to the next state
        worker."""
        self._stop_reason = reason
        self._bus.interrupt()

    # --- on the bus thread ------------------------------------------------------------------------

    def _on_messages(self, messages: list[FromBus]) -> list[FromBus]:
        """Handles a burst of messages; consecutive operations share one write of the log."""
        others: list[FromBus] = []
        run: list[FromBus] = []
        for message in messages:
            if message.type == b"VARIABLE":
                run.append(message)
                continue
            self._do(run)
            run = []
            try:
                if message.type == b"MODULE_TABLE":
                    self._table(message)
                elif message.type == b"END":
                    end: End = decode_as(End, message.body, "msgpack")
                    elsewhere = end.elsewhere or (end.detached and self._several)
                    self._end(end.requests, message.link, elsewhere=elsewhere)
                elif message.type == b"REGISTERED":
                    answer: Registered = decode_as(Registered, message.body, "msgpack")
                    # A broker that was suspended may not have received the message that a request
                    # continues at another broker.
                    self._end(answer.unknown, message.link, elsewhere=self._several)
                    self._bus.registered(answer, message.link)
                else:
                    others.append(message)
            except (TokenbusError, DecodeError) as error:
                log.warning(
                    "a %r message that is not well-formed was dropped: %s", message.type, error
                )
            except Exception:
                # The bus thread continues, so that the other messages of the burst are answered.
                log.exception("the handling of a %r message failed", message.type)
        self._do(run)
        return others

    @property
    def _several(self) -> bool:
        """Whether there are several brokers. If so, a request that one broker has ended may
        continue at another broker."""
        return self._bus.num_links > 1

    def _end(self, requests: list[int], link: int, *, elsewhere: bool = False) -> None:
        """Handles requests that the broker of a link has ended or does not have. Drops their
        variables, unless another broker may have the requests. ``elsewhere``: whether the requests
        may continue at a broker that has not sent any of their operations yet."""
        over = []
        for request in requests:
            links = self._links.get(request, set())
            links.discard(link)
            if links:
                continue
            if elsewhere and self._variables.size(request):
                self._absent.setdefault(request, time.monotonic())
            elif not elsewhere:
                over.append(request)
        self._drop(over)

    def _drop_absent(self) -> None:
        """Drops the variables of requests that no broker has had for ``ABSENT_S``."""
        before = time.monotonic() - ABSENT_S
        self._drop(list(takewhile(lambda r: self._absent[r] < before, self._absent)))

    def _drop(self, requests: list[int]) -> None:
        """Drops the variables of requests that have ended."""
        for request in requests:
            self._links.pop(request, None)
            self._absent.pop(request, None)
        if requests:
            self._variables.end(requests)

    def _do(self, messages: list[FromBus]) -> None:
        """Applies operations and posts their answers."""
        if not messages:
            return
        ops: list[tuple[Variable, bytes]] = []
        tenants: list[Tenant | None] = []
        asked: list[FromBus] = []
        for message in messages:
            try:
                op = _operation(message.body)
            except (DecodeError, UnicodeDecodeError) as error:
                self._refuse(message, f"the operation is not well-formed: {error}")
                continue
            if op.request != message.header.request:
                self._refuse(
                    message,
                    f"the operation has request {op.request} in its body but request "
                    f"{message.header.request} in its header; both must be the same",
                )
                continue
            try:
                tenants.append(_tenant_of(message))
            except ValueError:
                self._refuse(message, "the tenant of the operation is not well-formed")
                continue
            ops.append((op, message.body))
            asked.append(message)
        try:
            answers = self._variables.apply(ops, tenants)
        except Exception as error:
            log.exception("%d operations failed", len(ops))
            text = f"the state worker failed: {error!r}"
            answers = [
                VariableAnswer(op.request, op.lineage, op.count, error=text) for op, _ in ops
            ]
        self._ops += len(answers)
        for message, answer in zip(asked, answers, strict=True):
            if self._variables.size(answer.request):
                self._links.setdefault(answer.request, set()).add(message.link)
                self._absent.pop(answer.request, None)
            self._post(message, answer)

    def _table(self, message: FromBus) -> None:
        """Reads or replaces the table of a tenant's modules, and posts the answer."""
        answer = self._variables.table(_table(message.body))
        header = encode_header(0, message.header.address)
        self._bus.post([b"MODULE_TABLE_ANSWER", header, _encode(answer)], message.link)

    def _refuse(self, message: FromBus, error: str) -> None:
        """Answers an operation with an error, if its ids can be decoded."""
        try:
            name = _name(message.body)
        except DecodeError:
            log.warning("a malformed VARIABLE was dropped: %s", error)
            return
        self._post(message, VariableAnswer(name.request, name.lineage, name.count, error=error))

    def _post(self, message: FromBus, answer: VariableAnswer) -> None:
        header = encode_header(message.header.request, message.header.address)
        self._bus.post([b"VARIABLE_ANSWER", header, _encode(answer)], message.link)

    def _registration(self) -> Register:
        return Register(
            name=self._name,
            role="state",
            version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            capacity=CAPACITY,
            live=[
                LiveRequest(request=request, session=0, stream_id=0)
                for request in self._variables.requests
            ],
        )

    def _load(self) -> tuple[int, dict[str, float]]:
        self._drop_absent()
        counts = self._variables.counts
        return counts.requests, {
            "requests": float(counts.requests),
            "variables": float(counts.variables),
            "bytes": float(counts.bytes),
            "log_bytes": float(counts.log_bytes),
            "ops": float(self._ops),
            "log_failures": float(self._variables.failures),
        }


def _tenant_of(message: FromBus) -> Tenant | None:
    """The tenant that the broker names in a message; None if the broker does not name a tenant.
    Raises ValueError if the tenant is not well-formed."""
    return Tenant.decode(message.attachments[-1]) if message.attachments else None


def _limits() -> StorageLimits:
    """The usual limits, or lower limits if this machine has less memory."""
    usual = StorageLimits()
    try:
        memory = machine_memory()
    except OSError:
        return usual
    return StorageLimits(
        total_bytes=min(usual.total_bytes, memory // VARIABLES_PART),
        table_bytes=min(usual.table_bytes, memory // TABLES_PART),
    )
