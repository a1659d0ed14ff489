"""Tokenizes longer texts on separate threads, so that a long prompt does not delay the steps of
other requests.

There are two queues, called *lanes*: one for small texts and one for large texts. So a text of
kilobytes does not wait for a text of megabytes. In a lane, clients take turns: a request of one
client is followed by a request of the next client. Each lane has a thread while it has requests.
Tokenizers of the library ``tokenizers`` do not delay the steps, because this library releases the
interpreter's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from ....protocol.text_bounds import SEGMENT_CHARS

MAX_INLINE_BYTES = 1024
"""Texts of up to this size are tokenized on the calling thread. Starting another thread would take
longer."""

T = TypeVar("T")


class Job(Generic[T]):
    """The tokenization of one request. ``work`` is called on a thread. Its argument is a function
    that returns whether the result is still needed."""

    def __init__(
        self, request: int, client: int, num_bytes: int, work: Callable[[Callable[[], bool]], T]
    ) -> None:
        self.request = request
        self.client = client
        self.num_bytes = num_bytes
        self.wanted = True
        """Whether the result is still needed. It is not if the request has ended before its texts
        were tokenized."""
        self._work = work
        self._result: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Runs the work, and stores its result or its error."""
        try:
            self._result = self._work(lambda: self.wanted)
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """The result. Raises the error if the work has failed."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Tokenization(Generic[T]):
    """The jobs of one worker. ``on_done`` is called on a thread when a job has been added to
    ``done``."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self.done: SimpleQueue[Job[T]] = SimpleQueue()
        self._on_done = on_done
        self._lanes = (_Lane(self._finish), _Lane(self._finish))

    def submit(self, job: Job[T]) -> None:
        """Adds a job to its lane."""
        self._lane(job).submit(job)

    def drop(self, job: Job[T]) -> None:
        """Drops a job whose result is not needed any more."""
        job.wanted = False
        self._lane(job).drop(job)

    def _lane(self, job: Job[T]) -> _Lane[T]:
        return self._lanes[job.num_bytes > SEGMENT_CHARS]

    def _finish(self, job: Job[T]) -> None:
        self.done.put(job)
        self._on_done()


class _Lane(Generic[T]):
    """One thread and its waiting jobs."""

    def __init__(self, finish: Callable[[Job[T]], None]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, deque[Job[T]]] = OrderedDict()
        """The jobs of each client; the client whose turn is next comes first."""
        self._running = False

    def submit(self, job: Job[T]) -> None:
        with self._lock:
            self._waiting.setdefault(job.client, deque()).append(job)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="tokenizer", daemon=True).start()

    def drop(self, job: Job[T]) -> None:
        with self._lock:
            jobs = self._waiting.get(job.client)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._waiting[job.client]

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            self._finish(job)

    def _next(self) -> Job[T] | None:
        with self._lock:
            if not self._waiting:
                self._running = False
                return None
            client, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[client] = jobs
            return job
