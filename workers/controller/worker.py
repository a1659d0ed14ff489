"""The controller worker: takes steps from GPU workers, plays rounds, sends what comes of them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from ...protocol.bodies import Encoding, decode_as, encode_body, error_body
from ...protocol.errors import Code, RequestError, TokenbusError
from ...protocol.header import Flag, Header, encode_header
from ...protocol.messages import (
    PROTOCOL_VERSION,
    Delete,
    Msg,
    Tag,
    Tags,
    Upload,
)
from ...protocol.settings import Settings
from ...protocol.worker_messages import (
    ANY_MODULE,
    End,
    LiveRequest,
    Register,
    Registered,
    Start,
    Step,
    StepResult,
    TokenizerAnswer,
    TokenizerRequest,
)
from ..bus import Bus, FromBus
from .interface import Program
from .limits import Limits
from .masks import MaskFiles
from .pool import Job, Pool
from .programs import Programs
from .replies import Reply
from .rounds import ControlledSequence
from .sequence_group import Play, SequenceGroup
from .tokens.tokenizers import Vocabularies
from .tokens.vocabulary import TokenizerVocabulary
from .variable_calls import VariableCalls
from .wasm.sandbox import TICK_S, make_engine
from .wasm.store import ModuleStore

log = logging.getLogger(__name__)

IDLE_S = 0.25
SLOW_S = 0.0005
"""A round that took this long is given a thread of its own the next time."""
SWITCH_S = 0.0005
"""For how long a thread keeps Python's lock while others want it, in seconds: a round takes it a
few times, and beside a long call of a host function (a text of a megabyte that becomes tokens) it
would wait for Python's usual 5 ms each time."""

_decode_step = msgspec.msgpack.Decoder(Step).decode


def limits_of(settings: Settings) -> Limits:
    """The limits that the settings give."""
    return Limits(
        init_s=settings.controller_init_ms / 1000,
        pre_s=settings.controller_pre_ms / 1000,
        mid_s=settings.controller_mid_ms / 1000,
        post_s=settings.controller_post_ms / 1000,
        memory_bytes=settings.controller_memory_bytes,
        forks=settings.controller_forks,
    )


