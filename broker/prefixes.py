"""Finds the workers that have the beginning of a prompt in their KV cache, and decides whether to
route a request to one of them.

A *page* is 256 consecutive tokens of a prompt, and its key also depends on all tokens before it
(``protocol/pages.py``). Workers report the keys of the pages in their caches (``PAGES``). The pages
of a prompt count as pages of a worker as soon as the request is sent to this worker. So the next
request with the same beginning can go to the same worker.

If a prompt consists of token ids, its pages have the same keys as the pages that workers report.
The broker cannot tokenize text. So the keys of a text are computed from its bytes. For texts, the
index has only the pages that the broker itself expects at a worker, because workers do not report
such keys.

The broker chooses the worker with the least cost. The cost is the number of prompt tokens that the
worker would have to compute, plus ``REQUEST_TOKENS`` for each request that the worker has.

Sources: the formula of the cost is that of NVIDIA Dynamo's KV router. The expected pages, and the
keys of texts, follow llm-d's approximate prefix scorer. The index of reported pages follows llm-d's
precise scorer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from ..protocol.bodies import decode_as
from ..protocol.errors import Code, RequestError, TokenbusError
from ..protocol.pages import PAGE_BYTES, PAGE_TOKENS, first_key, page_keys, split_keys
from ..protocol.worker_messages import Pages
from .pools import Pool
from .request import Request
from .worker import Worker

REQUEST_TOKENS = 128
"""Number of prompt tokens that have the same cost as one additional request at a worker."""
MAX_PAGES = 128
"""Maximum number of pages of a prompt that are looked up. After 32,768 common tokens, further pages
rarely change the choice."""
MAX_CANDIDATES = 16
"""Maximum number of workers that are compared with the least loaded one."""
MAX_EXPECTED = 4_096
"""Maximum number of expected pages of one worker. The oldest pages are dropped first."""
MAX_KEYS = 4_000_000
"""Maximum number of entries of the index. Above this number, no further pages are added."""


class _PromptFields(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    buffers: list[str] = []


class Prefixes:
    """The index of pages, and the choice of a worker from this index."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._holders: dict[bytes, int | set[int]] = {}
        """By key of a page: the id of the worker that has the page, or a set of ids."""
        self._reported: dict[int, set[bytes]] = {}
        self._expected: dict[int, OrderedDict[bytes, None]] = {}
        self._last: tuple[int, list[bytes]] = (0, [])
        """The id of the last request that was looked up, and the keys of the pages of its
        prompt."""
        self.size = 0
        """Number of entries of the index, of all workers together."""

    # --- the pages of workers -------------------------------------------------------------------

    def report(self, worker: Worker, came: list[bytes], went: list[bytes], reset: bool) -> None:
        """Records a worker's PAGES. ``came`` and ``went`` are the keys of added and of removed
        pages. ``reset`` means that the worker has only the pages in ``came``."""
        if not self._enabled:
            return
        if reset:
            for key in self._reported.pop(worker.id, ()):
                self._remove(worker.id, key)
        reported = self._reported.setdefault(worker.id, set())
        expected = self._expected.setdefault(worker.id, OrderedDict())
        for key in went:
            expected.pop(key, None)
            reported.discard(key)
            self._remove(worker.id, key)
        for key in came:
            expected.pop(key, None)
            if self._add(worker.id, key):
                reported.add(key)

    def on_pages(self, worker: Worker, frames: list[bytes]) -> None:
        """Handles a worker's PAGES; raises RequestError if the message is malformed."""
        pages: Pages = decode_as(Pages, frames[2], "msgpack")
        if len(frames) != 5:
            raise RequestError(
                Code.BAD_MESSAGE,
                f"this PAGES message has {len(frames)} frames; expected 5: type, header, body, "
                "added pages, removed pages",
            )
        self.report(worker, split_keys(frames[3]), split_keys(frames[4]), pages.reset)

    def expect(self, request: Request, worker: Worker, model: str) -> None:
        """Adds the pages of a request's prompt to the expected pages of the worker that receives
        the request."""
        keys = self._keys(request, model)
        if not keys:
            return
        expected = self._expected.setdefault(worker.id, OrderedDict())
        reported = self._reported.get(worker.id, ())
        for key in keys:
            if key in expected:
                expected.move_to_end(key)
            elif key not in reported and self._add(worker.id, key):
                expected[key] = None
        while len(expected) > MAX_EXPECTED:
            key, _ = expected.popitem(last=False)
            self._remove(worker.id, key)

    def lost(self, worker: Worker) -> None:
        """Removes the pages of a worker that is lost, because the worker's cache is lost too."""
        for key in (*self._reported.pop(worker.id, ()), *self._expected.pop(worker.id, ())):
            self._remove(worker.id, key)

    # --- the choice -----------------------------------------------------------------------------

    def choose(self, request: Request, pool: Pool, model: str, least_loaded: Worker) -> Worker:
        """The worker with the least cost; ``least_loaded`` is the worker of the pool with the most
        room."""
        keys = self._keys(request, model)
        depth = 0
        while depth < len(keys) and keys[depth] in self._holders:
            depth += 1
        if not depth or self._has(least_loaded.id, keys[depth - 1]):
            # The least loaded worker has the least cost: no other worker has more pages of the
            # prompt or fewer requests.
            return least_loaded
        best, least = least_loaded, self._cost(least_loaded, keys, depth)
        for worker in islice(self._holding(keys, depth, pool), MAX_CANDIDATES):
            cost = self._cost(worker, keys, depth)
            if cost < least:
                best, least = worker, cost
        return best

    def _holding(self, keys: list[bytes], depth: int, pool: Pool) -> Iterator[Worker]:
        """Workers that have some of the first ``depth`` pages of a prompt. Workers with more of
        these pages come first."""
        seen: set[int] = set()
        for key in reversed(keys[:depth]):
            held = self._holders[key]
            # Only a few of the workers with this page are compared. If very many workers have the
            # page, the least loaded worker probably has it too.
            for number in islice((held,) if isinstance(held, int) else held, MAX_CANDIDATES):
                worker = pool.workers.get(number)
                if number not in seen and worker is not None and pool.accepts(worker):
                    yield worker
                seen.add(number)
            if len(seen) >= MAX_CANDIDATES:
                return

    def _cost(self, worker: Worker, keys: list[bytes], depth: int) -> int:
        """The cost of a worker in tokens, for the pages in ``keys``. The rest of the prompt costs
        the same at each worker."""
        while depth and not self._has(worker.id, keys[depth - 1]):
            depth -= 1
        return (len(keys) - depth) * PAGE_TOKENS + REQUEST_TOKENS * len(worker.requests)

    def _has(self, worker: int, key: bytes) -> bool:
        held = self._holders[key]
        return held == worker if isinstance(held, int) else worker in held

    def _keys(self, request: Request, model: str) -> list[bytes]:
        """The keys of the pages of a request's prompt."""
        if not self._enabled or not request.frames or request.role != "gpu":
            return []
        number, keys = self._last
        if number != request.id:
            keys = list(_prompt_keys(request, model))
            self._last = request.id, keys
        return keys

    # --- the index ------------------------------------------------------------------------------

    def _add(self, worker: int, key: bytes) -> bool:
        if self.size >= MAX_KEYS:
            return False
        held = self._holders.get(key)
        if held is None:
            self._holders[key] = worker
        elif isinstance(held, int):
            if held == worker:
                return True
            self._holders[key] = {held, worker}
        elif worker in held:
            return True
        else:
            held.add(worker)
        self.size += 1
        return True

    def _remove(self, worker: int, key: bytes) -> None:
        held = self._holders.get(key)
        if isinstance(held, int):
            if held != worker:
                return
            del self._holders[key]
        elif held is None or worker not in held:
            return
        else:
            held.remove(worker)
            if not held:
                del self._holders[key]
        self.size -= 1


def _prompt_keys(request: Request, model: str) -> Iterator[bytes]:
    """The keys of the pages of a prompt. If the prompt is one attachment of token ids, the keys are
    computed from the ids. Otherwise they are computed from the bytes of the buffers and the
    text."""
    if sum(map(len, request.frames)) < PAGE_BYTES:
        return iter(())
    try:
        fields: _PromptFields = decode_as(_PromptFields, request.frames[0])
    except TokenbusError:
        return iter(())  # The worker will refuse the body.
    attached = len(request.frames) - len(fields.buffers)
    own, buffers = request.frames[1:attached], request.frames[attached:]
    text = bytes(fields.prompt)
    if own and not buffers and text in (b"", b"null", b"\xc0"):
        return page_keys(first_key(model), own[0], MAX_PAGES)
    return page_keys(first_key(model, "text"), _beginning((*buffers, text)), MAX_PAGES)


def _beginning(parts: Iterable[bytes]) -> bytes:
    """The first ``MAX_PAGES`` pages of the joined parts. Later bytes are not copied, to save time
    on the broker's main thread."""
    found, left = [], MAX_PAGES * PAGE_BYTES
    for part in parts:
        found.append(part[:left])
        left -= len(found[-1])
        if not left:
            break
    return b"".join(found)
