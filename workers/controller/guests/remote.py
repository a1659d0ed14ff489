"""Controllers whose guests run in a guest process. A *question* is a guest's request to the worker
during a call.

Each controller records its calls. If its process ends, the next call first repeats the recorded
calls in a new process, as a replay on another worker does. This restores the guest's state, because
the decisions of guests depend only on their inputs, and operations on variables receive their
recorded answers.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import structs

from ....protocol.errors import Code, ControllerError, TokenbusError
from ..host import Host
from ..interface import AGAIN, Answer, Batch
from ..limits import Limits
from ..pool import locked
from ..replays import replayed_limits
from ..tool_calls import NO_TOOLS, SequenceTools
from ..variable_calls import SequenceVariables, VariablesMark
from ..wasm.compiled_modules import Loaded
from .answers import answers_of
from .batches import ProcessBatch
from .channel import MASK_BYTES, Channel
from .messages import (
    Advance,
    Asked,
    Begin,
    Close,
    Fork,
    HostSpec,
    Item,
    Load,
    Mid,
    MidAnswer,
    Outcome,
    PreAnswer,
    Prompt,
    ToGuest,
    Told,
    decode_text,
    unpacked,
)
from .process import Cause, GuestDied, GuestProcess
from .recording import Begun, Call, Recording, addressed, repetitions
from .table import ProcessTable

MAX_LOSSES = 2
"""If this number of processes in a row end during calls of one controller, the controller ends with
an error."""
MAX_SUSPICIONS = 2
"""A controller that ran in this number of compromised processes ends with an error."""
MAX_TRIES = 10
"""Maximum number of tries of one call, each of which may use a new process."""
INTERPRETER = "script:"
"""Beginning of the names of the interpreters that run the script in a request's argument."""
LOAD_S = 10.0
"""CPU time limit of loading a module, in seconds."""


class Place(NamedTuple):
    """The program of a controller, and the processes in which it runs."""

    table: ProcessTable
    tenant: str
    module: str
    load: Callable[[], Loaded] | None
    """Reads the compiled module. None for a Python controller, which every process already has."""

    @property
    def title(self) -> str:
        """The name of the controller for errors."""
        return "the controller" if self.load else f"the controller {self.module}"

    def blamed(self, arg: bytes) -> str:
        """The id under which deaths of guest processes during calls of this module are counted
        (``table.Deaths``). After several deaths, the module is refused. If the request's argument
        is a script, the id of the script is used and not the id of its interpreter. The reason is
        that the tenant's other requests run other scripts in the same interpreter."""
        if not self.module.startswith(INTERPRETER):
            return self.module
        return self.module + hashlib.sha256(arg).hexdigest()


