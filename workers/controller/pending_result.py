"""The RESULT of a step: one message with the results of all sequences. If some rounds are slow,
their results follow in further messages. A *group* has the sequences of one request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from ...protocol.bodies import encode_body
from ...protocol.errors import Code
from ...protocol.header import encode_header
from ...protocol.logs import about
from ...protocol.worker_messages import Result, StepResult
from ..machine import machine_id
from .fair_jobs import Job
from .sequence_group import Round, SequenceGroup

log = logging.getLogger(__name__)

FLUSH_S = 0.003
"""Number of seconds, from the beginning of the rounds, after which finished results are sent
without waiting for unfinished rounds."""
WOKEN_FLUSH_S = 0.02
"""Like ``FLUSH_S``, for the rounds of woken sequences. This time is longer, because no forward
waits for these rounds. Also, one forward with all woken sequences takes less time than several
forwards."""

Part = tuple[SequenceGroup, list[StepResult]]


class Submit(Protocol):
    """Queues jobs on other threads, in the share of a tenant (``Pool.submit``)."""

    def __call__(self, jobs: Iterable[Job], /, *, tenant: str) -> None: ...


class PendingResult:
    """Collects the results of ``rounds`` rounds for one GPU worker, and sends them.

    ``post`` sends frames. After ``post``, ``sent`` is called for each group. Its arguments are the
    group, the rounds of the sequences that the sent results wake, and the errors of sequences that
    were woken too often.

    ``submit`` runs jobs on other threads. The controllers of finished sequences are freed there,
    because freeing a large memory takes milliseconds.

    ``order`` is one lock for all results of a worker. It is held while results are recorded and
    then sent. So the sequences of a RESULT already wait for the model when the next STEP arrives.
    Also, the result of a woken sequence is sent after the result that suspended the sequence.

    Results that depend on operations on variables are sent when the state worker has confirmed
    these operations (``request_variables``).
    """

    def __init__(
        self,
        gpu: int,
        rounds: int,
        post: Callable[[list[bytes]], None],
        sent: Callable[[SequenceGroup, list[Round], list[StepResult]], None],
        submit: Submit,
        order: threading.Lock,
        flush_s: float = FLUSH_S,
    ) -> None:
        """``flush_s``: used in place of ``FLUSH_S``."""
        self._gpu = gpu
        self._missing = rounds
        self._post = post
        self._sent = sent
        self._submit = submit
        self._order = order
        self._flush_s = flush_s
        self._parts: list[Part] = []
        self._lock = threading.Lock()
        self._began = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether every round has ended."""
        return self._missing == 0

    def add(self, group: SequenceGroup, results: list[StepResult]) -> None:
        """Adds the results of a round that has ended. When the last round has ended, the results
        are sent."""
        self.add_all([(group, results)])

    def add_all(self, parts: Sequence[Part]) -> None:
        """Adds the results of several rounds that have ended. When the last round has ended, the
        results are sent."""
        with self._lock:
            self._parts += parts
            self._missing -= len(parts)
            ready = self._take_parts() if self._missing == 0 else []
        self._send(ready)

    def due(self, now: float) -> bool:
        """Whether results are ready and have waited long enough for ``flush``."""
        return bool(self._parts) and now - self._began >= self._flush_s

    def flush(self) -> None:
        """Sends the results that are ready. Waits for other results that are being sent."""
        with self._lock:
            parts = self._take_parts()
        self._send(parts)

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _send(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        sent = False
        while not sent:
            # A request that has ended may have been started again; results of the earlier start
            # must not be sent. The message is built without the lock, because building it may take
            # milliseconds.
            failed = [group for group, _ in parts if group.failure]
            parts = [(group, group.checked(results)) for group, results in parts]
            live: list[Part] = []
            held: dict[SequenceGroup, list[Part]] = {}
            for part in parts:
                if _depends(part[0]):
                    held.setdefault(part[0], []).append(part)
                elif not part[0].closed:
                    live.append(part)
            frames = self._frames(live)
            later = [(group, self._frames(of_group)) for group, of_group in held.items()]
            with self._order:
                sent = not any(group.closed for group, _ in (*live, *later))
                sent = sent and failed == [group for group, _ in parts if group.failure]
                if sent:
                    after = self._post_results(parts, frames, later)
        for group, rounds, ended in after:
            self._sent(group, rounds, ended)
            if group.has_unfreed:
                self._submit([group.free], tenant=group.tenant)

    def _post_results(
        self,
        parts: Sequence[Part],
        frames: list[bytes],
        later: Sequence[tuple[SequenceGroup, list[bytes]]],
    ) -> list[tuple[SequenceGroup, list[Round], list[StepResult]]]:
        """Called under the lock ``order``: records the results and sends their messages. The
        messages ``later`` are sent when the operations of their groups are confirmed. Returns each
        group with the rounds to run next and the errors of sequences that were woken too often."""
        by_group: dict[SequenceGroup, list[StepResult]] = {}
        for group, results in parts:
            by_group.setdefault(group, []).extend(results)
        # The rounds of all sequences that are woken get one RESULT, so that the model runs these
        # sequences together.
        after = [(group, *group.record(results)) for group, results in by_group.items()]
        if frames:
            self._post(frames)
        for group, message in later:
            assert group.ordered is not None
            if message:
                group.ordered.when_confirmed(partial(self._post, message))
            group.ordered.flush()
        for group, _ in parts:
            group.attempt = 0
        return after

    def _frames(self, parts: Sequence[Part]) -> list[bytes]:
        """The frames of the message with these results; empty if nothing is to be sent."""
        body, attachments = _message(parts)
        return [b"RESULT", encode_header(0, self._gpu), body, *attachments] if body else []


def _depends(group: SequenceGroup) -> bool:
    """Whether results of a group may depend on operations that are not confirmed."""
    ordered = group.ordered
    return ordered is not None and ordered.waits and not (ordered.failure or group.closed)


def _message(parts: Sequence[Part]) -> tuple[bytes, list[bytes]]:
    """The body of the message, and its masks and biases; an empty body if nothing is to be sent."""
    attachments: list[bytes] = []
    sequences: list[StepResult] = []
    usual: list[int] = []
    for group, results in parts:
        # A round that forks has several results, which the GPU worker must apply in their order.
        alone = len(results) == 1 and group.reads_usual
        for result in results:
            if alone and result.row is not None and _is_usual(result):
                usual += (result.request, result.seq, result.row)
                continue
            if result.action == "suspend" and group.repeats(result):
                continue
            if attach(group, result, attachments):
                sequences.append(result)
    attempts = {group.request: group.attempt for group, _ in parts if group.attempt}
    made = Result(sequences=sequences, usual=usual, host=machine_id(), attempts=attempts)
    return _encoded(made) if sequences or usual else b"", attachments


def _is_usual(result: StepResult) -> bool:
    """Whether the result is only to sample under the mask in the sequence's row
    (``Result.usual``)."""
    default = StepResult(result.request, result.seq, "sample", row=result.row)
    return result == default


def attach(group: SequenceGroup, result: StepResult, attachments: list[bytes]) -> bool:
    """Appends the masks and biases of a result to ``attachments``, unless they are in rows of the
    shared file (``masks.py``). Stores their positions in the result. Returns False if the sequence
    has ended meanwhile."""

    def number(data: bytes) -> int:
        attachments.append(data)
        return len(attachments) - 1

    if result.bias_attachment is not None:
        bias = group.bias(result.seq)
        if bias is None:
            return False
        result.bias_attachment = number(bias)
    if result.attachment is not None:
        mask = group.mask(result.seq)
        if mask is None:
            return False
        result.attachment = number(mask)
        along = group.along(result.seq, len(result.along))
        result.along = [number(mask) for mask, _ in along]
        if result.biases_along:
            result.biases_along = [None if bias is None else number(bias) for _, bias in along]
    return True


def _encoded(made: Result) -> bytes:
    """The body of the message. A result that cannot be encoded becomes an error of its sequence."""
    try:
        return encode_body(made, "msgpack")
    except (TypeError, ValueError, OverflowError):
        pass
    for result in made.sequences:
        try:
            encode_body(result, "msgpack")
        except (TypeError, ValueError, OverflowError) as error:
            # For example, the text of a controller may have half of a surrogate pair.
            what = "the result of sequence %d cannot be encoded: %s"
            log.error(what, result.seq, error, extra=about(result.request))
            text = result.error or f"the controller's result cannot be encoded: {error}"
            result.action, result.code = "error", result.code or str(Code.CONTROLLER_FAILED)
            result.error = text.encode("utf-8", "backslashreplace").decode()
            result.backtrack, result.ff_tokens, result.children = 0, [], []
            result.row = result.attachment = None
            result.bias_row = result.bias_attachment = None
            result.query = result.override = None
            result.logprobs = False
            result.along, result.biases_along = [], []
            result.logs = result.logs.encode("utf-8", "backslashreplace").decode()
            result.storage = []
            result.messages = []
    return encode_body(made, "msgpack")