class ControllerWorker:
    """One process of controllers. ``run`` serves until ``stop``.

    ``programs``: Python controllers to serve by their names; with them, this worker takes no
    modules. All others share the store of modules in the run directory.
    """

    def __init__(
        self, settings: Settings, name: str = "", programs: Mapping[str, Program] | None = None
    ) -> None:
        self._settings = settings
        self._name = name or f"controller-{socket.gethostname()}-{os.getpid()}"
        self._limits = limits_of(settings)
        self._engine = make_engine(self._limits)
        self._serves = list(programs) if programs else [ANY_MODULE]
        folder = settings.run_folder / "modules"
        self._store = None if programs else ModuleStore(folder, self._limits, self._engine)
        kept = settings.run_folder / "grammars"
        self._programs = Programs(self._engine, self._store, programs or {}, kept)
        cpus = os.cpu_count() or 1
        self._pool = Pool(settings.controller_threads or max(4, 2 * cpus))
        self._starts = Pool(max(8, cpus // 2), "starts")
        """Threads of their own: a start may take a second, where it waits for a grammar to be
        compiled even more, and no round waits behind one."""
        self._store_calls = ThreadPoolExecutor(2, "store")
        self._bus = Bus(settings.back_endpoint, self._registration, self._load, self._at_once)
        self._calls = VariableCalls(self._bus.post)
        self._vocabularies = Vocabularies(self._ask_tokenizer)
        self._masks = MaskFiles()
        self._sessions: dict[int, SequenceGroup] = {}
        self._order = threading.Lock()
        self._replies: list[Reply] = []
        """Those that are not complete, as far as is known; under ``_listed``."""
        self._listed = threading.Lock()
        self._rounds = 0
        self._stop_reason = ""
        self._draining_since: float | None = None

    # --- the loop -------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves; the exit code."""
        sys.setswitchinterval(SWITCH_S)
        self._bus.start()
        while not self._done():
            for message in self._bus.take(TICK_S if self._busy else IDLE_S):
                try:
                    self._on_message(message)
                except Exception:
                    word = message.type.decode("ascii", "replace")
                    log.exception("a %s message was dropped", word)
            if self._busy:
                self._tick()
        self._bus.close(self._stop_reason)
        self._programs.close()
        return 0

    def stop(self, reason: str) -> None:
        """Takes no more requests, finishes those it has, and ends; callable from a signal."""
        self._stop_reason = reason
        self._bus.interrupt()

    def _done(self) -> bool:
        if not self._stop_reason:
            return False
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            self._bus.drain(self._stop_reason)
        late = time.monotonic() - self._draining_since > self._settings.drain_s
        return late or not self._sessions

    @property
    def _busy(self) -> bool:
        return self._pool.busy or self._starts.busy

    def _tick(self) -> None:
        """Rounds are under way: guests are looked at, late ones are not waited for."""
        self._engine.increment_epoch()
        self._pool.help()
        self._starts.help()
        now = time.monotonic()
        with self._listed:
            self._replies = [reply for reply in self._replies if not reply.complete]
            waiting = list(self._replies)
        for reply in waiting:
            reply.flush(now)

    def _at_once(self, messages: list[FromBus]) -> list[FromBus]:
        """On the bus thread: answers for guests that wait."""
        rest = []
        for message in messages:
            if message.type == b"VARIABLE_ANSWER":
                self._calls.on_answer(message.body)
            else:
                rest.append(message)
        return rest

    # --- messages -------------------------------------------------------------------------------

    def _on_message(self, message: FromBus) -> None:
        match message.type:
            case b"STEP":
                self._step(message.header.address, _decode_step(message.body))
            case b"START":
                start = decode_as(Start, message.body, "msgpack")
                self._start(message.header, start, message.attachments[0].decode())
            case b"END":
                for request in decode_as(End, message.body, "msgpack").requests:
                    self._end(request)
            case b"REGISTERED":
                for request in decode_as(Registered, message.body, "msgpack").unknown:
                    self._end(request)
            case b"TOKENIZER_JSON":
                answer = decode_as(TokenizerAnswer, message.body, "msgpack")
                json = message.attachments[0] if message.attachments else None
                self._starts.submit(
                    [partial(self._arrived, answer.fingerprint, json, answer.error or "")]
                )
            case b"UPLOAD" | b"TAG" | b"TAGS" | b"DELETE":
                self._store_calls.submit(self._stored, message)
            case b"DRAIN":
                self.stop("the broker asked for it")
            case _:
                log.warning("a controller worker does not know the type %r", message.type)

    def _start(self, header: Header, start: Start, tenant: str) -> None:
        """A request begins: its vocabulary first, then its controller."""
        session = SequenceGroup(
            header.request,
            header.address,
            self._limits,
            _arg_bytes(start.arg),
            start.max_tokens,
            start.ignore_eos,
            self._calls.ask,
        )
        self._sessions[header.request] = session

        def ready(vocabulary: TokenizerVocabulary | None, error: str) -> None:
            reply = self._reply(session.gpu, 1)
            self._starts.submit(
                [partial(self._begin, reply, session, start, tenant, vocabulary, error)]
            )

        self._vocabularies.want(start.vocabulary, header.address, ready)

    def _begin(
        self,
        reply: Reply,
        session: SequenceGroup,
        start: Start,
        tenant: str,
        vocabulary: TokenizerVocabulary | None,
        error: str,
    ) -> None:
        try:
            if vocabulary is None:
                raise RequestError(Code.UNSUPPORTED, error, path="$.controller")
            program = self._programs.get(tenant, start.controller)
            results = session.begin(program, vocabulary, start.prompt, start.n)
        except TokenbusError as failed:
            results = [_failed(session.request, failed.message, failed.code)]
        except Exception as failed:
            log.exception("the controller %s cannot be started", start.controller)
            results = [_failed(session.request, f"the controller worker failed: {failed!r}")]
        reply.add(session, results)

    def _step(self, gpu: int, step: Step) -> None:
        """A step of a GPU worker: a round of each of its sequences."""
        rows = None
        if step.masks:
            rows = self._masks.get(step.masks, step.rows, step.row_bytes)
        plays: list[tuple[SequenceGroup, ControlledSequence, Play]] = []
        for told in step.sequences:
            session = self._sessions.get(told.request)
            if session is None:
                continue
            found = session.step(told.seq, told.tokens, told.ended is not None, rows)
            if found is not None:
                plays.append((session, *found))
        if not plays:
            return
        self._rounds += len(plays)
        reply = self._reply(gpu, len(plays))
        jobs: list[Job] = [
            partial(_played, reply, session, sequence, play) for session, sequence, play in plays
        ]
        self._pool.submit(jobs, 1 + sum(sequence.slow for _, sequence, _ in plays))

    def _reply(self, gpu: int, parts: int) -> Reply:
        reply = Reply(gpu, parts, self._bus.post, self._go_on, self._order)
        with self._listed:
            self._replies.append(reply)
            if len(self._replies) > 64:
                self._replies = [r for r in self._replies if not r.complete]
        return reply

    def _go_on(self, session: SequenceGroup, plays: list[Play], failed: list[StepResult]) -> None:
        """What follows of results that are on their way: who is woken, who waits for nothing."""
        if failed:
            self._reply(session.gpu, 1).add(session, failed)
        if plays:
            reply = self._reply(session.gpu, len(plays))
            self._pool.submit([partial(_woken, reply, session, play) for play in plays])

    def _end(self, request: int) -> None:
        session = self._sessions.pop(request, None)
        if session is not None:
            session.close()
            self._pool.submit([session.free])

    # --- tokenizers and modules -----------------------------------------------------------------

    def _ask_tokenizer(self, fingerprint: str, gpu: int) -> None:
        body = encode_body(TokenizerRequest(fingerprint=fingerprint), "msgpack")
        self._bus.post([b"TOKENIZER", encode_header(0, gpu), body])

    def _arrived(self, fingerprint: str, json: bytes | None, error: str) -> None:
        self._vocabularies.arrived(fingerprint, json, error)

    def _stored(self, message: FromBus) -> None:
        """A request to the store of modules; the last attachment is the client's tenant."""
        header = message.header
        encoding: Encoding = "msgpack" if header.flags & Flag.MSGPACK else "json"
        head = encode_header(header.request, header.address, Flag.FINAL)
        stream_id = decode_as(Tags, message.body).stream_id
        try:
            *attachments, tenant = message.attachments
            result = self._store_answer(message, attachments, tenant.decode())
            answer = Msg(stream_id=stream_id, result=result)
            frames = [b"MSG", head, encode_body(answer, encoding)]
        except TokenbusError as error:
            frames = [b"ERROR", head, encode_body(error_body(error, stream_id), encoding)]
        except Exception as error:
            log.exception("a request to the store failed")
            failure = TokenbusError(Code.INTERNAL, f"the store failed: {error!r}")
            frames = [b"ERROR", head, encode_body(error_body(failure, stream_id), encoding)]
        self._bus.post(frames)

    def _store_answer(self, message: FromBus, attachments: list[bytes], tenant: str) -> Any:
        assert self._store is not None
        match message.type:
            case b"UPLOAD":
                upload = decode_as(Upload, message.body)
                wasm = upload.data if upload.data is not None else b"".join(attachments[:1])
                return self._store.put(tenant, wasm, upload.tag)
            case b"TAG":
                tag = decode_as(Tag, message.body)
                return self._store.tag(tenant, tag.module, tag.tags)
            case b"DELETE":
                return self._store.delete(tenant, decode_as(Delete, message.body).module)
            case _:
                return self._store.list(tenant)

    # --- what the broker is told (on the bus thread) ----------------------------------------------

    def _registration(self) -> Register:
        live = [
            LiveRequest(request=request, session=0, stream_id=0) for request in list(self._sessions)
        ]
        return Register(
            name=self._name,
            role="controller",
            version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            capacity=self._settings.controller_capacity,
            patterns=self._serves,
            live=live,
        )

    def _load(self) -> tuple[int, dict[str, float]]:
        return len(self._sessions), {
            "rounds": float(self._rounds),
            "sessions": float(len(self._sessions)),
            "waiting": float(self._pool.waiting_jobs + self._starts.waiting_jobs),
        }


def _played(reply: Reply, session: SequenceGroup, sequence: ControlledSequence, play: Play) -> None:
    began = time.perf_counter()
    results = play()
    sequence.slow = time.perf_counter() - began > SLOW_S
    reply.add(session, results)


def _woken(reply: Reply, session: SequenceGroup, play: Play) -> None:
    reply.add(session, play())


def _failed(request: int, message: str, code: str = Code.INTERNAL) -> StepResult:
    return StepResult(request, 0, "error", error=message, code=str(code))


def _arg_bytes(arg: str | dict[str, Any] | list[Any] | None) -> bytes:
    if arg is None:
        return b""
    return arg.encode() if isinstance(arg, str) else msgspec.json.encode(arg)
