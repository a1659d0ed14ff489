"""The controllers of one request: a sequence, its forks, who waits for whom.

A sequence is with the model, in a round, or suspended. A suspended one goes on when another
sequence of the request has written a variable or has ended since its last pre_process began; where
all are suspended and none goes on, nobody ever will: the request ends as deadlocked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...protocol.errors import Code, ControllerError
from ...protocol.worker_messages import StepResult, Variable, VariableAnswer
from .host import Host, Vocabulary
from .interface import Controller, Program
from .limits import Limits
from .logs import Log
from .masks import MaskRows
from .rounds import ControlledSequence, Rounds, Stage
from .variable_calls import SequenceVariables

Play = Callable[[], list[StepResult]]

MAX_WAKES = 200
"""How often sequences may wake each other without one of them sampling, for each that there is: a
barrier at which all of them wait wakes each as often as there are others."""
SHARED_MEMORY = 16
"""The memory that many sequences share, in times of what one alone may have."""

_STAGES = {
    "sample": Stage.AWAY,
    "fork": Stage.RUNNING,
    "suspend": Stage.SUSPENDED,
    "stop": Stage.OVER,
    "error": Stage.OVER,
}


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
        ask: Callable[[Variable], VariableAnswer],
    ) -> None:
        """``gpu``: the GPU worker that has the request; ``ask`` does an operation on a variable."""
        self.request = request
        self.gpu = gpu
        self._limits = limits
        self._arg = arg
        self._max_tokens = max_tokens
        self._ignore_eos = ignore_eos
        self._ask = ask
        self._rounds = Rounds(self._fork, self._changes_of_others)
        self._lock = threading.RLock()
        self._sequences: dict[int, ControlledSequence] = {}
        self._gone: deque[Controller] = deque()
        """Those of sequences that are over, until ``free``."""
        self._vocabulary: Vocabulary
        self._rows: MaskRows | None = None
        self._next = 1
        self._changes = 0
        self._wakes = 0
        self._written_bytes = 0
        self._closed = False

    # --- rounds ---------------------------------------------------------------------------------

    def begin(
        self, program: Program, vocabulary: Vocabulary, prompt: Sequence[int], n: int = 1
    ) -> list[StepResult]:
        """Makes the controller, and forks it into ``n``, and plays the first rounds; raises
        TokenbusError where none can be made."""
        self._vocabulary = vocabulary
        variables = self._variables(0)
        host = self._host(0, variables, self._limits)
        controller = program.start(host)
        sequence = ControlledSequence(0, controller, host, variables, self._buffer())
        with self._lock:
            self._sequences[0] = sequence
        return self._rounds.begin(sequence, prompt, n)

    def step(
        self, seq: int, tokens: Sequence[int], ended: bool, rows: MaskRows | None
    ) -> tuple[ControlledSequence, Play] | None:
        """What is to be played of a sequence that the model's side tells of; None where it is not
        with the model."""
        with self._lock:
            sequence = self._sequences.get(seq)
            if sequence is None or sequence.stage is not Stage.AWAY:
                return None
            self._rows = rows
            if sequence.row is None and rows is not None:
                self._give_row(sequence, rows)
            sequence.stage = Stage.RUNNING
            self._wakes = 0
        play = self._rounds.ended if ended else self._rounds.sampled
        return sequence, partial(play, sequence, tokens)

    def told(self, results: Sequence[StepResult]) -> tuple[list[Play], list[StepResult]]:
        """These results are about to be sent: what is to be played next, and what else told."""
        with self._lock:
            for result in results:
                sequence = self._sequences.get(result.seq)
                if sequence is None:
                    continue
                sequence.stage = _STAGES[result.then]
                if sequence.stage is Stage.OVER:
                    self._drop(sequence)
                    self._changes += 1
            if self._closed:
                self._drop_idle()
                return [], []
            return self._woken()

    def mask(self, seq: int) -> bytes | None:
        """A copy of a sequence's mask, to be sent; None where it is gone."""
        with self._lock:
            sequence = self._sequences.get(seq)
            return bytes(sequence.mask) if sequence is not None else None

    def close(self) -> None:
        """The request is over: everything goes, what is in a round when that ends."""
        with self._lock:
            self._closed = True
            self._drop_idle()

    def free(self) -> None:
        """Frees the controllers that have gone: some milliseconds where they had much memory."""
        while True:
            try:
                controller = self._gone.pop()
            except IndexError:
                return
            controller.close()

    @property
    def over(self) -> bool:
        """Whether no sequence is left."""
        return not self._sequences

    # --- inside ---------------------------------------------------------------------------------

    def _woken(self) -> tuple[list[Play], list[StepResult]]:
        every = self._sequences.values()
        waiting = [s for s in every if s.stage is Stage.SUSPENDED]
        woken = [s for s in waiting if self._changes_of_others(s) > s.saw]
        if woken:
            self._wakes += len(woken)
            if self._wakes > MAX_WAKES * len(every):
                text = f"its sequences woke each other {self._wakes} times without one that samples"
                return [], [self._failed(s, Code.CONTROLLER_FAILED, text) for s in waiting]
            for sequence in woken:
                sequence.stage = Stage.RUNNING
            return [partial(self._rounds.again, s) for s in woken], []
        if waiting and len(waiting) == len(self._sequences):
            text = (
                "deadlock: every sequence of the request is suspended, so that no variable will "
                "change and no fork will end"
            )
            return [], [self._failed(s, Code.DEADLOCK, text) for s in waiting]
        return [], []

    def _failed(self, sequence: ControlledSequence, code: Code, text: str) -> StepResult:
        sequence.stage = Stage.RUNNING
        return StepResult(
            self.request,
            sequence.seq,
            "error",
            logs=sequence.host.log.take(),
            storage=sequence.variables.take_writes(),
            error=text,
            code=str(code),
        )

    def _fork(self, parent: ControlledSequence, more: int) -> list[ControlledSequence]:
        """Copies of a sequence, in the middle of its round."""
        with self._lock:
            first = self._next
            if first + more > self._limits.forks:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"{more} more forks would make {first + more} sequences of this request; "
                    f"{self._limits.forks} are allowed",
                )
            self._next += more
            limits = self._limits_among(len(self._sequences) + more)
        children: list[ControlledSequence] = []
        try:
            for seq in range(first, first + more):
                variables = self._variables(seq)
                host = self._host(seq, variables, limits)
                controller = parent.controller.fork(host)
                child = ControlledSequence(seq, controller, host, variables, self._buffer())
                child.length = parent.length
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
        return children

    def _limits_among(self, sequences: int) -> Limits:
        """The limits of a fork that is one of so many sequences."""
        alone = self._limits.memory_bytes
        return replace(self._limits, memory_bytes=min(alone, SHARED_MEMORY * alone // sequences))

    def _changes_of_others(self, sequence: ControlledSequence) -> int:
        return self._changes - sequence.variables.own_changes

    def _wrote(self) -> None:
        with self._lock:
            self._changes += 1

    def _variables(self, seq: int) -> SequenceVariables:
        return SequenceVariables(self.request, seq, self._asked, self._wrote)

    def _asked(self, operation: Variable) -> VariableAnswer:
        """An operation's answer, where the request may write so much."""
        most = self._limits.written_bytes
        with self._lock:
            self._written_bytes += len(operation.value)
            written = self._written_bytes
        if written > most:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the request wrote {written} bytes to variables so far; {most} are the most",
            )
        return self._ask(operation)

    def _host(self, seq: int, variables: SequenceVariables, limits: Limits) -> Host:
        return Host(
            self.request,
            seq,
            self._arg,
            self._vocabulary,
            variables,
            Log(limits.log_bytes),
            limits,
            self._max_tokens,
            self._ignore_eos,
        )

    def _buffer(self) -> memoryview:
        return memoryview(bytearray(4 * -(-self._vocabulary.size // 32)))

    @staticmethod
    def _give_row(sequence: ControlledSequence, rows: MaskRows) -> None:
        row = rows.take()
        if row is not None:
            sequence.row, sequence.mask = row, rows.view(row)

    def _drop(self, sequence: ControlledSequence) -> None:
        del self._sequences[sequence.seq]
        self._gone.append(sequence.controller)
        if sequence.row is not None and self._rows is not None:
            self._rows.give_back(sequence.row)

    def _drop_idle(self) -> None:
        for sequence in list(self._sequences.values()):
            if sequence.stage is not Stage.RUNNING:
                self._drop(sequence)
