"""The controller worker: receives STEP, runs a round of each sequence of the STEP, and sends
RESULT."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...protocol import logs
from ...protocol.bodies import Encoding, decode_as, encode_body, error_body
from ...protocol.decoders import msgpack_decoder
from ...protocol.errors import Code, TokenbusError, UnavailableError
from ...protocol.guest_user import GuestUser
from ...protocol.header import Flag, decode_header, encode_header
from ...protocol.health_file import HealthFile
from ...protocol.keys import own_key
from ...protocol.messages import (
    PROTOCOL_VERSION,
    Delete,
    Msg,
    Tag,
    Tags,
    Upload,
)
from ...protocol.metrics import Series
from ...protocol.settings import Settings
from ...protocol.tenants import Tenant, owner_of
from ...protocol.worker_messages import (
    ANY_MODULE,
    End,
    FetchModule,
    FetchTokenizer,
    LiveRequest,
    ModuleBytes,
    Register,
    Registered,
    Result,
    Start,
    Step,
    StepResult,
    StepSequence,
    TokenizerAnswer,
    Variable,
    VariableAnswer,
)
from .. import bus
from ..bus import Bus, FromBus, refused_frames
from ..machine import machine_id, machine_memory
from ..successor import successor_comes
from .backends.compiling.bounds import Bounds
from .backends.constraints import Constraints
from .first_rounds import FirstRounds
from .guest_memory import GuestMemory
from .guests.runtime import ProcessRuntime
from .guests.setup import Setup
from .idle_groups import IdleGroups
from .limits import Limits
from .masks import MaskFiles, MaskRows
from .meters import Meters
from .module_calls import ModuleCalls
from .pending_result import FLUSH_S, WOKEN_FLUSH_S, PendingResult
from .pool import Pool
from .programs import Programs
from .python.printed import captured
from .request_variables import UNCONFIRMED_BYTES, RequestVariables
from .round_events import RoundEvents
from .round_jobs import Begun, round_jobs, run_woken
from .runtime import GuestRuntime, ThreadRuntime
from .sequence_group import GroupBusy, Round, SequenceGroup
from .store_requests import StoreRequests
from .tokens.tokenizers import Vocabularies
from .tokens.vocabulary import TokenizerVocabulary
from .tool_calls import GroupTools, ToolCalls
from .variable_calls import VariableCalls
from .wasm.sandbox import TICK_S, make_engine
from .wasm.store import ModuleStore

log = logging.getLogger(__name__)

IDLE_S = 0.25
GUESTS_PART = 2
"""All guests of this machine's controller workers together may use 1 / GUESTS_PART of the machine's
memory."""
SWITCH_S = 0.0005
"""Seconds for which a thread keeps the GIL while other threads need it (``sys.setswitchinterval``).
A round takes the GIL a few times. With Python's default of 5 ms, the round would wait 5 ms each
time if another thread runs long Python code."""

_decode_step = msgpack_decoder(Step).decode


def limits_of(settings: Settings) -> Limits:
    """The limits from the settings."""
    return Limits(
        init_s=settings.controller_init_ms / 1000,
        pre_s=settings.controller_pre_ms / 1000,
        mid_s=settings.controller_mid_ms / 1000,
        post_s=settings.controller_post_ms / 1000,
        script_s=settings.controller_script_ms / 1000,
        fuel_per_ms=settings.controller_fuel_per_ms,
        memory_bytes=settings.controller_memory_bytes,
        forks=settings.controller_forks,
        idle_wakes=settings.controller_idle_wakes,
        compile_s=settings.grammar_compile_s,
        compile_bytes=settings.grammar_compile_bytes,
    )


_Stepped = tuple[StepSequence, SequenceGroup]
"""A sequence of a STEP, and its group."""


class _Attempt(msgspec.Struct):
    """The field ``attempt`` of a START. A worker that refuses the START needs no other field."""

    attempt: int = 0


class ControllerWorker:
    """One controller worker process. ``run`` serves until ``stop``.

    ``served``: the runtime of Python controllers; a worker with such controllers serves only these.
    Workers without ``served`` share the store of modules in the run directory.
    """

    def __init__(
        self, settings: Settings, name: str = "", served: GuestRuntime | None = None
    ) -> None:
        self._settings = settings
        self._name = name or f"controller-{socket.gethostname()}-{os.getpid()}"
        self._limits = limits_of(settings)
        self._engine = make_engine(self._limits)
        self._guest_memory = GuestMemory(
            machine_memory() // GUESTS_PART // max(1, settings.controller_workers)
        )
        self._serves = list(served.names) if served is not None else [ANY_MODULE]
        self._module_calls = ModuleCalls(self._post, self._post_once)
        folder = settings.run_folder / "modules"
        self._store = (
            ModuleStore(folder, self._limits, self._engine, self._module_calls)
            if served is None
            else None
        )
        self._programs = (
            self._stored_programs() if served is None else self._served_programs(served)
        )
        cpus = os.cpu_count() or 1
        self._pool = Pool(settings.controller_threads or max(4, 2 * cpus))
        self._starts = Pool(max(8, cpus // 2), "starts")
        """Threads that handle START messages. Handling a START may take a second, or longer if a
        grammar must be compiled. So the threads of rounds do not handle START messages."""
        self._flushes = Pool(1, "results")
        """Sends the results that are ready while slower rounds of the same step run. A separate
        thread does this, because sending may wait for other results that are being sent."""
        self._store_requests = StoreRequests(self._serve_store)
        self._sends = ThreadPoolExecutor(1, "modules")
        """Reads and sends modules that controller workers on other machines need. These jobs do not
        wait for other workers."""
        self._meters = Meters()
        self._bus = Bus(
            settings.back_endpoint,
            self._registration,
            self._load,
            self._take_answers,
            self._series,
            HealthFile(settings),
            own_key(settings, "worker"),
            self._meters.cpu_ms,
            elsewhere=self._elsewhere,
        )
        self._first_rounds = FirstRounds(self._programs, self._meters, self._starts, self._pool)
        self._variable_calls = VariableCalls(
            self._bus.post, lambda frames, link: self._bus.post(frames, link, False)
        )
        self._unconfirmed = GuestMemory(UNCONFIRMED_BYTES)
        """Counts the bytes of operations on variables that the state worker has not confirmed, for
        each owner of guests."""
        self._tool_calls = ToolCalls(self._bus.post)
        self._records = Pool(2, "records", max_waiting=0)
        """Writes the answers of tools into variables."""
        self._vocabularies = Vocabularies(self._request_tokenizer)
        self._idle = IdleGroups(self._wake_idle)
        self._masks = MaskFiles()
        self._groups: dict[tuple[int, int], SequenceGroup] = {}
        """The groups by link and request. A *group* has the sequences of one request. A *link* is
        the number of the connection to a broker. Two brokers may have the same request for a
        while."""
        self._order = threading.Lock()
        self._pending: list[PendingResult] = []
        """Results that are being collected, protected by ``_pending_lock``. Complete results are
        removed from time to time."""
        self._pending_lock = threading.Lock()
        self._missing_layers: list[str] = []
        self._rounds_started = 0
        self._stop_reason = ""
        self._restarts = False
        """If true, ``_done`` asks supervisord if a successor of this process will be started.
        ``stop`` sets this flag."""
        self._draining_since: float | None = None
        self._handed_over: set[int] = set()
        """The links of the brokers that have sent HANDOVER. Other workers take over the controllers
        of these brokers' requests."""

    def _stored_programs(self) -> Programs:
        most, name = self._settings.guest_processes, self._settings.guest_user
        runtime: GuestRuntime = ThreadRuntime(self._engine)
        if most:
            setup = Setup(self._limits, user=GuestUser.named(name) if name else None)
            runtime = ProcessRuntime(setup, most)
        constraints = self._constraints(self._settings.run_folder / "grammars")
        return Programs(runtime, self._store, constraints)

    def _served_programs(self, served: GuestRuntime) -> Programs:
        # A worker with Python controllers does not store compiled grammars on disk, so it has no
        # folder for them.
        return Programs(served, None, self._constraints(None))

    def _constraints(self, folder: Path | None) -> Constraints:
        bounds = Bounds(self._limits.compile_s, self._limits.compile_bytes)
        return Constraints(self._engine, folder, bounds)

    # --- the loop -------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until ``stop``; returns the exit code. Meanwhile, output of Python controllers
        goes to the logs of their sequences."""
        with captured() if self._store is None else contextlib.nullcontext():
            return self._serve()

    def _serve(self) -> int:
        sys.setswitchinterval(SWITCH_S)
        self._missing_layers = self._programs.missing_layers()
        self._bus.start()
        while not self._done():
            for message in self._bus.take(TICK_S if self._busy else IDLE_S):
                try:
                    self._on_message(message)
                except Exception as error:
                    kind = message.type.decode("ascii", "replace")
                    log.exception("the handling of a %s message failed", kind)
                    if message.type == b"START":
                        self._refuse_start(message, error)
            try:
                self._vocabularies.retry()
                self._tool_calls.expire(time.monotonic())
                self._variable_calls.send_again(time.monotonic())
                self._programs.tick()
                if self._busy:
                    self._tick()
            except Exception:
                # The loop continues, because guests have no time limits without ticks.
                log.exception("a tick of the worker failed")
        self._bus.close(self._stop_reason)
        self._programs.close()
        self._store_requests.close()
        self._records.close()
        self._sends.shutdown(wait=False)
        self._idle.close()
        self._starts.close()
        self._pool.close()
        self._flushes.close()
        return 0

    def stop(self, reason: str, *, restarts: bool = False) -> None:
        """Drains: stops accepting requests, and finishes the running requests. May be called from a
        signal handler. ``restarts``: whether the controllers are handed over to a successor, if
        supervisord will start one."""
        self._stop_reason = reason
        self._restarts = restarts
        self._bus.interrupt()

    def _done(self) -> bool:
        if not self._stop_reason:
            return False
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            self._bus.drain(self._stop_reason, self._restarts and successor_comes())
        expired = time.monotonic() - self._draining_since > self._settings.drain_s
        return expired or {link for link, _ in self._groups} <= self._handed_over

    @property
    def _busy(self) -> bool:
        return self._pool.busy or self._starts.busy

    def _tick(self) -> None:
        """Called while rounds run: enforces time limits, and sends the results that are ready."""
        self._engine.increment_epoch()
        self._pool.help()
        self._starts.help()
        now = time.monotonic()
        with self._pending_lock:
            self._pending = [pending for pending in self._pending if not pending.complete]
            incomplete = list(self._pending)
        for pending in incomplete:
            if pending.due(now):
                self._flushes.submit([pending.flush])

    def _take_answers(self, messages: list[FromBus]) -> list[FromBus]:
        """Passes answers to the calls that wait for them; called on the bus thread."""
        rest = []
        for message in messages:
            try:
                if message.type == b"VARIABLE_ANSWER":
                    self._variable_calls.on_answer(message.body, message.link)
                elif message.type == b"CALL_ANSWER":
                    self._tool_calls.on_answer(message.body, message.link)
                elif message.type in (b"MODULE_TABLE_ANSWER", b"MODULE_BYTES"):
                    self._module_calls.on_answer(message)
                else:
                    rest.append(message)
            except TokenbusError as error:
                # The call still waits for an answer. It is sent again, or fails at its time limit.
                log.warning("a malformed %s was dropped: %s", message.type.decode(), error)
        return rest

    # --- messages -------------------------------------------------------------------------------

    def _on_message(self, message: FromBus) -> None:
        match message.type:
            case b"STEP":
                self._step(message, _decode_step(message.body))
            case b"START":
                self._begin(message)
            case b"END":
                for request in decode_as(End, message.body, "msgpack").requests:
                    self._end(message.link, request)
            case bus.LEASE_ENDED:
                self._end_all(message.link)
            case b"REGISTERED":
                # Messages may have been lost before the worker registered again, so the GPU workers
                # restart all controllers of this broker, here or on another worker.
                self._end_all(message.link)
                answer = decode_as(Registered, message.body, "msgpack")
                self._bus.registered(answer, message.link)
            case b"TOKENIZER_JSON":
                tokenizer = decode_as(TokenizerAnswer, message.body, "msgpack")
                json = message.attachments[0] if message.attachments else None
                arrived, error = self._vocabularies.arrived, tokenizer.error or ""
                self._starts.submit([partial(arrived, tokenizer.fingerprint, json, error)])
            case b"UPLOAD" | b"TAG" | b"TAGS" | b"DELETE":
                try:
                    self._store_requests.add(_store_owner(message), message)
                except UnavailableError as error:
                    self._serve_store(message, error)
            case b"FETCH_MODULE":
                self._sends.submit(self._send_module, message)
            case b"INPUTS":
                group = self._groups.get((message.link, message.header.request))
                if group is not None:
                    # The main loop must not wait for the lock of a group.
                    self._pool.submit([partial(self._wake_by_input, group)], tenant=group.tenant)
            case b"HANDOVER":
                self._handed_over.add(message.link)
            case b"DRAIN":
                self.stop("the broker requested it")
            case _:
                log.warning("dropped a message of the unknown type %r", message.type)

    def _begin(self, message: FromBus) -> None:
        """Handles START. Refuses the request if the worker is full and some of its controllers
        belong to requests of other brokers."""
        start = decode_as(Start, message.body, "msgpack")
        elsewhere = self._elsewhere(message.link) if self._bus.num_links > 1 else 0
        if elsewhere and len(self._groups) >= self._settings.controller_capacity:
            self._bus.post(refused_frames(message, elsewhere), message.link)
            return
        tenant, owner = message.attachments[0].decode(), owner_of(message.attachments)
        self._start(message, start, tenant, owner)

    def _start(self, message: FromBus, start: Start, tenant: str, owner: str) -> None:
        """Gets the vocabulary, creates the controller and runs its first round. ``owner``: the
        owner of the request's guests. This is the tenant, or the session if clients do not have
        keys."""
        header, link = message.header, message.link
        memory = self._guest_memory.of(owner)
        state = _StateWorker(self._variable_calls, self._bus, link, lambda: group.closed)
        moved = bool(start.attempt or start.replay)
        unconfirmed = self._unconfirmed.of(owner)
        ordered = RequestVariables(state, lambda: self._fail(group), memory, unconfirmed, moved)
        group = SequenceGroup(
            header.request,
            header.address,
            self._limits,
            _arg_bytes(start.arg),
            start.max_tokens,
            start.ignore_eos,
            ordered.perform,
            start.inspect,
            start.attempt,
        )
        group.ordered = ordered
        self._end(link, header.request)
        group.tools = GroupTools(
            self._tool_calls,
            link,
            group.perform_within_quota,
            lambda store: self._records.submit([store], tenant=owner),
            lambda: self._tool_answered(group),
            ordered.when_confirmed,
        )
        group.tenant, group.owner, group.memory = tenant, owner, memory
        self._groups[link, header.request] = group
        logs.begin(header.request, start.request_id, start.trace)
        group.events = RoundEvents.of(header.request, start)
        group.reads_usual, group.takes_runs = start.reads_usual, start.takes_runs
        log.debug(
            "request %d: its controller is %s",
            header.request,
            start.controller,
            extra=logs.about(header.request),
        )

        def ready(vocabulary: TokenizerVocabulary | None, error: str) -> None:
            pending = self._new_result(group.gpu, 1)
            self._first_rounds.submit(pending, group, start, vocabulary, error, refuse)

        def refuse(unknown: str) -> None:
            self._bus.post(refused_frames(message, unknown=unknown), link)

        self._vocabularies.want(start.vocabulary, header.address, ready)

    def _step(self, message: FromBus, step: Step) -> None:
        """Handles STEP: runs a round of each of its sequences."""
        gpu = message.header.address
        rows = None
        if step.masks:
            try:
                rows = self._masks.get(step.masks, step.rows, step.row_bytes, step.bias_bytes)
            except Exception:
                log.exception("masks are sent in messages, because %r cannot be mapped", step.masks)
        found: list[_Stepped] = []
        unknown: list[StepSequence] = []
        for stepped in step.sequences:
            group = self._groups.get((message.link, stepped.request))
            if group is None:
                unknown.append(stepped)
            elif group.gpu == gpu:
                found.append((stepped, group))
            else:
                text = "request %d: dropped a STEP of worker %d, which runs an earlier attempt"
                log.debug(text, stepped.request, gpu, extra=logs.about(stepped.request))
        if unknown:
            self._refuse_steps(gpu, unknown)
        self._step_groups(gpu, rows, found)

    def _step_groups(
        self, gpu: int, rows: MaskRows | None, found: Sequence[_Stepped], wait: bool = False
    ) -> None:
        """Runs a round of each sequence. If ``wait`` is false, this method runs on the main loop,
        so it does not wait for a group that another thread has locked. It passes the sequences of
        such a group to a thread of the pool."""
        begun: list[Begun] = []
        unknown: list[StepSequence] = []
        busy: list[_Stepped] = []
        for stepped, group in found:
            try:
                round_ = group.step(
                    stepped.seq,
                    stepped.tokens,
                    stepped.ended is not None,
                    rows,
                    stepped.stop,
                    stepped.draft,
                    wait,
                    stepped.distributions,
                    stepped.scores,
                    stepped.logprobs,
                )
            except GroupBusy:
                busy.append((stepped, group))
                continue
            if round_ is not None:
                begun.append(Begun(stepped, group, *round_))
            elif not group.running(stepped.seq):
                unknown.append(stepped)
        for stepped, group in busy:
            job = partial(self._step_groups, gpu, rows, [(stepped, group)], True)
            self._pool.submit([job], tenant=group.tenant)
        if unknown:
            self._refuse_steps(gpu, unknown)
        if not begun:
            return
        self._rounds_started += len(begun)
        pending = self._new_result(gpu, len(begun))
        jobs, hands = round_jobs(pending, begun)
        for tenant, of_tenant in jobs.items():
            self._pool.submit(of_tenant, hands, tenant)

    def _refuse_start(self, message: FromBus, error: Exception) -> None:
        """Sends a RESULT with an error for a START that cannot be read."""
        text = f"the controller worker cannot start the controller: {error}"
        request = message.header.request
        attempts = {}
        with contextlib.suppress(TokenbusError):
            attempts[request] = decode_as(_Attempt, message.body, "msgpack").attempt
        self._post_results(message.header.address, [_error_result(request, text)], attempts)

    def _refuse_steps(self, gpu: int, sequences: list[StepSequence]) -> None:
        """Sends a RESULT with an error for each of these sequences of a STEP. This worker does not
        have the sequence, or the sequence does not wait for the model."""
        results = []
        for stepped in sequences:
            text = f"the controller worker does not have sequence {stepped.seq} of this request"
            result = _error_result(stepped.request, text)
            result.seq = stepped.seq
            results.append(result)
        self._post_results(gpu, results)

    def _post_results(
        self, gpu: int, results: list[StepResult], attempts: Mapping[int, int] | None = None
    ) -> None:
        made = Result(sequences=results, host=machine_id(), attempts=dict(attempts or {}))
        body = encode_body(made, "msgpack")
        self._bus.post_to(gpu, [b"RESULT", encode_header(0, gpu), body])

    def _new_result(self, gpu: int, rounds: int, flush_s: float = FLUSH_S) -> PendingResult:
        post = partial(self._bus.post_to, gpu)
        submit = self._pool.submit
        pending = PendingResult(gpu, rounds, post, self._after_send, submit, self._order, flush_s)
        with self._pending_lock:
            self._pending.append(pending)
            if len(self._pending) > 64:
                self._pending = [p for p in self._pending if not p.complete]
        return pending

    def _after_send(
        self, group: SequenceGroup, rounds: list[Round], failed: list[StepResult]
    ) -> None:
        """Called after results of a group were sent: runs the rounds of woken sequences, and sends
        ``failed``, the errors of sequences that were woken too often."""
        if group.begins_idle():
            self._idle.add(group)
        if failed:
            self._new_result(group.gpu, 1).add(group, failed)
        if rounds:
            pending = self._new_result(group.gpu, len(rounds), WOKEN_FLUSH_S)
            jobs = [partial(run_woken, pending, group, round_) for round_ in rounds]
            self._pool.submit(jobs, tenant=group.tenant)

    def _fail(self, group: SequenceGroup) -> None:
        """Ends a request in this worker, because the state worker has refused an operation that
        this worker has already answered. Called on the bus thread, which must not wait for a
        group."""

        def fail() -> None:
            with self._order:
                failed = group.fail()
            self._new_result(group.gpu, 1).add(group, failed)

        log.warning("request %d: %s", group.request, group.failure, extra=logs.about(group.request))
        self._pool.submit([fail], tenant=group.tenant)

    def _wake_idle(self, group: SequenceGroup) -> None:
        """Wakes the sequences of a group after all of them were suspended for a time. Ends the
        sequences if they were woken too often."""
        self._after_send(group, *group.wake_idle())

    def _wake_by_input(self, group: SequenceGroup) -> None:
        """Wakes the sequences of a group that wait for an input of the client."""
        self._after_send(group, *group.input_arrived())

    def _tool_answered(self, group: SequenceGroup) -> None:
        """Called when the answer of a tool is in the record of the call."""
        if group.ordered is not None:
            group.ordered.flush()
        self._after_send(group, *group.wake_for_answer())

    def _end_all(self, link: int) -> None:
        """Ends the controllers of a broker's requests, because the worker's lease at this broker
        has ended."""
        for group_link, request in list(self._groups):
            if group_link == link:
                self._end(link, request)

    def _end(self, link: int, request: int) -> None:
        group = self._groups.pop((link, request), None)
        if group is not None:
            # ``end`` is called first, so that no further result is sent. A result that is being
            # sent now is sent before the results of a new START.
            group.end()
            if group.ordered is not None:
                group.ordered.close()
            self._variable_calls.cancel(request, link)
            self._tool_calls.cancel(request, link)
            if group.events is not None:
                group.events.end()
            logs.end(request)
            self._pool.submit([group.close, group.free], tenant=group.tenant)

    # --- tokenizers and modules -----------------------------------------------------------------

    def _request_tokenizer(self, fingerprint: str, gpu: int) -> None:
        body = encode_body(FetchTokenizer(fingerprint=fingerprint), "msgpack")
        self._bus.post_to(gpu, [b"FETCH_TOKENIZER", encode_header(0, gpu), body])

    def _send_module(self, message: FromBus) -> None:
        """Answers another controller worker that needs a module, if this machine has the module.
        The answer has the module's bytes only if the request was sent to this worker alone. Other
        requests are answered without reading the file, which may have 16 MiB: each waiting stream
        repeats such requests.

        If the file cannot be read, the answer to a request for the bytes is empty, so that the
        other worker requests the module elsewhere.
        """
        if self._store is None:
            return
        try:
            asked: FetchModule = decode_as(FetchModule, message.body, "msgpack")
            if not self._store.has(asked.module):
                return
        except (TokenbusError, OSError) as error:
            log.error("a module cannot be sent: %s", error)
            return
        attached = []
        if asked.send:
            try:
                attached = [self._store.own(asked.module) or b""]
            except (TokenbusError, OSError) as error:
                log.error("a module cannot be sent: %s", error)
                attached = [b""]
        head = encode_header(0, message.header.address)
        body = encode_body(ModuleBytes(module=asked.module), "msgpack")
        self._bus.post([b"MODULE_BYTES", head, body, *attached], message.link)

    def _post(self, frames: list[bytes]) -> None:
        """Sends a message of the module store to the worker that the header names. If the header
        does not name a worker, sends the message over every broker."""
        worker = decode_header(frames[1]).address
        if worker:
            self._bus.post_to(worker, frames)
        else:
            self._bus.post_all(frames)

    def _post_once(self, frames: list[bytes], turn: int) -> None:
        """Sends a message of the module store over one of the brokers, which ``turn`` selects."""
        self._bus.post_to_any(frames, turn)

    def _serve_store(self, message: FromBus, refusal: TokenbusError | None = None) -> None:
        """Handles a client's request to the module store, or answers it with ``refusal``. The last
        attachment is the client's tenant."""
        header = message.header
        encoding: Encoding = "msgpack" if header.flags & Flag.MSGPACK else "json"
        head = encode_header(header.request, header.address, Flag.FINAL)
        stream_id = 0
        try:
            stream_id = decode_as(Tags, message.body).stream_id
            if refusal is not None:
                raise refusal
            *attachments, tenant = message.attachments
            result = self._store_result(message, attachments, Tenant.decode(tenant))
            answer = Msg(stream_id=stream_id, result=result)
            frames = [b"MSG", head, encode_body(answer, encoding)]
        except TokenbusError as error:
            self._meters.error(error.code)
            frames = [b"ERROR", head, encode_body(error_body(error, stream_id), encoding)]
        except Exception as error:
            log.exception("a request to the module store failed")
            self._meters.error(Code.INTERNAL)
            failure = TokenbusError(Code.INTERNAL, f"the module store failed: {error!r}")
            frames = [b"ERROR", head, encode_body(error_body(failure, stream_id), encoding)]
        self._bus.post(frames, message.link)

    def _store_result(self, message: FromBus, attachments: list[bytes], tenant: Tenant) -> Any:
        assert self._store is not None
        match message.type:
            case b"UPLOAD":
                upload = decode_as(Upload, message.body)
                wasm = upload.data if upload.data is not None else b"".join(attachments[:1])
                return self._store.put(tenant.key, wasm, upload.tag, upload.by, tenant.quota_bytes)
            case b"TAG":
                tag = decode_as(Tag, message.body)
                return self._store.tag(tenant.key, tag.module, tag.tags, tag.by)
            case b"DELETE":
                return self._store.delete(tenant.key, decode_as(Delete, message.body).module)
            case _:
                return self._store.list(tenant.key)

    # --- registration and heartbeat (on a bus thread) ---------------------------------------------

    def _elsewhere(self, link: int) -> int:
        """The number of this worker's controllers that belong to brokers other than the broker of
        ``link``."""
        return sum(group_link != link for group_link, _ in list(self._groups))

    def _registration(self) -> Register:
        live = [
            LiveRequest(request=request, session=0, stream_id=0)
            for _, request in list(self._groups)
        ]
        return Register(
            name=self._name,
            role="controller",
            version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            capacity=self._settings.controller_capacity,
            patterns=self._serves,
            missing_layers=self._missing_layers,
            live=live,
        )

    @property
    def _num_waiting(self) -> int:
        """Number of rounds, and of requests with unsent results, that wait for the state worker."""
        holding = sum(
            group.ordered is not None and group.ordered.holds
            for group in list(self._groups.values())
        )
        return self._pool.waiting_jobs + self._starts.waiting_jobs + holding

    def _load(self) -> tuple[int, dict[str, float]]:
        return len(self._groups), {
            "rounds": float(self._rounds_started),
            "sessions": float(len(self._groups)),
            "waiting": float(self._num_waiting),
        }

    def _series(self) -> list[Series]:
        return [
            Series("num_controllers", {}, len(self._groups)),
            Series("num_controllers_waiting", {}, self._num_waiting),
            *self._meters.series(),
            *self._programs.series(),
        ]


