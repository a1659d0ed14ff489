"""The code of a guest process. The process runs calls of one tenant's guests, which the worker
sends over channels.

Each channel has a thread. The main thread receives the descriptors of new channels over the
*control socket*. When the worker closes this socket, the main thread ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wasmtime import Engine, Module

from ....protocol.errors import Code, ControllerError, TokenbusError
from ..guest_clock import question
from ..host import Host, NextTokens, Stored, Vocabulary, Written
from ..interface import Action, Controller, Program
from ..logs import Log
from ..runtime import program_of
from ..wasm.aici_storage import NAME_BYTES
from ..wasm.compiled_modules import Loaded
from ..wasm.sandbox import HOST_STACK_BYTES, TICK_S
from . import messages
from .channel import MAX_REASON, Channel, ChannelClosed, ChannelFiles
from .messages import (
    Advance,
    Asked,
    Begin,
    Close,
    Done,
    Fault,
    Fork,
    HostSpec,
    Item,
    Load,
    Mid,
    MidAnswer,
    Outcome,
    PreAnswer,
    Prompt,
    Question,
    Told,
)

GRANT_BYTES = 4 * 1024 * 1024
"""The process requests memory from its tenant's share in grants of at least this number of bytes.
If the worker refuses such a grant, the process requests only the bytes that it needs."""
SHARED_BIAS_BYTES = 4096
"""A bias with at least this number of bytes is sent in shared memory if there is room. If there is
no room, or if the bias is smaller, it is sent in the message."""
_NO_ROOM = memoryview(b"")
SLOW_S = 0.0005
"""If a round takes longer than this time, in seconds, the controller's next round gets a separate
thread."""


class _ThisThread(threading.local):
    channel: Channel
    handle: int
    """The handle (number) of the controller whose call this thread runs."""


_this_thread = _ThisThread()


def _ask(what: Question, name: str = "", value: bytes = b"", number: int | None = None) -> Told:
    """Sends a question to the worker in the middle of a call, and returns the worker's answer.
    Raises TokenbusError if an argument is not valid, or if the worker answers with an error."""
    if isinstance(name, str) and len(name) > NAME_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"{what}: the name has {len(name)} characters; at most {NAME_BYTES} are allowed",
        )
    channel = _this_thread.channel
    asked = messages.encode_checked(Asked(_this_thread.handle, what, name, value, number))
    with question():
        channel.send(asked)
        answer = channel.receive()
    told = messages.decode_to_guest(answer)
    if not isinstance(told, Told):
        raise ChannelClosed("the worker did not answer the question of a guest")
    if told.error is not None:
        raise told.error.error()
    return told


def _stored(told: Told) -> Stored | None:
    return Stored(told.version, told.value or b"") if told.version else None


class _Variables:
    """The variables of a sequence. Each access is a question to the worker."""

    def get(self, name: str) -> Stored | None:
        """Reads a variable; None if it does not exist."""
        return _stored(_ask("get", name))

    def await_write(self, name: str, version: int = 1) -> Stored | None:
        """Reads a variable; None if its version is below ``version``. See ``host.Variables`` for
        the wake-up of the sequence."""
        return _stored(_ask("await_write", name, number=version))

    def set(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Writes a variable. If ``when_version_is`` is given, writes only if the variable has this
        version."""
        told = _ask("set", name, value, when_version_is)
        return Written(told.ok, told.version, told.value or b"")

    def append(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Appends to a variable. If ``when_version_is`` is given, appends only if the variable has
        this version."""
        told = _ask("append", name, value, when_version_is)
        return Written(told.ok, told.version, told.value or b"")

    def receive(self) -> bytes | None:
        """The next input of the client; None if no input has arrived."""
        told = _ask("receive")
        return (told.value or b"") if told.ok else None

    def send(self, text: bytes) -> None:
        """Sends a text to the client."""
        _ask("send", value=text)


class _Questions:
    """Gives scripts access to the built-in constraints. Each use is a question to the worker, which
    runs the constraint."""

    def next_tokens(self, kind: str, argument: str, text: Sequence[int]) -> NextTokens:
        """The tokens that may follow ``text`` under the constraint ``kind``."""
        asked = messages.encode(messages.ConstrainedText(argument, messages.packed(text)))
        told = _ask("next_tokens", kind[:NAME_BYTES], asked)
        return NextTokens(told.value or b"", told.ok, bool(told.version))


class _Tools:
    """The tools of a sequence. The worker makes the calls."""

    def begin(self, tool: str, arguments: bytes) -> str:
        """Calls a tool; returns the name of the variable that will have its answer."""
        return (_ask("call", tool, arguments).value or b"").decode()


class _Memory:
    """The memory of all guests of this process. The process requests memory from the tenant's share
    in advance, in grants of ``GRANT_BYTES`` or more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = self._granted = 0

    def take(self, size: int) -> None:
        """Counts ``size`` more bytes. Raises ControllerError if the tenant would then exceed its
        share."""
        with self._lock:
            missing = self._used + size - self._granted
            if missing > 0:
                self._granted += _granted(missing)
            self._used += size

    def give_back(self, size: int) -> None:
        """Stops counting ``size`` bytes."""
        with self._lock:
            self._used -= size

    def return_surplus(self) -> None:
        """Returns a large unused part of the granted memory to the tenant's share."""
        with self._lock:
            surplus = self._granted - self._used
            if surplus >= 4 * GRANT_BYTES:
                _ask("memory", number=-surplus)
                self._granted -= surplus


def _granted(missing: int) -> int:
    """Requests at least ``missing`` bytes of memory, and returns the number of granted bytes.
    Raises ControllerError if the worker refuses ``missing`` bytes."""
    if missing < GRANT_BYTES:
        try:
            _ask("memory", number=GRANT_BYTES)
        except ControllerError:
            pass
        else:
            return GRANT_BYTES
    _ask("memory", number=missing)
    return missing


@dataclass(slots=True)
class _Seated:
    """A controller of this process, with its host and its log."""

    controller: Controller
    host: Host
    log: Log


class GuestProcess:
    """The controllers of this process. Handles the worker's requests to controllers."""

    def __init__(
        self, engine: Engine, vocabulary: Vocabulary, programs: Mapping[str, Program]
    ) -> None:
        """``programs``: Python controllers of the operator by name."""
        self.engine = engine
        self._vocabulary = vocabulary
        self._row = 4 * -(-vocabulary.size // 32)
        self._memory = _Memory()
        self._programs = dict(programs)
        self._seated: dict[int, _Seated] = {}

    def serve(self, channel: Channel) -> None:
        """Handles the requests of a channel until the channel is closed."""
        _this_thread.channel = channel
        while True:
            request = messages.decode_to_guest(channel.receive())
            began_s = time.thread_time()
            items = self._handle(channel, request)
            channel.send(messages.encode(Done(items, time.thread_time() - began_s)))

    # --- inside ---------------------------------------------------------------------------------

    def _handle(self, channel: Channel, request: messages.ToGuest) -> list[Outcome | None]:
        match request:
            case Advance(items):
                alone = len(items) == 1
                return [self._advance(channel, at, item, alone) for at, item in enumerate(items)]
            case Mid(handle, group):
                return [self._mid(channel, handle, group)]
            case Prompt(handle, tokens):
                return [self._prompt(handle, tokens)]
            case Begin(handle, module, spec):
                return [self._begin(handle, self._programs[module], spec)]
            case Fork(handle, child, spec):
                return [self._fork(self._seated[handle], child, spec)]
            case Close(handle):
                self._close(handle)
            case Load(module, abi, why_no_fork, code, script):
                compiled = Module.deserialize(self.engine, code)
                loaded = Loaded(abi, compiled, why_no_fork, script)
                self._programs[module] = program_of(self.engine, loaded)
        return []

    def _begin(self, handle: int, program: Program, spec: HostSpec) -> Outcome:
        host, log = self._host(spec)

        def start(_: Outcome) -> None:
            self._seated[handle] = _Seated(program.start(host), host, log)

        return _called(handle, log, start)

    def _fork(self, parent: _Seated, child: int, spec: HostSpec) -> Outcome:
        host, log = self._host(spec)
        host.arg = parent.host.arg
        host.distributions = parent.host.distributions

        def fork(_: Outcome) -> None:
            self._seated[child] = _Seated(parent.controller.fork(host), host, log)

        return _called(child, log, fork)

    def _prompt(self, handle: int, tokens: list[int]) -> Outcome:
        seated = self._seated[handle]

        def init_prompt(outcome: Outcome) -> None:
            seated.controller.init_prompt(tokens)
            outcome.takes_drafts = getattr(seated.controller, "takes_drafts", False)

        return _called(handle, seated.log, init_prompt)

    def _mid(self, channel: Channel, handle: int, group: list[int]) -> Outcome:
        seated = self._seated[handle]
        rooms = channel.masks[: self._row], channel.masks[self._row :]

        def mid_process(outcome: Outcome) -> None:
            answer = _mid_answer(seated.controller, group, *rooms)
            if answer.action == Action.AGAIN:
                _decide(seated, rooms, outcome)
            else:
                outcome.mid = answer

        return _called(handle, seated.log, mid_process)

    def _advance(self, channel: Channel, place: int, item: Item, alone: bool) -> Outcome | None:
        channel.current = place
        seated = self._seated[item.handle]
        if item.limits is not None:
            seated.host.limits = item.limits
        mask = channel.masks[place * self._row : (place + 1) * self._row]
        after = channel.masks[self._row :] if alone else _NO_ROOM
        began_s = time.perf_counter()
        outcome = _called(item.handle, seated.log, partial(_run, seated, item, (mask, after)))
        outcome.slow = time.perf_counter() - began_s > SLOW_S
        return None if outcome == _USUAL else outcome

    def _close(self, handle: int) -> None:
        _this_thread.handle = handle
        seated = self._seated.pop(handle, None)
        if seated is not None:
            seated.controller.close()
            self._memory.return_surplus()

    def _host(self, spec: HostSpec) -> tuple[Host, Log]:
        log = Log(spec.limits.log_bytes)
        host = Host(
            spec.request,
            spec.seq,
            spec.arg,
            self._vocabulary,
            _Variables(),
            log,
            spec.limits,
            spec.max_tokens,
            spec.ignore_eos,
            self._memory if spec.counted else None,  # type: ignore[arg-type]
            questions=_Questions(),
            tools=_Tools(),
        )
        return host, log


_USUAL = Outcome(
    post=int(Action.CONTINUE),
    pre=PreAnswer(int(Action.CONTINUE)),
    mid=MidAnswer(int(Action.CONTINUE), masked=True),
)


def _called(handle: int, log: Log, call: Callable[[Outcome], None]) -> Outcome:
    """Runs ``call``, a function that calls a controller and adds the answers to an outcome. Returns
    the outcome with the controller's log, and with the error if ``call`` raises one."""
    _this_thread.handle = handle
    outcome = Outcome()
    try:
        call(outcome)
    except BaseException as error:
        outcome.fault = _fault(error)
    outcome.log, outcome.dropped = log.take_bytes()
    return outcome


def _run(
    seated: _Seated, item: Item, rooms: tuple[memoryview, memoryview], outcome: Outcome
) -> None:
    """Makes the calls of an item one after another. A call that does not return CONTINUE is the
    last one. ``rooms``: the shared memory for the mask, and for a large bias."""
    controller = seated.controller
    if item.tokens is not None:
        seated.host.give(item.distributions, item.scores, item.refusal, item.logprobs)
        after = controller.post_process(item.tokens, item.backtrack)
        outcome.post = int(after.action)
        if after.action is not Action.CONTINUE or item.last:
            return
    _decide(seated, rooms, outcome)


def _decide(seated: _Seated, rooms: tuple[memoryview, memoryview], outcome: Outcome) -> None:
    """Calls pre_process, and mid_process if pre_process returns CONTINUE."""
    controller = seated.controller
    answer = controller.pre_process()
    pre = PreAnswer(int(answer.action), answer.count, messages.packed(answer.tokens))
    if answer.action is not Action.CONTINUE:  # A script may have passed values that are not valid.
        messages.encode_checked(pre)
    outcome.pre = pre
    alone = answer.action is Action.FORK and answer.count == 1
    if (alone or answer.action is Action.CONTINUE) and not answer.tokens:
        outcome.mid = _mid_answer(controller, [seated.host.seq], *rooms)


def _mid_answer(
    controller: Controller, group: list[int], mask: memoryview, after: memoryview
) -> MidAnswer:
    """Calls mid_process and returns its answer. ``after``: shared memory for a large bias."""
    answer = controller.mid_process(group, mask)
    made = MidAnswer(
        int(answer.action),
        answer.backtrack,
        messages.packed(answer.tokens),
        answer.masked,
        query=answer.query,  # type: ignore[arg-type]
        override=answer.override,  # type: ignore[arg-type]
        complete=answer.complete,
        generate=answer.generate,
        texts=[messages.packed(text) for text in answer.texts],
        name=answer.name,
        pin_s=answer.pin_s,
        logprobs=answer.logprobs,
    )
    if answer.action is not Action.CONTINUE:
        messages.encode_checked(made)
    if answer.bias is not None:
        made.pairs, data = answer.bias
        if SHARED_BIAS_BYTES <= len(data) <= len(after):
            after[: len(data)] = data
            made.shared = len(data)
        else:
            made.bias = bytes(data)
    return made


def _fault(error: BaseException) -> Fault:
    if isinstance(error, ChannelClosed):
        raise error
    if isinstance(error, TokenbusError):
        return Fault.of(error)
    return Fault(str(Code.INTERNAL), f"the guest process failed: {error!r}")


# --- the process ----------------------------------------------------------------------------------


def run(control: socket.socket, process: GuestProcess) -> None:
    """Serves channels until the worker closes ``control``. Called in a new process, by the
    process's only thread."""
    # The signal is blocked in all threads, so that only ``_tick`` receives it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    threading.Thread(target=_tick, args=(process.engine,), daemon=True).start()
    signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
    threading.stack_size(HOST_STACK_BYTES)
    while True:
        _, files, _, _ = socket.recv_fds(control, 1, 3)
        if len(files) != 3:
            os._exit(0)
        received = ChannelFiles(*files)
        channel = Channel(received, guest=True)
        os.close(received.memory)
        args = process, channel, control.fileno()
        threading.Thread(target=_serve, args=args, daemon=True).start()


def _serve(process: GuestProcess, channel: Channel, control: int) -> None:
    try:
        process.serve(channel)
    except BaseException:
        os.write(control, traceback.format_exc().encode()[-MAX_REASON:])
    finally:
        # The process ends, because a thread that has failed cannot answer the worker.
        os._exit(1)


def _tick(engine: Engine) -> Any:
    """Increments the epoch of the Wasm engine whenever the process has used another millisecond of
    CPU time, so that running guests check their limits. The thread sleeps while the process uses no
    CPU time."""
    while True:
        signal.sigwait({signal.SIGPROF})
        engine.increment_epoch()
