"""The controllers of one request, one for each of its sequences, and the state of each sequence.

A sequence waits for the model, runs a round, or is suspended. A suspended sequence is woken by a
*change*: another sequence of the request writes a variable, finishes or runs a round. A change
during the pre_process that suspends the sequence also wakes it. A sequence that waits for a
variable (``ctx.wait_var``) is woken only by a write of this variable. A sequence that waits for an
input is woken only by an input.

If all sequences are suspended and no change wakes one, all sequences are woken after 10 ms or more
(``IdleGroups``). After ``Limits.idle_wakes`` such wake-ups in a row, the request ends with
`deadlock`. If all sequences wait for variables, the request ends after the first such wake-up.
While a sequence waits for an input or for the answer of a tool, these wake-ups do not happen.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...protocol.errors import Code, ControllerError
from ...protocol.sampling import Distribution, Scores
from ...protocol.worker_messages import Replay, StepResult, Variable, VariableAnswer
from .along import Place
from .contexts import owner_number
from .forks import lineage_of_fork, number_of_fork
from .guest_memory import TenantMemory
from .host import Host, Vocabulary
from .interface import Controller, Program
from .limits import Limits
from .logs import Log
from .masks import MaskRows
from .meters import Meter
from .replays import GroupReplay, Steps, replayed_limits, usual_limits
from .request_variables import RequestVariables
from .round_events import RoundEvents
from .rounds import ControlledSequence, Rounds, Stage
from .tool_calls import GroupTools, SequenceTools
from .variable_calls import RequestState, SequenceVariables

Round = Callable[[], list[StepResult]]
"""A round that is ready to run. It returns the results of its sequence, and of the sequences that
the round creates."""

MAX_WAKES = 200
"""Maximum number of wake-ups of one request before its next sampled token, as a multiple of the
number of its sequences. In a barrier of a program, each sequence wakes each other sequence once."""
MAX_ALONG = 16
"""Maximum number of tokens of a draft after which masks and biases are computed in advance
(``along.py``)."""
SHARED_MEMORY = 16
"""Maximum memory of all sequences of a request together, as a multiple of the memory limit of a
single sequence."""

_STAGES = {
    "sample": Stage.WAITING,
    "score": Stage.WAITING,
    "look": Stage.WAITING,
    "fork": Stage.RUNNING,
    "suspend": Stage.SUSPENDED,
    "stop": Stage.FINISHED,
    "error": Stage.FINISHED,
}


class GroupBusy(Exception):
    """Another thread has the lock of the group."""


class SequenceGroup:
    """One request's controllers. Thread-safe."""

    def __init__(
        self,
        request: int,
        gpu: int,
        limits: Limits,
        arg: bytes,
        max_tokens: int,
        ignore_eos: bool,
        perform: Callable[[Variable], VariableAnswer],
        inspect: bool = False,
        attempt: int = 0,
    ) -> None:
        """``gpu``: the id of the request's GPU worker. ``perform`` does an operation on a variable.
        ``inspect``: whether results have the durations of their rounds. ``attempt``: the number
        that the GPU worker gave to the START (``Start.attempt``)."""
        self.request = request
        self.gpu = gpu
        self.inspect = inspect
        self.attempt = attempt
        """The number that the GPU worker gave to the START. The first RESULT of the group repeats
        this number, and ``PendingResult`` then sets this field to 0."""
        self._limits = limits
        self._arg = arg
        self._max_tokens = max_tokens
        self._ignore_eos = ignore_eos
        self._perform = perform
        self.meter = Meter()
        """Counts the rounds and the CPU time of the request's controller."""
        self.tenant = self.owner = ""
        """The request's tenant, and the owner of its guests. The owner is the tenant, or the
        session if clients do not have keys. The worker sets both fields before the first round."""
        self.memory: TenantMemory | None = None
        """The memory share of the owner. The worker sets this field before the first round."""
        self.reads_usual = False
        """Whether the GPU worker reads the short form of results, ``Result.usual``
        (``Start.reads_usual``). The worker sets this field and ``takes_runs`` before the first
        round."""
        self.events: RoundEvents | None = None
        """The events of the rounds; None if the request is not traced."""
        self.tools: GroupTools | None = None
        """The tool calls of the request. The worker sets this field before the first round."""
        self.ordered: RequestVariables | None = None
        """Orders the request's operations on variables. The worker sets this field before the first
        round. None if each operation waits for the state worker."""
        self._rounds = Rounds(
            self._fork,
            self._changes_of_others,
            lambda: owner_number(self.tenant),
            self._count_bytes,
        )
        self._lock = threading.RLock()
        self._sequences: dict[int, ControlledSequence] = {}
        self._unfreed: deque[Controller] = deque()
        """Controllers of sequences that have finished; ``free`` closes them."""
        self._vocabulary: Vocabulary
        self._rows: MaskRows | None = None
        self._replay: GroupReplay | None = None
        """The replay of the controllers; None if no replay is running."""
        self._numbers = {0}
        """The numbers of all sequences so far."""
        self._changes = 0
        self._shared = RequestState()
        self._wakes = 0
        self._idle_wakes = 0
        """Number of times that ``wake_idle`` has woken the group since a token was sampled, an
        input arrived or a tool answered."""
        self._idle = self._timed = False
        """``_idle``: whether all sequences are suspended. ``_timed``: whether a call of
        ``wake_idle`` is scheduled."""
        self._used_bytes = 0
        self._closed = False

    @property
    def takes_runs(self) -> bool:
        """Whether results may allow several tokens before the next round (``Start.takes_runs``).
        False if the request inspects each round."""
        return self._rounds.takes_runs

    @takes_runs.setter
    def takes_runs(self, takes: bool) -> None:
        self._rounds.takes_runs = takes and not self.inspect

    @property
    def closed(self) -> bool:
        """Whether the request has ended."""
        return self._closed

    @property
    def failure(self) -> str:
        """Why the request cannot continue in this worker; empty while it can. Each later result
        of its sequences becomes an error (``checked``)."""
        return self.ordered.failure if self.ordered is not None else ""

    @property
    def num_sequences(self) -> int:
        """The number of sequences that have not finished."""
        return len(self._sequences)

    @property
    def has_unfreed(self) -> bool:
        """Whether ``free`` has controllers to close."""
        return bool(self._unfreed)

    # --- rounds ---------------------------------------------------------------------------------

    def begin(
        self, program: Program, vocabulary: Vocabulary, prompt: Sequence[int], n: int = 1
    ) -> list[StepResult]:
        """Creates the controller, forks the first sequence into ``n`` sequences, and runs their
        first rounds; raises TokenbusError if the controller cannot be created."""
        return self._rounds.begin(self._first(program, vocabulary), prompt, n)

    def begin_again(
        self,
        program: Program,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        n: int,
        replays: Sequence[Replay],
    ) -> Steps:
        """Like ``begin``, and then replays all rounds that the sequences ran on another worker.

        Yields between rounds, and returns the results that the GPU worker has possibly not applied.
        Once these results are recorded, the group is in the same state as if it had always run on
        this worker.
        """
        replay = GroupReplay(replays, self._rounds, self._drop_ended)
        self._replay = replay
        self._numbers |= replay.recorded
        first = self._first(program, vocabulary)
        results = yield from replay.run(
            first, lambda: self._rounds.begin(first, prompt, n), lambda: self._closed
        )
        with self._lock:
            self._replay = None
            for sequence in self._sequences.values():
                sequence.host.limits = usual_limits(sequence.host.limits, self._limits)
                # The new GPU worker has not suspended any of these sequences yet, so results that
                # suspend them must be sent (``repeats``).
                sequence.woken = False
                if self._closed:
                    sequence.stage = Stage.WAITING
        return results

    def step(
        self,
        seq: int,
        tokens: Sequence[int],
        ended: bool,
        rows: MaskRows | None,
        stop: str = "",
        draft: Sequence[int] = (),
        wait: bool = True,
        distributions: Sequence[Distribution] = (),
        scores: Scores | None = None,
        logprobs: Sequence[float] = (),
    ) -> tuple[ControlledSequence, Round] | None:
        """Returns the next round of a sequence, after the model has sampled ``tokens`` or computed
        ``scores``, or after the GPU worker has ended the sequence. Returns None if the sequence
        does not wait for the model. If ``ended`` is true, a suspended sequence has a round too.

        ``stop``: the stop string before which the text of an ended sequence ends; empty if no stop
        string ended the sequence. ``draft``: tokens that the GPU worker expects next.
        ``distributions`` and ``logprobs``: the values for ``tokens`` that the controller asked for.
        If ``wait`` is false, raises GroupBusy if another thread has the group's lock.
        """
        if not self._lock.acquire(blocking=wait):
            raise GroupBusy
        try:
            sequence = self._sequences.get(seq)
            # The GPU worker may also end a suspended sequence, for example one that has reached
            # ``max_tokens``.
            stages = (Stage.WAITING, Stage.SUSPENDED) if ended else (Stage.WAITING,)
            if sequence is None or sequence.stage not in stages:
                return None
            self._rows = rows
            if sequence.row is None and rows is not None:
                self._give_row(sequence, rows)
            if len(sequence.along) < min(len(draft), MAX_ALONG):
                self._give_along(sequence, min(len(draft), MAX_ALONG))
            sequence.stage = Stage.RUNNING
            self._wakes = self._idle_wakes = 0
            # A step counts as a change, which wakes other sequences. It does not wake this
            # sequence, whose pre_process follows. A distribution without a token is not a change.
            self._changes += bool(tokens or ended or scores)
        finally:
            self._lock.release()
        given = distributions, logprobs
        if ended:
            return sequence, partial(self._rounds.ended, sequence, tokens, stop.encode(), *given)
        if scores:
            return sequence, partial(self._rounds.scored, sequence, scores)
        return sequence, partial(self._rounds.sampled, sequence, tokens, draft, *given)

    def see_changes(self, sequence: ControlledSequence) -> None:
        """Called before a round from ``step`` runs in a batch (``Rounds.see_changes``)."""
        self._rounds.see_changes(sequence)

    def batched(self, sequence: ControlledSequence, token: int) -> list[StepResult]:
        """The result of a round from ``step`` that ran in a batch."""
        return self._rounds.batched(sequence, token)

    def record(self, results: Sequence[StepResult]) -> tuple[list[Round], list[StepResult]]:
        """Records results that are about to be sent; returns the rounds of the sequences that these
        results wake, and errors of sequences that were woken too often."""
        with self._lock:
            for result in results:
                sequence = self._sequences.get(result.seq)
                if sequence is None:
                    continue
                sequence.stage = _STAGES[result.action]
                sequence.awaits = result.awaits
                if sequence.stage is Stage.FINISHED:
                    self._drop(sequence)
                    self._changes += 1
            if self._closed:
                self._drop_idle()
                return [], []
            return self._wake()

    def checked(self, results: list[StepResult]) -> list[StepResult]:
        """Returns the results of a round. If the request has failed, returns errors instead."""
        failure = self.failure
        return [self._failed(result.seq, failure) for result in results] if failure else results

    def fail(self) -> list[StepResult]:
        """Called once when the request has failed (``failure``). Returns errors for all sequences
        whose round is not running, including sequences whose last result was not sent."""
        with self._lock:
            running = {s.seq for s in self._sequences.values() if s.stage is Stage.RUNNING}
            return [self._failed(seq, self.failure) for seq in sorted(self._numbers - running)]

    def input_arrived(self) -> tuple[list[Round], list[StepResult]]:
        """Handles INPUTS, which reports an input of the client; returns what ``record`` returns."""
        with self._lock:
            if self._closed:
                return [], []
            self._shared.arrived += 1
            self._changes += 1
            self._wakes = self._idle_wakes = 0
            return self._wake() if self._replay is None else ([], [])

    def begins_idle(self) -> bool:
        """Whether the caller must schedule a call of ``wake_idle``, because all sequences are
        suspended. Returns True only once before each ``wake_idle``."""
        if not self._idle:  # A thread that is about to set ``_idle`` calls this method afterwards.
            return False
        with self._lock:
            begins = self._idle and not (self._timed or self._closed)
            self._timed |= begins
            return begins

    def wake_idle(self) -> tuple[list[Round], list[StepResult]]:
        """Called some time after all sequences were suspended (``IdleGroups``). Returns the rounds
        that wake the sequences, or results that end the sequences if they were woken too often."""
        with self._lock:
            idle, self._idle, self._timed = self._idle, False, False
            waiting = [s for s in self._sequences.values() if s.stage is Stage.SUSPENDED]
            if not idle or self._closed or len(waiting) != len(self._sequences):
                return [], []
            if deadlock := self._deadlock(waiting):
                return [], [self._error_result(s, Code.DEADLOCK, deadlock) for s in waiting]
            self._idle_wakes += 1
            for sequence in waiting:
                sequence.stage = Stage.RUNNING
            return [partial(self._rounds.again, s) for s in waiting], []

    def wake_for_answer(self) -> tuple[list[Round], list[StepResult]]:
        """Called when a tool has answered; returns what ``record`` returns."""
        with self._lock:
            self._changes += 1
            # Answers of tools do not count as wake-ups, because the number of a request's tool
            # calls is bounded.
            self._wakes = self._idle_wakes = 0
            return ([], []) if self._closed else self._wake()

    def repeats(self, result: StepResult) -> bool:
        """Whether a result only suspends a woken sequence again, with the same ``awaits`` as the
        sequence's last result. Such a result is not sent."""
        if result.action != "suspend" or self.inspect:
            return False
        if result.backtrack or result.ff_tokens or result.logs or result.storage:
            return False
        if result.messages or result.prompt or result.pin is not None:
            return False
        sequence = self._sequences.get(result.seq)
        return sequence is not None and sequence.woken and sequence.awaits == result.awaits

    def running(self, seq: int) -> bool:
        """Whether a sequence has a round whose result has not been sent yet. Does not lock."""
        sequence = self._sequences.get(seq)
        return sequence is not None and sequence.stage is Stage.RUNNING

    def mask(self, seq: int) -> bytes | None:
        """A copy of a sequence's mask, to be sent; None if the sequence has finished."""
        with self._lock:
            sequence = self._sequences.get(seq)
            return bytes(sequence.mask) if sequence is not None else None

    def bias(self, seq: int) -> bytes | None:
        """A sequence's bias, to be sent; None if the sequence has finished."""
        with self._lock:
            sequence = self._sequences.get(seq)
            return sequence.bias if sequence is not None else None

    def along(self, seq: int, count: int) -> list[tuple[bytes, bytes | None]]:
        """Copies of the masks and the biases after the first ``count`` tokens of a sequence's
        draft, to be sent once. The biases are then dropped, because the biases of one draft can
        take 8 MB."""
        with self._lock:
            sequence = self._sequences.get(seq)
            places = sequence.along[:count] if sequence is not None else ()
            return [(bytes(one.mask), one.take_bias()) for one in places]

    def end(self) -> None:
        """Ends the request. Does not wait for a lock. The caller must then call ``close`` on
        another thread."""
        self._closed = True

    def close(self) -> None:
        """Drops all sequences of a request that has ended. A sequence whose round is running is
        dropped when the round ends."""
        with self._lock:
            self._closed = True
            self._drop_idle()

    def free(self) -> None:
        """Closes the controllers of finished sequences. This takes milliseconds if their memory is
        large."""
        while True:
            try:
                controller = self._unfreed.pop()
            except IndexError:
                return
            controller.close()

    # --- inside ---------------------------------------------------------------------------------

    def _first(self, program: Program, vocabulary: Vocabulary) -> ControlledSequence:
        """Sequence 0, with a new controller."""
        self._vocabulary = vocabulary
        variables = self._variables(0)
        host = self._host(0, variables, self._limits)
        controller = program.start(host)
        sequence = ControlledSequence(0, controller, host, variables, self._buffer())
        with self._lock:
            self._sequences[0] = sequence
        return sequence

    def _wake(self) -> tuple[list[Round], list[StepResult]]:
        self._idle = False
        sequences = self._sequences.values()
        waiting = [s for s in sequences if s.stage is Stage.SUSPENDED]
        if not waiting:
            return [], []
        woken = [
            s
            for s in waiting
            if self._changes_of_others(s) > s.seen_changes
            and not (self._awaits_input(s) or s.variables.awaits_write)
        ]
        self._wakes += len(woken)
        # A sequence that received recorded answers during a replay is woken, because the variables
        # may have changed since these answers.
        woken += [s for s in waiting if s.variables.repeated and s not in woken]
        if woken:
            if self._wakes > MAX_WAKES * len(sequences):
                text = (
                    f"the sequences of the request woke each other {self._wakes} times without "
                    "sampling; a sequence that is woken must sample or stop now and then"
                )
                return [], [self._error_result(s, Code.CONTROLLER_FAILED, text) for s in waiting]
            for sequence in woken:
                sequence.stage = Stage.RUNNING
            return [partial(self._rounds.again, s) for s in woken], []
        awaits = any(self._awaits_input(s) for s in waiting)
        awaits |= self.tools is not None and self.tools.waits
        self._idle = len(waiting) == len(self._sequences) and not awaits
        return [], []

    def _deadlock(self, waiting: Sequence[ControlledSequence]) -> str:
        """Returns the reason why the sequences of the request are in a deadlock; empty if they are
        to be woken again. ``waiting`` has all these sequences.

        If all sequences wait for variables, they are woken once, to read the variables again.
        """
        if self._idle_wakes and all(s.variables.awaits_write for s in waiting):
            names = sorted({repr(s.variables.awaited_name) for s in waiting})
            return (
                "deadlock: all remaining sequences of the request wait for variables "
                f"({', '.join(names)}), so no sequence can write these variables"
            )
        if self._idle_wakes < self._limits.idle_wakes:
            return ""
        return (
            "deadlock: all sequences of the request are suspended; they were woken "
            f"{self._idle_wakes} times in a row, and suspended again each time"
        )

    def _awaits_input(self, sequence: ControlledSequence) -> bool:
        """Whether a suspended sequence waits for an input: its last ``receive`` found no input, and
        no input has arrived since."""
        return sequence.variables.awaited_input == self._shared.arrived

    def _failed(self, seq: int, failure: str) -> StepResult:
        code = str(Code.CONTROLLER_FAILED)
        return StepResult(self.request, seq, "error", error=failure, code=code)

    def _error_result(self, sequence: ControlledSequence, code: Code, text: str) -> StepResult:
        sequence.stage = Stage.RUNNING
        return StepResult(
            self.request,
            sequence.seq,
            "error",
            logs=sequence.host.log.take(),
            storage=sequence.variables.take_writes(),
            error=text,
            code=str(code),
            wakes=sequence.wakes,
            messages=sequence.variables.take_messages(),
        )

    def _fork(self, parent: ControlledSequence, more: int) -> list[ControlledSequence]:
        """Creates ``more`` copies of a sequence, in the middle of the sequence's round."""
        with self._lock:
            replay = self._replay
            recorded = replay.numbers(parent, more) if replay is not None else None
            if recorded is None:
                # The guest chose ``more``, so it is checked before it is used.
                self._check_forks(more)
            parent.forks += 1
            lineages = [
                lineage_of_fork(parent.variables.lineage, parent.forks, at) for at in range(more)
            ]
            numbers = recorded or self._new_numbers(parent, lineages)
            parent.children += more
            limits = self._limits_among(len(self._sequences) + more)
        children: list[ControlledSequence] = []
        try:
            for seq, lineage in zip(numbers, lineages, strict=True):
                variables = self._variables(lineage)
                host = self._host(seq, variables, limits)
                host.distributions = parent.host.distributions
                controller = parent.controller.fork(host)
                child = ControlledSequence(seq, controller, host, variables, self._buffer())
                child.prompt_length, child.length = parent.prompt_length, parent.length
                children.append(child)
        except BaseException:
            for child in children:
                child.controller.close()
            raise
        with self._lock:
            for child in children:
                if parent.row is not None and self._rows is not None:
                    self._give_row(child, self._rows)
                self._sequences[child.seq] = child
        if replay is not None:
            replay.made(children)
        return children

    def _check_forks(self, more: int) -> None:
        """Raises ControllerError if the request may not have ``more`` further sequences."""
        total = len(self._numbers) + more
        if total > self._limits.forks:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the fork into {more} more sequences would give this request {total} sequences; "
                f"at most {self._limits.forks} are allowed",
            )

    def _new_numbers(self, parent: ControlledSequence, lineages: Sequence[int]) -> list[int]:
        """Chooses the numbers of a parent's new sequences."""
        numbers = []
        for place, lineage in enumerate(lineages, parent.children + 1):
            number = number_of_fork(parent.seq, place, lineage, self._numbers)
            self._numbers.add(number)
            numbers.append(number)
        return numbers

    def _limits_among(self, sequences: int) -> Limits:
        """The limits of each sequence if the request has ``sequences`` sequences."""
        alone = self._limits.memory_bytes
        return replace(self._limits, memory_bytes=min(alone, SHARED_MEMORY * alone // sequences))

    def _changes_of_others(self, sequence: ControlledSequence) -> int:
        return self._changes - sequence.variables.own_changes

    def _count_write(self) -> None:
        with self._lock:
            self._changes += 1

    def _variables(self, lineage: int) -> SequenceVariables:
        return SequenceVariables(
            self.request,
            lineage,
            self.perform_within_quota,
            self._count_write,
            self._perform,
            self._shared,
        )

    def perform_within_quota(self, operation: Variable) -> VariableAnswer:
        """Performs an operation on a variable, and returns its answer. Raises ControllerError if
        the request would have written too many bytes."""
        self._count_bytes(len(operation.value))
        return self._perform(operation)

    def _count_bytes(self, size: int) -> None:
        """Counts bytes towards ``Limits.used_bytes``, for example bytes that the request writes to
        variables. Raises ControllerError if the request exceeds this limit."""
        most = self._limits.used_bytes
        with self._lock:
            used = self._used_bytes + size
            if used <= most:
                self._used_bytes = used
        if used > most:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                "the request's writes to variables, new prompts, scored texts, dropped tokens and "
                f"looks have {used} bytes in all; at most {most} are allowed",
            )

    def _host(self, seq: int, variables: SequenceVariables, limits: Limits) -> Host:
        return Host(
            self.request,
            seq,
            self._arg,
            self._vocabulary,
            variables,
            Log(limits.log_bytes),
            limits if self._replay is None else replayed_limits(limits),
            self._max_tokens,
            self._ignore_eos,
            self.memory,
            tools=SequenceTools(self.tools, variables) if self.tools is not None else None,
        )

    def _buffer(self) -> memoryview:
        return memoryview(bytearray(4 * -(-self._vocabulary.size // 32)))

    @staticmethod
    def _give_row(sequence: ControlledSequence, rows: MaskRows) -> None:
        row = rows.take()
        if row is not None:
            sequence.row, sequence.mask = row, rows.view(row)
            sequence.bias_view = rows.bias_view(row)
            sequence.along = []

    def _give_along(self, sequence: ControlledSequence, count: int) -> None:
        """Allocates memory for the decisions after ``count`` tokens of a draft. If the sequence's
        mask is in a row of the shared file, the decisions get further rows of this file. At least
        half of all rows stay free for other sequences. If the mask is not in a row, the decisions
        get buffers of this process."""
        rows = self._rows
        while len(sequence.along) < count:
            if sequence.row is None:
                sequence.along.append(Place(self._buffer()))
                continue
            row = rows.take_spare() if rows is not None else None
            if rows is None or row is None:
                return
            sequence.along.append(Place(rows.view(row), row, rows.bias_view(row)))

    def _drop_ended(self, sequence: ControlledSequence) -> None:
        with self._lock:
            sequence.stage = Stage.FINISHED
            self._drop(sequence)
            self._changes += 1

    def _drop(self, sequence: ControlledSequence) -> None:
        del self._sequences[sequence.seq]
        self._unfreed.append(sequence.controller)
        if sequence.row is not None and self._rows is not None:
            self._rows.give_back(sequence.row)
            for place in sequence.along:
                if place.row is not None:
                    self._rows.give_back(place.row)
            # The views are dropped because the file stays mapped while a view refers to it.
            sequence.row, sequence.mask = None, memoryview(b"")
            sequence.bias_view = None
            sequence.along = []

    def _drop_idle(self) -> None:
        for sequence in list(self._sequences.values()):
            if sequence.stage is not Stage.RUNNING:
                self._drop(sequence)
        if not self._sequences:
            self._rows = None
