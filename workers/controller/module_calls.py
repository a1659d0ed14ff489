"""The requests of the module store (``wasm/store.py``) to other workers. The store requests tables
of modules and tags from the state worker. It requests the bytes of a module from a controller
worker that has the module.

A call blocks the thread that makes it. While the thread waits, other jobs use its slot of the
thread pool (``pool.py``). The *bus thread*, which receives the worker's messages, delivers the
answers. Calls without an answer are sent again, because the broker and workers may have been
restarted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ...protocol.bodies import decode_as, encode_body
from ...protocol.errors import Code, UnavailableError
from ...protocol.header import encode_header
from ...protocol.ids import MAX_ID
from ...protocol.pace import RETRY_AFTER_S
from ...protocol.worker_messages import (
    FetchModule,
    ModuleBytes,
    ModuleTable,
    ModuleTableAnswer,
)
from ...transport.waiting import get_within
from ..bus import FromBus
from .pool import freeing_slot

log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Seconds after which an unanswered message is sent again. The message is an operation on a table,
or asks which workers have a module."""
SEND_S = 10.0
"""Seconds that a worker may take to send a module. After this time, another worker is chosen."""
TABLE_S = 30.0
"""Maximum total wait of an operation on a table, in seconds."""
FETCH_S = 30.0
"""Maximum total wait for a module, in seconds. A worker that has the module may be restarting
meanwhile."""


class _Sent(NamedTuple):
    """A worker's answer about a module. It has the module's bytes, or None if the worker only
    reports that it has the module."""

    worker: int
    wasm: bytes | None


class ModuleCalls:
    """The calls of this worker that wait for an answer.

    ``post`` sends frames to the worker that their header names. If the header does not name a
    worker, ``post`` sends the frames to every broker. ``post_once`` sends frames to one broker. Its
    second argument is a number that selects the broker.
    """

    def __init__(
        self,
        post: Callable[[list[bytes]], None],
        post_once: Callable[[list[bytes], int], None],
        fetch_s: float = FETCH_S,
        again_s: float = AGAIN_S,
    ) -> None:
        self._post = post
        self._post_once = post_once
        self._fetch_s = fetch_s
        self._again_s = again_s
        self._lock = threading.Lock()
        self._tables: dict[int, SimpleQueue[ModuleTableAnswer]] = {}
        self._fetches: dict[str, list[SimpleQueue[_Sent]]] = {}

    def table(
        self, tenant: str, known: int, content: bytes | None = None, patience_s: float = TABLE_S
    ) -> ModuleTableAnswer:
        """Reads or replaces the table of a tenant (``ModuleTable``).

        Raises UnavailableError if the operation is refused, or not answered in time. An operation
        that was not answered in time may still have been executed.
        """
        number = secrets.randbelow(MAX_ID)
        body = encode_body(ModuleTable(number, tenant, known, content), "msgpack")
        answers: SimpleQueue[ModuleTableAnswer] = SimpleQueue()
        with self._lock:
            self._tables[number] = answers
        try:
            with freeing_slot():
                for turn in range(max(1, round(patience_s / AGAIN_S))):
                    frames = [b"MODULE_TABLE", encode_header(), body]
                    if content is None:
                        self._post(frames)
                    else:
                        # A write is sent to one broker only. If each broker forwarded the write,
                        # the state worker would receive it several times, and the answer to the
                        # second message could arrive first.
                        self._post_once(frames, turn)
                    with contextlib.suppress(Empty):
                        answer = get_within(answers, self._again_s)
                        break
                else:
                    raise UnavailableError(
                        Code.STORE_FAILED,
                        "the state worker, which stores the tags of modules, did not answer within "
                        f"{patience_s:g} s; modules need a running state worker",
                        retry_after_s=RETRY_AFTER_S,
                    )
        finally:
            with self._lock:
                del self._tables[number]
        if answer.error is not None:
            raise UnavailableError(Code.STORE_FAILED, answer.error, retry_after_s=RETRY_AFTER_S)
        return answer

    def fetch(self, module: str) -> bytes:
        """The bytes of a module, from any worker that has them; raises UnavailableError if no
        worker sends them in time.

        Bytes that do not match the module's id are discarded, and another worker is chosen.
        """
        answers: SimpleQueue[_Sent] = SimpleQueue()
        with self._lock:
            self._fetches.setdefault(module, []).append(answers)
        try:
            with freeing_slot():
                return self._fetch(module, answers)
        finally:
            with self._lock:
                self._fetches[module].remove(answers)
                if not self._fetches[module]:
                    del self._fetches[module]

    def on_answer(self, message: FromBus) -> None:
        """Delivers an answer. Raises RequestError for a malformed answer."""
        if message.type == b"MODULE_TABLE_ANSWER":
            answer: ModuleTableAnswer = decode_as(ModuleTableAnswer, message.body, "msgpack")
            with self._lock:
                table = self._tables.get(answer.id)
            if table is not None:
                table.put(answer)
            return
        module = decode_as(ModuleBytes, message.body, "msgpack").module
        wasm = message.attachments[0] if message.attachments else None
        with self._lock:
            fetches = list(self._fetches.get(module, ()))
        for fetch in fetches:
            fetch.put(_Sent(message.header.address, wasm))

    def _fetch(self, module: str, answers: SimpleQueue[_Sent]) -> bytes:
        asks = encode_body(FetchModule(module=module), "msgpack")
        fetches = encode_body(FetchModule(module=module, send=True), "msgpack")
        sends: int | None = None
        """The worker from which the module was requested."""
        wrong: set[int] = set()
        now = next_at = time.monotonic()
        """The time at which all workers are queried again, because the sending worker may have lost
        the module."""
        ends_at = now + self._fetch_s
        while (now := time.monotonic()) < ends_at:
            if now >= next_at:
                sends = None
                self._post([b"FETCH_MODULE", encode_header(), asks])
                next_at = now + self._again_s
            try:
                sent = get_within(answers, min(ends_at, next_at) - now)
            except Empty:
                continue
            if sent.wasm is None:
                if sends is None and sent.worker not in wrong:
                    sends, next_at = sent.worker, now + SEND_S
                    self._post([b"FETCH_MODULE", encode_header(0, sends), fetches])
            elif hashlib.sha256(sent.wasm).hexdigest() == module:
                return sent.wasm
            else:
                log.error(
                    "worker %d sent bytes that do not match the id of the module %s; they are "
                    "not used",
                    sent.worker,
                    module,
                )
                wrong.add(sent.worker)
                next_at = now
        others = f" ({len(wrong)} sent bytes that do not match its id)" if wrong else ""
        raise UnavailableError(
            Code.STORE_FAILED,
            f"the module {module} is not on this machine, and the other controller workers did not "
            f"send it within {self._fetch_s:g} s{others}; start the worker to which it was "
            "uploaded, or upload it again",
            retry_after_s=RETRY_AFTER_S,
        )