class RemoteController:
    """The controller of one sequence, whose guest runs in a guest process."""

    def __init__(self, place: Place, host: Host, parent: Recording | None = None) -> None:
        """``parent``: the recorded calls of the sequence that is forked."""
        self._place = place
        self._host = host
        self._recording = Recording(host, parent)
        self._process: GuestProcess | None = None
        self._handle = 0
        self._variables = host.variables
        """The variables that the guest's questions use: the variables of the host, or a copy of
        them during a replay."""
        self._limits = host.limits
        """The limits that were last sent to the guest."""
        self._ahead: deque[Answer | TokenbusError] = deque()
        self._ahead_mask = b""
        self._ending = self._asks = self._slow = self._waits = False
        self._fault: ControllerError | None = None
        """The error with which the sequence ends at its next call."""
        self._losses = self._suspicions = 0
        self.takes_drafts = False

    # --- interface.Controller -------------------------------------------------------------------

    def begin(self) -> None:
        """Creates the guest. Raises TokenbusError if the creation fails."""
        limit_s = 3 * self._host.limits.init_s
        self._run(lambda: Begin(self._handle, self._place.module, spec(self._host)), limit_s, True)

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Calls init_prompt of the guest."""
        tokens = list(prompt)
        outcome = self._run(lambda: Prompt(self._handle, tokens), self._host.limits.init_s)
        self._recording.add(Prompt(0, tokens))
        self.takes_drafts = outcome.takes_drafts

    def pre_process(self) -> Answer:
        """The answer of pre_process, which may have been computed together with an earlier call."""
        if not self._ahead:
            self._advance(Item(0))
        return self._next("pre_process")

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """The answer and the mask of mid_process, which may have been computed together with an
        earlier call."""
        if not self._ahead:
            group = list(fork_group)
            outcome = self._run(lambda: Mid(self._handle, group), self._host.limits.watched_round_s)
            self._recording.add(Mid(0, group))
            if outcome.pre is not None:
                self._ahead.append(AGAIN)
            self._take(outcome)
        answer = self._next("mid_process")
        if answer.masked:
            mask[:] = self._ahead_mask
        self._asks = answer.query is not None or answer.bias is not None or answer.logprobs
        return answer

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Makes the calls post_process, pre_process and mid_process in one request, and stores the
        answers of the last two (``interface.DecidesAhead``)."""
        if not self._ahead:
            item = Item(0, list(tokens), backtrack, self._ending, list(self._host.distributions))
            item.scores, item.refusal = self._host.scores, self._host.refusal
            item.logprobs = list(self._host.logprobs)
            self._advance(item)
        return self._next("post_process")

    def ends(self) -> None:
        """Records that the next post_process is the last call."""
        self._ending = True

    @property
    def has_decided(self) -> bool:
        """Whether the answer of the next call is stored."""
        return bool(self._ahead)

    def fork(self, host: Host) -> RemoteController:
        """Creates a copy of the controller and of its guest for the new sequence of ``host``."""
        child = RemoteController(self._place, host, self._recording)
        child.takes_drafts = self.takes_drafts
        child._asks, child._slow, child._waits = self._asks, self._slow, self._waits

        def request() -> ToGuest:
            assert self._process is not None
            child._seat(self._process, self._process.new_handle())
            return Fork(self._handle, child._handle, _of_fork(host))

        try:
            self._run(request, 1.0)
        except TokenbusError:
            child.close()
            raise
        return child

    def close(self) -> None:
        """Frees the guest if its process runs. If the request to free it fails, the guest remains
        in memory until its process ends."""
        process, self._process = self._process, None
        self._recording.close()
        if process is None or process.controllers.pop(self._handle, None) is None:
            return
        try:
            with process.channel() as channel:
                process.request(channel, Close(self._handle), 1.0)
        except (GuestDied, TokenbusError):
            pass

    @property
    def limits(self) -> Limits:
        """The limits of the sequence."""
        return self._host.limits

    # --- interface.Batched ----------------------------------------------------------------------

    def batch(self, token: int) -> tuple[Batch, int] | None:
        """The batch of the process, and the number of the guest in the batch. None if the round
        after ``token`` cannot run in a batch."""
        process = self._process
        fault = self._fault or self._recording.failure
        alone = self._slow or self._asks or self._waits or fault is not None or self._losses
        if process is None or process.dead or alone:
            return None
        if self._host.limits is not self._limits or token in self._host.vocabulary.eos_ids:
            return None
        return ProcessBatch(process), self._handle

    def batched(self, token: int) -> None:
        """Does nothing, because ``ProcessBatch`` has recorded the round."""

    # --- the guest's side -----------------------------------------------------------------------

    def answer(self, asked: Asked) -> Told:
        """Answers a question of the guest; raises TokenbusError if the question is refused."""
        variables = self._variables
        # From now on, the rounds of this guest run outside of batches. In a batch, the other
        # sequences would also wait for the answers to its questions.
        self._waits = True
        if asked.what == "next_tokens":
            return self._next_tokens(asked)
        if asked.what in ("get", "await_write"):
            if asked.what == "get":
                stored = variables.get(asked.name)
            else:
                stored = variables.await_write(asked.name, asked.number or 1)
            if stored is None:
                return Told()
            return Told(version=stored.version, value=stored.value)
        if asked.what == "receive":
            text = variables.receive()
            return Told(ok=text is not None, value=text)
        if asked.what == "send":
            variables.send(asked.value)
            return Told()
        if asked.what == "call":
            return Told(value=self._begin_call(asked.name, asked.value).encode())
        write = variables.append if asked.what == "append" else variables.set
        written = write(asked.name, asked.value, asked.number)
        return Told(written.ok, written.version, written.value)

    def _next_tokens(self, asked: Asked) -> Told:
        questions = self._host.questions
        if questions is None:
            # Only scripts ask about constraints, and this guest is not a script. So its process is
            # compromised.
            raise ControllerError(Code.CONTROLLER_FAILED, "only a script asks about constraints")
        try:
            text = decode_text(asked.value)
            tokens = unpacked(text.tokens)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ControllerError(Code.CONTROLLER_FAILED, f"next_tokens: {error}") from None
        mask, may_end, ends = questions.next_tokens(asked.name, text.argument, tokens)
        return Told(may_end, int(ends), mask)

    def _begin_call(self, tool: str, arguments: bytes) -> str:
        """Calls a tool, or repeats the recorded call; returns the name of its record."""
        tools, variables = self._host.tools, self._variables
        if tools is None:
            raise ControllerError(Code.CONTROLLER_FAILED, NO_TOOLS)
        if isinstance(tools, SequenceTools) and isinstance(variables, SequenceVariables):
            tools = tools.with_variables(variables)
        return tools.begin(tool, arguments)

    def take_batched(self, token: int, outcome: Outcome | None, mask: memoryview) -> bool:
        """Records a round that ran in a batch, and its outcome; returns whether the round was usual
        (``interface.Batch``)."""
        self._recording.add_round(Item(0, [token]))
        if outcome is None:
            return True
        self._take(outcome, mask)
        return False

    def lost(self, died: GuestDied, mark: VariablesMark | None, suspect: bool) -> None:
        """Restores the variables to ``mark``. If ``suspect`` is true, counts the end of the process
        towards ``MAX_LOSSES``."""
        self._rewind(mark)
        if suspect:
            self._note(died)

    def mark(self) -> VariablesMark | None:
        """The state of the variables before a call; None if the call cannot be repeated."""
        variables = self._host.variables
        return variables.mark() if isinstance(variables, SequenceVariables) else None

    # --- inside ---------------------------------------------------------------------------------

    def _advance(self, item: Item) -> None:
        limits = self._host.limits

        def request() -> ToGuest:
            changed = None if limits is self._limits else limits
            self._limits = limits
            return Advance([addressed(item, self._handle, changed)])

        outcome = self._run(request, limits.watched_round_s)
        self._recording.add_round(item)
        self._take(outcome)

    def _run(self, request: Callable[[], ToGuest], limit_s: float, first: bool = False) -> Outcome:
        """Sends a request to the guest's process, or to a new process if the old one has ended.
        Raises TokenbusError if the request failed before its first answer."""
        mark = self.mark()
        for _ in range(MAX_TRIES):
            fault = self._fault or self._recording.failure
            if fault is not None:
                raise fault
            try:
                process = self._home(first)
                with process.channel() as channel:
                    done = process.request(channel, request(), limit_s)
                    return self._outcome(done.items, channel)
            except GuestDied as died:
                self._note(died)
                if mark is None and self._fault is None:
                    self._fault = ControllerError(Code.CONTROLLER_FAILED, died.why)
                self._rewind(mark)
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"{MAX_TRIES} processes ended before this call was made"
        )

    def _note(self, died: GuestDied) -> None:
        """Counts the end of a process during a call of this controller. The sequence ends with an
        error if ``MAX_LOSSES`` processes in a row have ended, or if the watchdog killed the process
        because of this call."""
        if died.cause is Cause.OTHER:
            return
        self._losses += 1
        if died.cause is Cause.KILLED or self._losses >= MAX_LOSSES:
            self._place.table.deaths.add(self._place.tenant, self._place.blamed(self._host.arg))
            self._fault = ControllerError(
                Code.CONTROLLER_TIMEOUT if died.cause is Cause.KILLED else Code.CONTROLLER_FAILED,
                f"the process of {self._place.title} was ended during its call: {died.why}",
            )

    def _rewind(self, mark: VariablesMark | None) -> None:
        variables = self._host.variables
        if mark is not None and isinstance(variables, SequenceVariables):
            variables.rewind(mark)

    def _outcome(self, items: list[Outcome | None], channel: Channel) -> Outcome:
        self._losses = 0
        outcome = items[0] if items else Outcome()
        if outcome is None:
            outcome = Outcome(1, PreAnswer(1), MidAnswer(1, masked=True))
        mid = outcome.mid
        if mid is not None and mid.masked:
            self._ahead_mask = bytes(channel.masks[: self._row])
        if mid is not None and mid.shared:
            mid.bias = bytes(channel.masks[self._row : self._row + mid.shared])
        self._log(outcome)
        unanswered = (outcome.post, outcome.pre, outcome.mid) == (None, None, None)
        if outcome.fault is not None and unanswered:
            raise outcome.fault.error()
        return outcome

    @property
    def _row(self) -> int:
        return 4 * -(-self._host.vocabulary.size // 32)

    def _take(self, outcome: Outcome, mask: memoryview | None = None) -> None:
        """Stores the answers of an outcome. The next calls of this controller return them."""
        if mask is not None:
            self._log(outcome)
            if outcome.mid is not None and outcome.mid.masked:
                self._ahead_mask = bytes(mask)
        self._slow = outcome.slow
        try:
            self._ahead += answers_of(outcome, self._host.vocabulary.size)
        except (ValueError, TokenbusError) as error:
            # The code of a guest process checks these values, so only a compromised process sends
            # such answers.
            text = f"the guest process sent an answer that is not valid: {error}"
            self._ahead.append(ControllerError(Code.CONTROLLER_FAILED, text))

    def _next(self, phase: str) -> Answer:
        if not self._ahead:
            # The process is compromised, because the code of a guest process never leaves out an
            # answer.
            text = f"the guest process sent no answer of {phase}"
            raise ControllerError(Code.CONTROLLER_FAILED, text)
        answer = self._ahead.popleft()
        if isinstance(answer, TokenbusError):
            raise answer
        return answer

    def _log(self, outcome: Outcome) -> None:
        if outcome.log:
            self._host.log.write(outcome.log)
        if outcome.dropped:
            self._host.log.drop(outcome.dropped)

    # --- replay ---------------------------------------------------------------------------------

    def _home(self, first: bool) -> GuestProcess:
        """The process of the guest. If the old process has ended, this is a new process, in which
        all recorded calls have been repeated. ``first``: whether the guest is being created, so
        that no calls are recorded yet."""
        process = self._process
        if process is not None and not process.dead:
            return process
        if process is not None and process.compromised:
            self._suspicions += 1
            if self._suspicions >= MAX_SUSPICIONS:
                raise GuestDied(process.dead, Cause.KILLED)
        place = self._place
        process = place.table.take(place.tenant, self._host)
        self._load(process)
        if first:
            self._seat(process, process.new_handle())
        else:
            self._repeat(process)
        return process

    def _load(self, process: GuestProcess) -> None:
        """Loads the module into a process that does not have it."""
        module, load = self._place.module, self._place.load
        if load is None or module in process.modules:
            return
        # A compiled module may have 256 MiB, so calls that need the same module at the same time
        # wait until the first of them has loaded it.
        with locked(process.loading):
            if module in process.modules:
                return
            loaded = load()
            code = bytes(loaded.module.serialize())
            process.count_module(module, len(code))
            request = Load(module, loaded.abi, loaded.why_no_fork, code, loaded.script)
            with process.channel() as channel:
                process.request(channel, request, LOAD_S)
            process.modules.add(module)

    def _seat(self, process: GuestProcess, handle: int) -> None:
        self._process, self._handle = process, handle
        process.controllers[handle] = self

    def _repeat(self, process: GuestProcess) -> None:
        """Repeats the recorded calls in a process."""
        try:
            for event in self._recording.events:
                for request, limit_s in self._requests(process, event):
                    with process.channel() as channel:
                        done = process.request(channel, request, limit_s)
                    if isinstance(self._variables, SequenceVariables):
                        self._variables.take_writes()
                        self._variables.take_messages()
                    for item in done.items:
                        if item is not None and item.fault is not None:
                            raise item.fault.error()
        finally:
            self._variables = self._host.variables
        # The guest now has the limits of the replay. This is recorded, so that the next round sends
        # the usual limits.
        self._limits = replayed_limits(self._host.limits)

    def _requests(
        self, process: GuestProcess, event: Begun | Call
    ) -> Iterable[tuple[ToGuest, float]]:
        limits = replayed_limits(self._host.limits)
        if isinstance(event, Begun):
            return self._begin_again(process, event.host, limits)
        return repetitions(event, self._handle, limits, MASK_BYTES // self._row)

    def _begin_again(
        self, process: GuestProcess, host: Host, limits: Limits
    ) -> list[tuple[ToGuest, float]]:
        before, handle = self._handle, process.new_handle()
        is_fork = self._process is process
        self._seat(process, handle)
        variables = host.variables
        if isinstance(variables, SequenceVariables):
            self._variables = variables.again()
        if not is_fork:
            return [(Begin(handle, self._place.module, spec(host, limits)), 3 * limits.init_s)]
        process.controllers.pop(before, None)
        return [(Fork(before, handle, _of_fork(host, limits)), 1.0), (Close(before), 1.0)]


def _of_fork(host: Host, limits: Limits | None = None) -> HostSpec:
    """The fields of the host of a fork, without the argument. In the process, all forks use the
    argument of their parent, because an argument may have 16 MiB."""
    return structs.replace(spec(host, limits), arg=b"")


def spec(host: Host, limits: Limits | None = None) -> HostSpec:
    """The fields of a host that are sent to the guest process."""
    return HostSpec(
        host.request,
        host.seq,
        host.arg,
        limits or host.limits,
        host.max_tokens,
        host.ignore_eos,
        host.memory is not None,
    )
