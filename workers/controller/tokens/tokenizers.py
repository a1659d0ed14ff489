"""Caches this worker's vocabularies. A vocabulary is built once, from a tokenizer that is requested
from a GPU worker."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from ....protocol.worker_messages import VocabularyName
from .vocabulary import TokenizerVocabulary

Ready = Callable[[TokenizerVocabulary | None, str], None]
"""A function that is called with the vocabulary and "", or with None and the reason for the
failure."""

RETRY_S = 2.0
"""Seconds without an answer after which a tokenizer is requested again, because the GPU worker may
have been lost. Another GPU worker may have the same tokenizer."""
GIVE_UP_S = 30.0
"""Seconds after which a request stops waiting for a tokenizer and fails."""
KEPT = 16
"""Maximum cached vocabularies; the least recently used is evicted first. Sequences that use an
evicted vocabulary keep it."""

_Key = tuple[str, int, tuple[int, ...], tuple[tuple[str, int], ...]]
"""The fingerprint of a tokenizer, the size of the model's vocabulary, the end-of-sequence tokens,
and the special tokens by role."""


class _Waiting(NamedTuple):
    """A request that waits for a tokenizer."""

    key: _Key
    gpu: int
    ready: Ready
    since: float


class Vocabularies:
    """Vocabularies by tokenizer, size and special tokens. Thread-safe."""

    def __init__(
        self, request: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``request(fingerprint, gpu worker)`` requests a tokenizer's JSON."""
        self._request = request
        self._clock = clock
        self._lock = threading.Lock()
        self._built: OrderedDict[_Key, TokenizerVocabulary] = OrderedDict()
        self._requested: dict[str, float] = {}
        """For each requested fingerprint: the time of the last request."""
        self._waiting: dict[str, list[_Waiting]] = {}

    def want(self, name: VocabularyName, gpu: int, ready: Ready) -> None:
        """Calls ``ready`` immediately if the vocabulary is cached. If not, calls ``ready`` when the
        tokenizer has arrived or the wait has failed. The tokenizer is requested from the GPU worker
        ``gpu``, unless it has been requested already."""
        special = tuple(sorted(name.special.items()))
        key = (name.fingerprint, name.size, tuple(name.eos), special)
        now = self._clock()
        with self._lock:
            built = self._find(key)
            if built is None:
                waiting = self._waiting.setdefault(name.fingerprint, [])
                waiting.append(_Waiting(key, gpu, ready, now))
                requested = name.fingerprint in self._requested
                self._requested.setdefault(name.fingerprint, now)
        if built is not None:
            ready(built, "")
        elif not requested:
            self._request(name.fingerprint, gpu)

    def arrived(self, fingerprint: str, json: bytes | None, error: str) -> None:
        """Handles a tokenizer that has arrived, or an error that has arrived instead. This may take
        seconds, so it must not run on the bus thread, which receives the worker's messages."""
        with self._lock:
            waiting = self._waiting.pop(fingerprint, [])
            self._requested.pop(fingerprint, None)
        for key, _, ready, _ in waiting:
            with self._lock:
                vocabulary = self._find(key)
            failure = error or "the GPU worker did not send a tokenizer"
            if vocabulary is None and json is not None:
                try:
                    vocabulary = TokenizerVocabulary.from_json(
                        json.decode(), size=key[1], eos=key[2], fingerprint=fingerprint
                    )
                except BaseException as failed:  # This includes panics of the library.
                    failure = f"the model's tokenizer cannot be used: {failed}"
                else:
                    vocabulary.assign_roles(dict(key[3]))
                    with self._lock:
                        self._built[key] = vocabulary
                        while len(self._built) > KEPT:
                            self._built.popitem(last=False)
            ready(vocabulary, failure if vocabulary is None else "")

    def retry(self) -> None:
        """Called periodically. Requests missing tokenizers again, from the GPU worker of the latest
        waiting request. A request that has waited too long fails."""
        if not self._waiting:
            return
        now = self._clock()
        expired: list[_Waiting] = []
        requests: list[tuple[str, int]] = []
        with self._lock:
            for fingerprint, waiting in list(self._waiting.items()):
                expired += [one for one in waiting if now - one.since >= GIVE_UP_S]
                left = [one for one in waiting if now - one.since < GIVE_UP_S]
                if not left:
                    del self._waiting[fingerprint]
                    self._requested.pop(fingerprint, None)
                    continue
                self._waiting[fingerprint] = left
                if now - self._requested[fingerprint] >= RETRY_S:
                    self._requested[fingerprint] = now
                    requests.append((fingerprint, left[-1].gpu))
        for fingerprint, gpu in requests:
            self._request(fingerprint, gpu)
        for one in expired:
            one.ready(None, f"the model's tokenizer did not arrive within {GIVE_UP_S:g} s")

    def _find(self, key: _Key) -> TokenizerVocabulary | None:
        """A vocabulary from the cache, marked as used. The caller holds the lock."""
        vocabulary = self._built.get(key)
        if vocabulary is not None:
            self._built.move_to_end(key)
        return vocabulary
