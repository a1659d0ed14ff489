"""The vocabularies of this worker: requested over the bus, built once, the last ones kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from ....protocol.worker_messages import VocabularyName
from .vocabulary import TokenizerVocabulary

Ready = Callable[[TokenizerVocabulary | None, str], None]
"""Called with the vocabulary, or with None and the reason why there is none."""

RETRY_S = 2.0
"""How long an answer may take before the tokenizer is requested again, in seconds: the GPU worker
that was asked may be gone, and others have the same tokenizer."""
GIVE_UP_S = 30.0
"""How long a request waits for a tokenizer, in seconds."""
KEPT = 16
"""Vocabularies that are kept, those used last; sequences keep theirs in any case."""

_Key = tuple[str, int, tuple[int, ...]]


class _Waiting(NamedTuple):
    """A request that waits for a tokenizer."""

    key: _Key
    gpu: int
    ready: Ready
    since: float


class Vocabularies:
    """By tokenizer, size and end-of-sequence tokens. Safe from any thread."""

    def __init__(
        self, request: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``request(fingerprint, gpu worker)`` asks for a tokenizer's JSON."""
        self._request = request
        self._clock = clock
        self._lock = threading.Lock()
        self._built: OrderedDict[_Key, TokenizerVocabulary] = OrderedDict()
        self._requested: dict[str, float] = {}
        """When each tokenizer was requested last."""
        self._waiting: dict[str, list[_Waiting]] = {}

    def want(self, name: VocabularyName, gpu: int, ready: Ready) -> None:
        """Calls ``ready``, at once or when the GPU worker ``gpu`` has sent the tokenizer."""
        key = (name.fingerprint, name.size, tuple(name.eos))
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
        """A tokenizer has come, or why it cannot. Takes up to seconds: not for the bus thread."""
        with self._lock:
            waiting = self._waiting.pop(fingerprint, [])
            self._requested.pop(fingerprint, None)
        for key, _, ready, _ in waiting:
            with self._lock:
                vocabulary = self._find(key)
            failure = error or "the GPU worker sent no tokenizer"
            if vocabulary is None and json is not None:
                try:
                    vocabulary = TokenizerVocabulary.from_json(
                        json.decode(), size=key[1], eos=key[2], fingerprint=fingerprint
                    )
                except BaseException as failed:  # A panic of the tokenizers library too.
                    failure = f"the model's tokenizer cannot be used: {failed}"
                else:
                    with self._lock:
                        self._built[key] = vocabulary
                        while len(self._built) > KEPT:
                            self._built.popitem(last=False)
            ready(vocabulary, failure if vocabulary is None else "")

    def retry(self) -> None:
        """Requests again what has not come, from the GPU worker of the latest request that waits;
        gives up on requests that have waited for too long. To be called now and then."""
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
            one.ready(None, f"no GPU worker sent the model's tokenizer within {GIVE_UP_S:g} s")

    def _find(self, key: _Key) -> TokenizerVocabulary | None:
        """Under the lock: a vocabulary that has been built; it counts as used now."""
        vocabulary = self._built.get(key)
        if vocabulary is not None:
            self._built.move_to_end(key)
        return vocabulary
