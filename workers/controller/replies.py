"""The answers to a step: all in one message, those that are late in a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ...protocol.bodies import encode_body
from ...protocol.header import encode_header
from ...protocol.worker_messages import Result, StepResult
from ..machine import machine_id
from .sequence_group import Play, SequenceGroup

LATE_S = 0.003
"""How long what is done waits for what is not, in seconds."""

Part = tuple[SequenceGroup, list[StepResult]]


class Reply:
    """The answer of ``parts`` rounds to one GPU worker.

    ``post`` sends frames. ``woken`` is called, once they are on their way, with what is to be
    played and told in consequence. ``order`` is one lock for all answers of a worker: a step that
    comes at once finds its sequences with the model, and a sequence that is woken at once is told
    of after what suspended it.
    """

    def __init__(
        self,
        gpu: int,
        parts: int,
        post: Callable[[list[bytes]], None],
        woken: Callable[[SequenceGroup, list[Play], list[StepResult]], None],
        order: threading.Lock,
    ) -> None:
        self._gpu = gpu
        self._missing = parts
        self._post = post
        self._woken = woken
        self._order = order
        self._parts: list[Part] = []
        self._lock = threading.Lock()
        self._began = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether no round is missing."""
        return self._missing == 0

    def add(self, session: SequenceGroup, results: list[StepResult]) -> None:
        """A round is over; the last one sends the answer."""
        with self._lock:
            self._parts.append((session, results))
            self._missing -= 1
            parts = self._taken() if self._missing == 0 else []
        self._send(parts)

    def flush(self, now: float) -> None:
        """Sends what is done, where the others are late."""
        if now - self._began < LATE_S:
            return
        with self._lock:
            parts = self._taken()
        self._send(parts)

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _send(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        attachments: list[bytes] = []
        told: list[StepResult] = []
        for session, results in parts:
            for result in results:
                if result.attachment is not None:
                    mask = session.mask(result.seq)
                    if mask is None:
                        continue
                    result.attachment = len(attachments)
                    attachments.append(mask)
                told.append(result)
        body = encode_body(Result(sequences=told, host=machine_id()), "msgpack")
        with self._order:
            after = [(session, *session.told(results)) for session, results in parts]
            self._post([b"RESULT", encode_header(0, self._gpu), body, *attachments])
        for session, plays, failed in after:
            self._woken(session, plays, failed)
            session.free()