class _StateWorker:
    """Sends the operations of one request to the state worker. Implements
    ``request_variables.StateWorker``."""

    def __init__(
        self, calls: VariableCalls, bus: Bus, link: int, ended: Callable[[], bool]
    ) -> None:
        """``ended`` returns whether the request has ended."""
        self._calls = calls
        self._bus = bus
        self._link = link
        self._ended = ended

    def perform(self, operation: Variable) -> VariableAnswer:
        """See ``StateWorker``."""
        return self._calls.perform(operation, self._ended, self._link)

    def send(self, operation: Variable, answered: Callable[[VariableAnswer], None]) -> None:
        """See ``StateWorker``."""
        self._calls.send(operation, answered, self._link)

    def flush(self) -> None:
        """See ``StateWorker``."""
        self._bus.flush()


def _store_owner(message: FromBus) -> str:
    """The owner of a request to the module store: its tenant or, if clients do not have keys, its
    session. If the tenant cannot be read, the answer to the request reports the error."""
    tenant = ""
    with contextlib.suppress(IndexError, ValueError):
        tenant = Tenant.decode(message.attachments[-1]).key
    return owner_of([tenant.encode(), b"%x" % message.header.address])


def _error_result(request: int, message: str, code: str = Code.INTERNAL) -> StepResult:
    return StepResult(request, 0, "error", error=message, code=str(code))


def _arg_bytes(arg: str | dict[str, Any] | list[Any] | None) -> bytes:
    if arg is None:
        return b""
    return arg.encode() if isinstance(arg, str) else msgspec.json.encode(arg)
